"""The check of a kernel on the devices of a run: right kernels pass, wrong ones are named and left."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from ringformer.models import kernel_check
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.kernel_check import Trial, check_kernel, find_fault, make_trial
from ringformer.models.registry import preset_config
from ringformer.ops.kernels import cudnn_calls, cudnn_documents
from ringformer.parallel.mesh import make_mesh
from tests.ops.kernels.cudnn_emulation import emulated

__all__ = ["emulated"]

CUDNN = Trial("cudnn", 4, 2, 16, "bfloat16", "zigzag", 64, None, None, packed=True, backward=True)
MESH = make_mesh("1,1,1,8", jax.devices())
MODEL = LlamaConfig(**preset("tiny") | {"kernel": "cudnn"})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cudnn_documents, "SHORTEST", 8)


@pytest.mark.usual("False-contiguous")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_right_kernel_passes(layout, packed, emulated):
    assert find_fault(replace(CUDNN, layout=layout, packed=packed), jax.devices()[0]) is None
    assert find_fault(replace(CUDNN, layout="striped", packed=False, backward=False), jax.devices()[0]) is None
    assert find_fault(replace(CUDNN, layout=layout, packed=packed, window=9), jax.devices()[0]) is None


@pytest.mark.slow
def test_the_tpu_kernels_pass():
    trial = Trial("pallas", 2, 1, 128, "bfloat16", "zigzag", 512, 128, 128, packed=True, backward=True, window=200)
    with pltpu.force_tpu_interpret_mode():
        assert find_fault(trial, jax.devices()[0]) is None


def scaled(result, factor):
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), result)


FAULTS = {
    "keys beyond a rectangle are seen": (
        "forward",
        lambda call: lambda *x: call(*x[:-2], None, None),
        "o of the own documents",
    ),
    "no causal mask": (
        "forward",
        lambda call: lambda q, k, v, scale, causal, *others: call(q, k, v, scale, False, *others),
        "o of the own block",
    ),
    "dq twice": (
        "backward",
        lambda call: lambda *x: (scaled((grads := call(*x))[0], 2.0), *grads[1:]),
        "dq of the own block",
    ),
    "dk and dv exchanged": (
        "backward",
        lambda call: lambda *x: ((grads := call(*x))[0], grads[2], grads[1]),
        "dk of the own block",
    ),
    "a window is wide": ("forward", lambda call: lambda *x: call(*x[:-1], None), "dk in a window"),
    "dq of a window is that of all keys": (
        "backward",
        lambda call: lambda *x: call(*x[:-1], None),
        "dk in a window",
    ),
    "o is NaN": ("forward", lambda call: lambda *x: scaled(call(*x), jnp.nan), "o of the own block is nan"),
}


@pytest.mark.usual("dk and dv exchanged")
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_named(name, emulated, monkeypatch):
    kind, wrong, message = FAULTS[name]
    monkeypatch.setattr(cudnn_calls, kind, wrong(getattr(cudnn_calls, kind)))
    fault = find_fault(replace(CUDNN, window=9 * ("window" in name)), jax.devices()[0])
    assert fault is not None and message in fault and "that of kernel='xla' is" in fault


def test_auto_falls_back_loudly_and_a_named_kernel_is_an_error():
    """cuDNN's calls cannot be compiled here: the compiler's reason is the verdict."""
    auto = replace(MODEL, kernel="auto")
    model, line = check_kernel(MODEL, "kernel cudnn: the fastest", auto, MESH, 64)
    assert isinstance(model, LlamaConfig) and model.kernel == "xla"
    assert "WARNING: kernel='cudnn' FAILED its check on cpu: NotImplementedError: kernel='cudnn' runs on GPUs" in line
    with pytest.raises(ValueError, match=r"is wrong on cpu: NotImpl.*kernel='xla' works; kernel_check=false uses it"):
        check_kernel(MODEL, "kernel cudnn: as configured", MODEL, MESH, 64)
    unchecked = replace(MODEL, kernel_check=False)
    assert check_kernel(unchecked, "kernel cudnn: as configured", MODEL, MESH, 64)[0] is unchecked


def test_a_passed_check_is_remembered_for_its_shapes(emulated, monkeypatch):
    def check(**options):
        return check_kernel(MODEL, "kernel cudnn: the fastest", replace(MODEL, kernel="auto"), MESH, 64, **options)

    assert check()[1] == "kernel cudnn: the fastest; checked on cpu"
    monkeypatch.setattr(kernel_check, "find_fault", lambda *_: "it is tried")
    assert check()[0] is MODEL
    assert "it is tried" in check(packed=True)[1]
    monkeypatch.setattr(kernel_check, "version", lambda package: "0")
    assert "it is tried" in check()[1]


def test_a_fault_elsewhere_counts(emulated, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(kernel_check.multihost_utils, "process_allgather", lambda x: [0, 1])
    auto = replace(MODEL, kernel="auto")
    model, line = check_kernel(MODEL, "kernel cudnn: the fastest", auto, MESH, 64)
    assert isinstance(model, LlamaConfig) and model.kernel == "xla" and "it failed on process 1" in line


def test_the_blocks_of_a_run():
    """Heads of a tp rank and a head group, its chunks, and few tokens."""
    model = replace(LlamaConfig(**preset("llama3.1_8b")), kernel="pallas", q_chunk=2048, k_chunk=1024, head_groups=2)
    trial = make_trial(model, 65536, 2, 8, True, True)
    assert (trial.heads, trial.key_heads, trial.tokens, trial.q_chunk) == (8, 2, 8192, 2048)
    assert make_trial(model, 1024, 1, 8, False, True).tokens == 1024


def test_a_window_is_tried_where_the_kernel_computes_it():
    model = preset_config("gemma3_12b", kernel="cudnn", layout="zigzag")
    assert make_trial(model, 16384, 1, 8, False, True).window == 1024
    assert make_trial(model, 16384, 1, 8, True, True).window == 0  # beside segment ids, XLA computes it


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_lengths_that_are_not_whole_chunks(layout):
    """The TPU kernels get padded arrays, part by part; the results are compared without the padding."""
    trial = Trial("pallas", 2, 1, 128, "bfloat16", layout, 320, 128, 128, packed=True, backward=True)
    with pltpu.force_tpu_interpret_mode():
        assert find_fault(trial, jax.devices()[0]) is None


def test_an_error_of_any_kind_is_a_fault(monkeypatch):
    """An error of the reference, such as no memory, and one without a message."""

    def no_memory(trial, arrays):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(kernel_check, "_blocks", no_memory)
    assert find_fault(CUDNN, jax.devices()[0]) == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"

    def silent(trial, arrays):
        raise AssertionError

    monkeypatch.setattr(kernel_check, "_blocks", silent)
    assert find_fault(CUDNN, jax.devices()[0]) == "AssertionError: "


def test_a_fallback_keeps_the_chunks_of_the_config():
    auto = replace(MODEL, kernel="auto", q_chunk=256, k_chunk=128)
    model, _ = check_kernel(replace(auto, kernel="cudnn"), "kernel cudnn: the fastest", auto, MESH, 64)
    assert isinstance(model, LlamaConfig) and (model.kernel, model.q_chunk, model.k_chunk) == ("xla", 256, 128)


def test_vanilla_attention_has_no_kernel_to_check():
    vanilla = replace(MODEL, attention="vanilla")
    assert check_kernel(vanilla, "kernel cudnn: as configured", vanilla, MESH, 64)[0] is vanilla


@pytest.mark.usual("a file")
@pytest.mark.parametrize("home", ["a file", "none"])
def test_a_home_that_cannot_be_written(home, emulated, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    (tmp_path / "file").write_text("")
    place = "~/.cache" if home == "none" else f"{tmp_path}/file/x"
    monkeypatch.setattr(kernel_check.os.path, "expanduser", lambda _: place)
    monkeypatch.chdir(tmp_path)
    auto = replace(MODEL, kernel="auto")
    assert check_kernel(MODEL, "kernel cudnn: the fastest", auto, MESH, 64)[0] is MODEL
