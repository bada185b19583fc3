"""Comparison of a converted model's logits with those of transformers, on the CPU in float32."""

import gc
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringformer.checkpoints.saved_model import model_of
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import DTYPES, TensorFolder
from ringformer.files.hub import MODEL_FILES, local
from ringformer.files.untrusted import read_object
from ringformer.inference.generator import load_model
from ringformer.models.decoder import Decoder
from ringformer.models.own_attention import REGISTERED

TOLERANCE = 1e-4
"""Largest absolute difference between logits at which two models count as the same."""


USUAL_LENGTH = 512
"""Tokens that models are compared on, if their context is as long."""


class Comparison(NamedTuple):
    """Difference between two models' logits on the same tokens; `str` gives a table and a verdict."""

    max_difference: float
    """Largest absolute difference of a logit."""
    mean_kl: float
    """Mean KL(transformers | ringformer), in nats per position."""
    top: list[tuple[int, float, int, float]]
    """Ten likeliest next tokens after the last position: id and logit of transformers, id and logit of ringformer."""
    rounded: str | None = None
    """Dtype of the Hugging Face tensors, if ringformer's parameters had to be rounded to it."""

    @property
    def agrees(self) -> bool:
        return self.max_difference <= TOLERANCE

    def __str__(self) -> str:
        lines = ["rank  transformers          ringformer"]
        for rank, (a, x, b, y) in enumerate(self.top, 1):
            lines.append(f"{rank:4}  {a:7} {x:12.6f}  {b:7} {y:12.6f}{'' if a == b else '  differ'}")
        lines.append(f"largest difference of a logit {self.max_difference:.3g}, mean KL {self.mean_kl:.3g} nats")
        if self.rounded:
            lines.append(
                f"ringformer's parameters were rounded to {self.rounded}, the dtype of the Hugging Face tensors"
            )
        verdict, sign = ("the same model", "<=") if self.agrees else ("NOT the same model", ">")
        return "\n".join([*lines, f"verdict: {verdict} ({self.max_difference:.3g} {sign} {TOLERANCE:g})"])


def verify(hf: str | Path, run_dir: str | Path, *, length: int | None = None, seed: int = 0) -> Comparison:
    """Compare two models on `length` random tokens, in float32. Only one model is in memory at a time.

    An export in bfloat16 or float16 rounds the run's parameters. Each parameter is therefore first rounded to the dtype
    in which `hf` stores it, so that this rounding does not count as a difference.

    Args:
      length: None: the context of `hf`, at most `USUAL_LENGTH`; float32 angles of longer ropes differ more.
    """
    if length is not None and length < 1:
        raise ValueError(f"length={length} must be at least 1")
    hf = local(hf, MODEL_FILES)
    expected, tokens = _transformers_logits(hf, length, seed)
    gc.collect()
    with jax.default_device(jax.devices("cpu")[0]):
        own = getattr(model_of(run_dir), "attention", "") in REGISTERED
        model = load_model(run_dir, compute_dtype="float32", **{} if own else {"attention": "blockwise"})
        if model.config.vocab_size != expected.shape[-1]:
            raise ValueError(
                f"{hf} has a vocabulary of {expected.shape[-1]} tokens, {run_dir} one of {model.config.vocab_size}: "
                "they are different models"
            )
        model, rounded = _rounded(model, TensorFolder(hf))
        logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)))[0]
    return compare_logits(expected, logits)._replace(rounded=rounded)


@np.errstate(invalid="ignore")  # infinity and NaN are differences, too
def compare_logits(expected: np.ndarray, logits: np.ndarray) -> Comparison:
    """Compare logits [T, V]. A difference that is not finite counts as infinite."""
    wide = [x.astype(np.float64) for x in (expected, logits)]
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in wide)
    ids = [np.argsort(-x[-1])[:10] for x in wide]
    columns = (column.tolist() for x, i in zip(wide, ids, strict=True) for column in (i, x[-1, i]))
    return Comparison(
        float(np.nan_to_num(np.abs(wide[0] - wide[1]), nan=np.inf, posinf=np.inf).max()),
        float((np.exp(p) * (p - q)).sum(-1).mean()),
        list(zip(*columns, strict=True)),
    )


def _transformers_logits(path: Path, length: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("verify compares with transformers: pip install 'transformers>=5' torch") from None
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: name the folder of a Hugging Face checkpoint")
    if "text_config" in read_object(path, "config.json"):
        raise ValueError(
            f"{path} is a vision model, of which only the text model was brought: export it with ringformer convert "
            "to-hf, and verify that folder"
        )
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    length = length or min(USUAL_LENGTH, getattr(model.config, "max_position_embeddings", USUAL_LENGTH))
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, length))
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits[0].numpy(), tokens


def _rounded(model: Decoder, tensors: TensorFolder) -> tuple[Decoder, str | None]:
    """Round the model's parameters to the dtypes of `tensors`; also return those dtypes if any value changed."""
    structure, params = nnx.split(model)
    flat, changed = dict(nnx.to_flat_state(params)), set()
    for weight in weights(model.config):
        stored = [DTYPES[tensors.dtypes[name]] for name in weight.names if name in tensors.dtypes]
        dtype = max(stored, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))
        old = flat[weight.path]
        new = old.replace(old[...].astype(dtype).astype(jnp.float32))
        if not bool((new[...] == old[...]).all()):
            changed.add(dtype.name)
        flat[weight.path] = new
    return nnx.merge(structure, nnx.from_flat_state(flat)), ", ".join(sorted(changed)) or None
