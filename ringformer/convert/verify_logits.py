"""Compare logits of a converted model with those of transformers, on the CPU in float32."""

import gc
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import DTYPES, TensorFolder
from ringformer.inference.generator import load_model
from ringformer.models.llama import Llama

TOLERANCE = 1e-4
"""Largest absolute difference of a logit for which two models count as the same."""


class Comparison(NamedTuple):
    """Difference of two models' logits on the same tokens; its string is a table and a verdict."""

    max_difference: float
    """Largest absolute difference of a logit."""
    mean_kl: float
    """KL(transformers | ringformer), nats per position."""
    top: list[tuple[tuple[int, float], tuple[int, float]]]
    """Ten likeliest tokens after the last one: (id, logit) of transformers and of ringformer."""
    rounded: str | None = None
    """Dtype of the Hugging Face tensors, if ringformer's parameters had to be rounded to it."""

    @property
    def agrees(self) -> bool:
        return self.max_difference <= TOLERANCE

    def __str__(self) -> str:
        lines = ["rank  transformers          ringformer"]
        for rank, ((a, x), (b, y)) in enumerate(self.top, 1):
            lines.append(f"{rank:4}  {a:7} {x:12.6f}  {b:7} {y:12.6f}{'' if a == b else '  differ'}")
        lines.append(f"largest difference of a logit {self.max_difference:.3g}, mean KL {self.mean_kl:.3g} nats")
        if self.rounded:
            lines.append(
                f"ringformer's parameters were rounded to {self.rounded}, the dtype of the Hugging Face tensors"
            )
        verdict = "the same model" if self.agrees else "NOT the same model"
        sign = "<=" if self.agrees else ">"
        return "\n".join([*lines, f"verdict: {verdict} ({self.max_difference:.3g} {sign} {TOLERANCE:g})"])


def verify(hf: str | Path, run_dir: str | Path, *, length: int = 512, seed: int = 0) -> Comparison:
    """Compare two models on `length` random tokens. They are in memory one at a time, in float32.

    An export in bfloat16 or float16 rounds the run's parameters, so they are first rounded to the dtype in which `hf`
    stores each. Only differences due to that rounding are tolerated.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("verify compares with transformers: pip install 'transformers>=5' torch") from None
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    expected, tokens = _transformers_logits(Path(hf), length, seed)
    gc.collect()
    with jax.default_device(jax.devices("cpu")[0]):
        model = load_model(run_dir, compute_dtype="float32", attention="blockwise")
        if model.config.vocab_size != expected.shape[-1]:
            raise ValueError(
                f"{hf} has a vocabulary of {expected.shape[-1]} tokens, {run_dir} one of {model.config.vocab_size}: "
                "they are different models"
            )
        model, rounded = _rounded(model, TensorFolder(Path(hf)))
        logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)))[0]
    return compare_logits(expected, logits)._replace(rounded=rounded)


def compare_logits(expected: np.ndarray, logits: np.ndarray) -> Comparison:
    """Compare logits [T, V]. A difference that is not finite counts as infinite."""
    difference = np.abs(expected.astype(np.float64) - logits).max()
    p, q = (_log_softmax(x.astype(np.float64)) for x in (expected, logits))
    top = [[(int(i), float(x[-1][i])) for i in np.argsort(-x[-1])[:10]] for x in (expected, logits)]
    return Comparison(
        float(difference) if np.isfinite(difference) else float("inf"),
        float((np.exp(p) * (p - q)).sum(-1).mean()),
        list(zip(*top, strict=True)),
    )


def _transformers_logits(path: Path, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: name the folder of a Hugging Face checkpoint")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, length))
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits[0].numpy(), tokens


def _rounded(model: Llama, tensors: TensorFolder) -> tuple[Llama, str | None]:
    """Round the model's parameters to the dtypes of `tensors`; also return those dtypes if any value changed."""
    structure, params = nnx.split(model)
    flat, changed = dict(nnx.to_flat_state(params)), set()
    for weight in weights(model.config):
        kinds = {tensors.dtypes[name] for name in weight.names if name in tensors.dtypes}
        dtype = DTYPES[max(kinds, key=lambda kind: DTYPES[kind].itemsize)] if kinds else np.dtype(np.float32)
        old = flat[weight.path]
        new = old.replace(old[...].astype(dtype).astype(jnp.float32))
        if not bool((new[...] == old[...]).all()):
            changed.add(dtype.name)
        flat[weight.path] = new
    return nnx.merge(structure, nnx.from_flat_state(flat)), ", ".join(sorted(changed)) or None


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
