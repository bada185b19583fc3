"""The table of chips: found by the name that JAX gives a device, and once for each."""

import re

import jax
import jax.numpy as jnp
import pytest

from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware import CHIPS, CLOUD_TPUS, SLICES, GiB, chip_of
from tests.hlo import on_tpu


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v3", "v3"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_a_device_is_known_by_its_kind(device_kind, name):
    assert chip_of(device_kind) is CHIPS[name]


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA GeForce RTX 4090", "TPU v2"])
def test_a_device_without_a_data_sheet_here_is_none(device_kind):
    assert chip_of(device_kind) is None


@on_tpu
@pytest.mark.parametrize("name", ["v3-512", "v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_the_compiler_calls_a_target_s_devices_as_the_table_does(name):
    target = find_target(name)
    assert {chip_of(device.device_kind) for device in target.devices()} == {target.chip}


@on_tpu
@pytest.mark.parametrize("name", SLICES)
def test_the_memory_is_what_the_compiler_has(name):
    """As it says when an array is larger."""
    chip = CHIPS[name]
    one = jax.sharding.SingleDeviceSharding(find_target(f"{name}-8").devices()[0])
    array = jax.ShapeDtypeStruct((2 * chip.hbm_bytes // 4096, 1024), jnp.float32, sharding=one)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda x: x + 1).lower(array).compile()
    said = re.search(r"(?:of|available HBM) \(?([\d.]+)G", str(error.value))
    assert said is not None and float(said[1]) == pytest.approx(chip.hbm_bytes / GiB, abs=0.006)


def test_slices_are_of_known_chips_and_rented_under_one_name():
    assert set(SLICES) == {name for name, chip in CHIPS.items() if chip.kind == "tpu"}
    assert set(CLOUD_TPUS) <= set(SLICES)
    assert len({cloud.accelerator_type for cloud in CLOUD_TPUS.values()}) == len(CLOUD_TPUS)


@pytest.mark.parametrize("name", SLICES)
def test_a_tpu_s_peak_is_its_clock_times_the_flops_of_a_cycle(name):
    chip = CHIPS[name]
    assert chip.tensor_cores is not None and chip.multiprocessors is None
    cycle = chip.tensor_cores.count * chip.tensor_cores.matrix_flops_per_cycle
    assert cycle * chip.clock_hz == pytest.approx(chip.bf16_flops, rel=0.003)


def test_every_chip_has_rates():
    """And more than 100 FLOPs for each byte of HBM: a unit or a core too many would show."""
    for chip in CHIPS.values():
        assert 0.9e9 < chip.clock_hz < 2.5e9
        assert 100 < chip.bf16_flops / chip.hbm_bandwidth < 650
