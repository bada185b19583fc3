"""Comparison of a converted model's next-token distributions with those of transformers, on the CPU in float32.

transformers computes attention in two forms, eager and sdpa, which differ by float32 rounding alone. How far they lie
apart on the same tokens is the noise of this model, and limits are multiples of it: an absolute limit would be too
narrow for a large model, and too wide for a flat one. KL is quadratic in the differences of logits.
"""

import gc
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.checkpoints.saved_model import model_of
from ringformer.convert.hf_config import with_rope
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import DTYPES, TensorFolder
from ringformer.convert.sample_text import TEXT
from ringformer.files.hub import MODEL_FILES, local
from ringformer.files.run_layout import CONFIG
from ringformer.files.untrusted import contained_files, read_object
from ringformer.inference.generator import load_model
from ringformer.models.decoder import Decoder
from ringformer.models.own_attention import REGISTERED

MEAN_MULTIPLE = 50
"""Mean KL at which two models count as the same, over that between transformers' forms. Right models have 1.3 to 7."""

LARGEST_MULTIPLE = 500
"""The same for the largest KL of a position. Right models have 0.5 to 26."""

MOST_MEAN = 1e-6
MOST_LARGEST = 1e-3
"""Limits of the mean and the largest KL, in nats, whatever the noise: a model that differs this much from itself is no
reference."""

USUAL_LENGTH = 512
"""Tokens that models are compared on, if their context is as long."""

POSITIONS = 64
"""Positions whose distributions are in float64 at once."""


class Difference(NamedTuple):
    """Distance between the next-token distributions of two models on the same tokens."""

    mean_kl: float
    """Mean KL(first | second) of a position, in nats. Infinite if a logit is not finite."""
    largest_kl: float
    """Largest KL of a position, in nats."""
    position: int
    """Position of the largest KL, from 0."""
    logit: float
    """Largest absolute difference of a logit."""
    gaps: tuple[float, ...]
    """For each position at which the likeliest tokens differ: difference of their logits in the first model."""


