"""Configuration of a model for inference on a mesh."""

import math
from dataclasses import replace

from jax.sharding import Mesh

from ringformer.hardware import chip_of
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.kernel_check import check_kernel
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.own_attention import REGISTERED


def rank_devices_of(config: DecoderConfig, tp: int, sp: int) -> int:
    """Return how many of the config's `ulysses` devices exchange heads on a mesh: as many as its sizes allow."""
    return math.gcd(config.ulysses, sp, config.num_heads // tp)


def usual_dtype(config: DecoderConfig, platform: str) -> str:
    """Return the compute dtype of inference if none is asked for: float32 on CPUs, which take about eight times as long
    for a token in bfloat16; elsewhere the run's. `platform`: "cpu", "gpu" or "tpu"."""
    return "float32" if platform == "cpu" else config.compute_dtype


def inference_config(config: DecoderConfig, mesh: Mesh, local_tokens: int) -> tuple[DecoderConfig, str]:
    """Return the config for inference (ring attention on every mesh, no rematerialization, no offloading, heads
    exchanged among `rank_devices_of`), and a line that describes its kernel.

    Raises ValueError for a mesh that does not fit the model.
    """
    layout = config.layout if mesh.shape["sp"] > 1 else "contiguous"
    ulysses = rank_devices_of(config, mesh.shape["tp"], mesh.shape["sp"])
    own = REGISTERED.get(config.attention)
    if own is not None and own.visible is None:
        raise ValueError(
            f"attention {config.attention!r} was registered without visible(query, key, window), which decoding needs: "
            "pass it to register_attention"
        )
    attention = config.attention if own else "ring"
    config = replace(config, attention=attention, layout=layout, ulysses=ulysses)
    config = replace(config, remat="none", remat_group=1, full_remat_layers=0, head_groups=1, offload=False)
    config.check_mesh(mesh)
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    ranks = mesh.shape["sp"] // ulysses
    tp = mesh.shape["tp"]
    model, line = with_kernel(config, device.platform, chip, local_tokens * ulysses, ring_size=ranks, tp=tp)
    assert isinstance(model, DecoderConfig)
    return model, line


def checked_config(config: DecoderConfig, mesh: Mesh, local_tokens: int) -> tuple[DecoderConfig, str]:
    """Return `inference_config` with a kernel that passed its check on these devices (`models/kernel_check.py`)."""
    model, line = inference_config(config, mesh, local_tokens)
    checked, line = check_kernel(model, line, config, mesh, local_tokens * model.ulysses, backward=False)
    assert isinstance(checked, DecoderConfig)
    return checked, line
