"""Positions of tokens as the heads of a layer see them: rotary embeddings, and queries that grow with position."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int

from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.tokenwise import rope


class Placement(NamedTuple):
    """Positions of tokens, as the heads of some layers see them."""

    rotation: tuple[Float32[Array, "#B T half"], Float32[Array, "#B T half"]] | None
    """(cos, sin) for the pairs of features of a head, at each token; None: heads see no positions."""
    query_scale: Float32[Array, "#B T"] | None
    """Factor of the rotated queries of a token; None: 1."""

    def __call__(self, q: Float[Array, "B T H d"], k: Float[Array, "B T K d"]) -> tuple[Array, Array]:
        """Rotate queries and keys, and scale queries."""
        if self.rotation is None:
            return q, k
        cos, sin = self.rotation
        if self.query_scale is not None:
            cos *= self.query_scale[..., None]
            sin *= self.query_scale[..., None]
        return rope.rotate(q, (cos, sin)), rope.rotate(k, self.rotation)


def placements(c: DecoderConfig, positions: Int[AnyArray, "#B T"]) -> tuple[Placement, ...]:
    """Return the `Placement` of tokens for each of `DecoderConfig.ropes`."""
    scale = c.query_scale(positions)
    placed = []
    for frequencies in c.ropes:
        rotation = None
        if frequencies is not None:
            theta, scaling = frequencies
            rotation = rope.rotations(positions, rope.frequencies(c.head_dim, theta, scaling), scaling.amplitude)
        placed.append(Placement(rotation, scale))
    return tuple(placed)