class Comparison(NamedTuple):
    """Difference between transformers and ringformer; `str` gives a table and a verdict."""

    difference: Difference
    """Between transformers' eager form and ringformer."""
    noise: Difference
    """Between transformers' eager form and its sdpa form."""
    tokens: str
    """Number and kind of the tokens, for example "512 tokens of text"."""
    length: int
    rounding: float
    """Rounding of a float32 logit: half a unit in the last place of the largest one."""
    top: list[tuple[int, float, int, float]]
    """Ten likeliest next tokens after the last position: id and logit of transformers, id and logit of ringformer."""
    rounded: str | None = None
    """Dtype of the Hugging Face tensors, if ringformer's parameters had to be rounded to it."""
    rope: RopeChange | None = None
    """Rope of both models, if the conversion changed it."""

    @property
    def mean_limit(self) -> float:
        return min(MEAN_MULTIPLE * max(self.noise.mean_kl, self.rounding**2), MOST_MEAN)

    @property
    def largest_limit(self) -> float:
        return min(LARGEST_MULTIPLE * max(self.noise.largest_kl, self.rounding**2), MOST_LARGEST)

    @property
    def tie(self) -> float:
        """Difference of two logits up to which either may be the likeliest: KL is quadratic in it."""
        widest = math.sqrt(LARGEST_MULTIPLE) * max(self.noise.logit, self.rounding)
        return min(widest, math.sqrt(MOST_LARGEST))

    @property
    def faults(self) -> list[str]:
        """Limits that are exceeded, in words."""
        mean = self.difference.mean_kl
        largest = self.difference.largest_kl
        changed = sum(gap > self.tie for gap in self.difference.gaps)
        faults = []
        if mean > self.mean_limit:
            faults.append(f"mean KL {mean:.3g} > {self.mean_limit:.3g}")
        if largest > self.largest_limit:
            faults.append(f"largest KL {largest:.3g} > {self.largest_limit:.3g}")
        if changed:
            faults.append(f"another top choice at {changed} of {self.length} positions")
        return faults

    @property
    def agrees(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = ["rank  transformers          ringformer"]
        for rank, (a, x, b, y) in enumerate(self.top, 1):
            differ = "" if a == b else "  differ"
            lines.append(f"{rank:4}  {a:7} {x:12.6f}  {b:7} {y:12.6f}{differ}")
        ours = self.difference
        noise = self.noise
        lines.append(f"{self.tokens:24}  ringformer     limit  sdpa form of transformers")
        lines.append(f"mean KL, in nats        {ours.mean_kl:12.3g} {self.mean_limit:9.3g}  {noise.mean_kl:.3g}")
        lines.append(
            f"largest KL, in nats     {ours.largest_kl:12.3g} {self.largest_limit:9.3g}  {noise.largest_kl:.3g}"
            f"  (at position {ours.position})"
        )
        same = 1 - len(ours.gaps) / self.length
        theirs = 1 - len(noise.gaps) / self.length
        lines.append(f"same top choice         {same:12.2%}            {theirs:.2%}")
        lines.append(f"largest logit difference{ours.logit:12.3g}            {noise.logit:.3g}")
        if self.rounded:
            lines.append(
                f"ringformer's parameters were rounded to {self.rounded}, the dtype of the Hugging Face tensors"
            )
        if self.rope:
            lines.append(f"transformers computed with the rope of the conversion: {self.rope}")
        if self.agrees:
            lines.append(f"verdict: the same model (mean KL {ours.mean_kl:.3g} <= {self.mean_limit:.3g})")
        else:
            lines.append(f"verdict: NOT the same model ({'; '.join(self.faults)})")
        return "\n".join(lines)


def verify(hf: str | Path, run_dir: str | Path, *, length: int | None = None, seed: int = 0) -> Comparison:
    """Compare two models on `length` tokens, in float32. Only one model is in memory at a time.

    The tokens are those of a text if `hf` has a tokenizer, else random. An export in bfloat16 or float16 rounds the
    run's parameters. Each parameter is therefore first rounded to the dtype in which `hf` stores it, so that this
    rounding does not count as a difference. If the conversion changed the rope, transformers computes with that rope.

    Args:
      length: None: the context of `hf`, at most `USUAL_LENGTH`. transformers' eager form needs heads x length^2 floats.
      seed: of the random tokens.

    Raises ValueError for models of two vocabularies, a vision model, and a length below 1.
    """
    if length is not None and length < 1:
        raise ValueError(f"length={length} must be at least 1")
    hf = local(hf, MODEL_FILES)
    _check_text_model(hf)
    config = model_of(run_dir)
    rope = RopeChange.of(read_object(run_dir, CONFIG).get("rope") or {})
    expected, noise, tokens, kind = _transformers_logits(hf, length, seed, rope)
    gc.collect()
    with jax.default_device(jax.devices("cpu")[0]):
        settings = {"compute_dtype": "float32"}
        if getattr(config, "attention", "") not in REGISTERED:
            settings["attention"] = "blockwise"
        model = load_model(run_dir, **settings)
        if model.config.vocab_size != expected.shape[-1]:
            raise ValueError(
                f"{hf} has a vocabulary of {expected.shape[-1]} tokens, {run_dir} one of {model.config.vocab_size}: "
                "they are different models"
            )
        model, rounded = _rounded(model, TensorFolder(hf))
        logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)))[0]
    return compare_logits(expected, noise, logits, kind)._replace(rounded=rounded, rope=rope)


def compare_logits(expected: np.ndarray, noise: Difference, logits: np.ndarray, kind: str) -> Comparison:
    """Compare logits [T, V] in float32 with those of transformers. `kind` names the tokens: "text", "random ids"."""
    top = []
    for theirs, ours in zip(_likeliest(expected[-1]), _likeliest(logits[-1]), strict=True):
        top.append((*theirs, *ours))
    return Comparison(
        difference(expected, logits),
        noise,
        f"{len(expected)} tokens of {kind}",
        len(expected),
        float(np.spacing(np.abs(expected).max().astype(np.float32))) / 2,
        top,
    )


def _likeliest(logits: np.ndarray) -> list[tuple[int, float]]:
    """Return the ids and the logits of the ten likeliest tokens of a position, the likeliest first."""
    values = logits.astype(np.float64)
    ids = np.argsort(-values)[:10]
    return list(zip(ids.tolist(), values[ids].tolist(), strict=True))


