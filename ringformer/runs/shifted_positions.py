"""Check that the shifted positions of a run (`data.position_range`) mean something to its model."""

from ringformer.data.packing.shifted_positions import check_range
from ringformer.models.interface import ModelConfig


def check_position_range(position_range: int, seq_len: int, model: ModelConfig) -> None:
    """Raise ValueError if shifted positions mean nothing to the model, or show it what it never meets.

    Args:
      position_range: tokens of the context up to which positions are shifted.
      seq_len: tokens of a sequence.
    """
    check_range(position_range, seq_len)
    kinds = getattr(model, "layer_kinds", None)
    if kinds is None:  # a registered model, which reads positions in its own way
        return
    rotated = [kind for kind in kinds if kind.rope is not None]
    if not rotated:
        raise ValueError(f"data.position_range={position_range} shifts positions, which no layer of the model has")
    if windows := sorted({kind.window for kind in rotated if kind.window}):
        raise ValueError(
            f"data.position_range={position_range} shows layers with a window of {windows[0]:,} tokens distances that "
            "they never meet: their keys are always near. Extend such a model on long sequences"
        )
