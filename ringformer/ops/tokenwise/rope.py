"""Rotary position embedding with phases exact at any position (Su et al., RoFormer), and its scaling to long contexts.

A float32 angle `position * frequency` is off by 1 rad at 16M tokens. Here a phase is a fixed-point fraction of a turn.
A frequency has 64 bits, and its product with a position wraps around; the upper 32 bits of the product are the phase,
exact to one unit (2^-32 turns). Neighbouring and relative phases are therefore as exact at 2^31 as at 0.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Float64, Int, UInt32

from ringformer.ops.argument_checks import AnyArray
from ringformer.settings import LARGEST, check_settings

OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
}
"""Kinds of scaling, and the fields of `RopeScaling` that each uses."""

REQUIRED = ("factor", "original_max_position")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the frequencies of a model trained at a short context to a longer one.

    linear divides all frequencies by `factor` (Chen et al., position interpolation). yarn divides the frequencies that
    turn less than `beta_slow` times in the original context, keeps those that turn more than `beta_fast` times, and
    blends between the two. It also multiplies cos and sin by the attention factor (Peng et al., YaRN). llama3 does the
    same with `low_freq_factor` and `high_freq_factor` turns, but blends linearly in the frequency (LLaMA 3.1). A model
    with a larger `rope_theta` needs no scaling: kind none. A field that is None has the kind's default.

    Raises ValueError for a field that the kind does not use, a missing field, or an invalid value.
    """

    kind: Literal["none", "linear", "yarn", "llama3"] = "none"
    """Method of scaling."""
    factor: float | None = None
    """Ratio of the new context to the original one."""
    original_max_position: int | None = None
    """Tokens of the context that the model was originally trained at."""
    low_freq_factor: float | None = None
    """llama3: turns below which frequencies are divided; default 1."""
    high_freq_factor: float | None = None
    """llama3: turns above which frequencies are kept; default 4."""
    beta_fast: float | None = None
    """yarn: turns above which frequencies are kept; default 32."""
    beta_slow: float | None = None
    """yarn: turns below which frequencies are divided; default 1."""
    truncate: bool | None = None
    """yarn: round the ends of the blend outwards to whole frequencies; default True."""
    attention_factor: float | None = None
    """yarn: factor of cos and sin; default 0.1 ln(factor) + 1, or, if `mscale` and `mscale_all_dim` are both given and
    not zero, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale: float | None = None
    """yarn: see `attention_factor`."""
    mscale_all_dim: float | None = None
    """yarn: see `attention_factor`."""

    def __post_init__(self) -> None:
        check_settings(self, "rope_scaling.")
        if self.kind not in OPTIONS:
            raise ValueError(f"unknown rope_scaling.kind {self.kind!r}; known: {', '.join(OPTIONS)}")
        given = [f.name for f in fields(self) if f.name != "kind" and getattr(self, f.name) is not None]
        foreign = [name for name in given if name not in OPTIONS[self.kind]]
        if foreign:
            where = "; ".join(
                f"{name} belongs to {', '.join(k for k, names in OPTIONS.items() if name in names)}" for name in foreign
            )
            raise ValueError(
                f"rope_scaling of kind {self.kind} does not use {', '.join(foreign)} ({where}): change the kind, or "
                "omit the field"
            )
        for name in REQUIRED:
            if name in OPTIONS[self.kind] and name not in given:
                raise ValueError(f"rope_scaling of kind {self.kind} needs {name}")
        for name in given:
            value = getattr(self, name)
            if not math.isfinite(value) or (name in REQUIRED and value < 1) or value < 0:
                raise ValueError(f"rope_scaling.{name}={value} must be {'at least 1' if name in REQUIRED else '>= 0'}")
            if value > LARGEST:
                raise ValueError(f"rope_scaling.{name}={value} must be at most {LARGEST:,}: positions have 32 bits")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in OPTIONS[self.kind] and not 0 < self.option(low) < self.option(high):
                raise ValueError(
                    f"rope_scaling.{low}={self.option(low)} must be positive and less than {high}={self.option(high)}"
                )
        if self.attention_factor == 0:
            raise ValueError("rope_scaling.attention_factor=0 would make queries and keys zero")

    @property
    def amplitude(self) -> float:
        """Factor of cos and sin: YaRN's attention factor, else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.option("factor")
        if self.mscale and self.mscale_all_dim:
            return _yarn_amplitude(factor, self.mscale) / _yarn_amplitude(factor, self.mscale_all_dim)
        return _yarn_amplitude(factor, 1.0)

    def option(self, name: str) -> Any:
        """Return the value of a field, or the default of this kind. (Fields of other kinds stay None.)"""
        defaults = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "beta_slow": 1.0,
            "beta_fast": 32.0,
            "truncate": True,
        }
        value = getattr(self, name)
        return defaults.get(name) if value is None else value

    def _apply(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale the frequencies."""
        if self.kind == "none":
            return frequencies
        factor = self.option("factor")
        original = self.option("original_max_position")
        if self.kind == "linear":
            kept = np.zeros_like(frequencies)
        elif self.kind == "llama3":
            low = self.option("low_freq_factor")
            high = self.option("high_freq_factor")
            turns = original * frequencies / (2 * np.pi)
            kept = np.clip((turns - low) / (high - low), 0, 1)
        else:
            d = 2 * len(frequencies)

            def index(turns: float) -> float:
                """Return the index of the frequency with this number of turns in the original context."""
                return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

            first = index(self.option("beta_fast"))
            last = index(self.option("beta_slow"))
            if self.option("truncate"):
                first = math.floor(first)
                last = math.ceil(last)
            first = max(first, 0)
            last = min(last, d - 1)
            width = last - first or 0.001
            kept = 1 - np.clip((np.arange(d // 2) - first) / width, 0, 1)
        return frequencies * (kept + (1 - kept) / factor)


UNSCALED = RopeScaling()


def frequencies(head_dim: int, theta: float, scaling: RopeScaling = UNSCALED) -> Float64[np.ndarray, " {head_dim}//2"]:
    """Return the frequencies of the pairs of features, in radians per position: theta^(-2i/d), scaled."""
    plain = float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return scaling._apply(plain, float(theta))


def phases(
    positions: Int[AnyArray, "*shape"], frequencies: Float64[np.ndarray, " pairs"]
) -> UInt32[Array, "*shape pairs"]:
    """Compute the phase of each nonnegative position, in units of 2^-32 turns."""
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be int32; got {positions.dtype}, which cannot represent every position")
    turns = frequencies / (2 * np.pi) % 1.0
    high = np.floor(turns * 2.0**32)
    low = np.floor((turns * 2.0**32 - high) * 2.0**32)
    p = jnp.asarray(positions.astype(jnp.uint32))[..., None]
    return p * jnp.asarray(high, jnp.uint32) + _multiply_high(p, jnp.asarray(low, jnp.uint32))


def rotations(
    positions: Int[AnyArray, "*shape"], frequencies: Float64[np.ndarray, " pairs"], amplitude: float = 1.0
) -> tuple[Float32[Array, "*shape pairs"], Float32[Array, "*shape pairs"]]:
    """Compute `(cos, sin)` of the phases, times `amplitude`."""
    # As a signed integer, a phase is within half a turn of zero: float32 then resolves it to 2^-25 turns or better.
    signed = lax.bitcast_convert_type(phases(positions, frequencies), jnp.int32)
    angle = signed.astype(jnp.float32) * (2 * np.pi / 2**32)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return (cos, sin) if amplitude == 1.0 else (amplitude * cos, amplitude * sin)


def rotate(
    x: Float[Array, "B T H d"], rotation: tuple[Float32[Array, "#B T d//2"], Float32[Array, "#B T d//2"]]
) -> Float[Array, "B T H d"]:
    """Rotate the pairs (i, i + d/2) of features (Hugging Face order) by angles given as (cos, sin)."""
    cos, sin = (r[:, :, None, :] for r in rotation)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute the upper 32 bits of the 64-bit product of two uint32 from 16-bit halves."""
    mask = jnp.uint32(0xFFFF)
    a_high = a >> 16
    a_low = a & mask
    b_high = b >> 16
    b_low = b & mask
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & mask)) >> 16)