@np.errstate(invalid="ignore", over="ignore")  # infinity and NaN are differences, too
def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare logits [T, V] in float32 by distributions in float64. A difference that is not finite is infinite."""
    kls = []
    largest = 0.0
    gaps = []
    for begin in range(0, len(first), POSITIONS):
        a = first[begin : begin + POSITIONS].astype(np.float64)
        b = second[begin : begin + POSITIONS].astype(np.float64)
        p = _log_probabilities(a)
        q = _log_probabilities(b)
        # The sum of p * (p - q), without its terms of first order, which cancel.
        kls.append(_infinite((np.exp(p) * (np.expm1(q - p) - (q - p))).sum(-1)))
        largest = max(largest, float(_infinite(np.abs(a - b)).max()))
        rows = np.arange(len(a))
        choices = a.argmax(-1)
        others = b.argmax(-1)
        gap = _infinite(a[rows, choices] - a[rows, others])
        gaps += gap[choices != others].tolist()
    kl = np.concatenate(kls)
    return Difference(float(kl.mean()), float(kl.max()), int(kl.argmax()), largest, tuple(gaps))


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _infinite(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values, nan=np.inf, posinf=np.inf, neginf=np.inf)


def _transformers_logits(
    path: Path, length: int | None, seed: int, rope: RopeChange | None
) -> tuple[np.ndarray, Difference, np.ndarray, str]:
    """Return what `both_forms` does, the tokens [1, T] and their kind."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("verify compares with transformers: pip install 'transformers>=5' torch") from None
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if rope is not None:
        keys = with_rope(read_object(path, "config.json"), rope)
        config = AutoConfig.for_model(keys["model_type"]).from_dict(keys)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    length = length or min(USUAL_LENGTH, getattr(model.config, "max_position_embeddings", USUAL_LENGTH))
    tokens, kind = _tokens(path, model.config.vocab_size, length, seed)
    eager, noise = both_forms(model, tokens)
    return eager, noise, tokens, kind


def _check_text_model(path: Path) -> None:
    """Raise FileNotFoundError if the folder has no config.json, and ValueError if that is of a vision model."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: name the folder of a Hugging Face checkpoint")
    if "text_config" in read_object(path, "config.json"):
        raise ValueError(
            f"{path} is a vision model, of which only the text model was brought: export it with ringformer convert "
            "to-hf, and verify that folder"
        )


def both_forms(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, Difference]:
    """Return a transformers model's logits [T, V] of tokens [1, T] in the eager form, and its difference from sdpa."""
    import torch

    logits = []
    for form in ("eager", "sdpa"):
        model.set_attn_implementation(form)
        with torch.no_grad():
            logits.append(model(torch.from_numpy(tokens)).logits[0].numpy())
    return logits[0], difference(*logits)


def _tokens(path: Path, vocab_size: int, length: int, seed: int) -> tuple[np.ndarray, str]:
    """Return tokens [1, length] and their kind: `TEXT`, repeated as needed, if transformers can read a tokenizer."""
    random = np.random.default_rng(seed).integers(0, vocab_size, (1, length))
    if not contained_files(path, ("tokenizer.json", "tokenizer.model")):
        return random, "random ids"
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        ids = tokenizer(TEXT).input_ids
    except Exception as error:  # any class, by tokenizer
        return random, f"random ids, because transformers cannot read the tokenizer ({type(error).__name__}: {error})"
    if max(ids) >= vocab_size:
        return random, f"random ids, because the tokenizer has id {max(ids)} and the model only {vocab_size} tokens"
    return np.resize(np.array(ids), (1, length)), "text"


def _rounded(model: Decoder, tensors: TensorFolder) -> tuple[Decoder, str | None]:
    """Round the model's parameters to the dtypes of `tensors`; also return those dtypes if any value changed."""
    structure, params = nnx.split(model)
    flat = dict(nnx.to_flat_state(params))
    changed = set()
    for weight in weights(model.config):
        stored = [DTYPES[tensors.dtypes[name]] for name in weight.names if name in tensors.dtypes]
        dtype = max(stored, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))
        old = flat[weight.path]
        new = old.replace(old[...].astype(dtype).astype(jnp.float32))
        if not bool((new[...] == old[...]).all()):
            changed.add(dtype.name)
        flat[weight.path] = new
    return nnx.merge(structure, nnx.from_flat_state(flat)), ", ".join(sorted(changed)) or None
