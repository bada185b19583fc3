"""Whether the shifted positions of a run (`data.position_range`) mean something to its model."""

from ringformer.runs.config import Config


def check_position_range(config: Config) -> None:
    """Raise ValueError if shifted positions are asked for, and mean nothing to the model or what it never meets."""
    position_range, kinds = config.data.position_range, getattr(config.model, "layer_kinds", None)
    if not position_range or kinds is None:
        return
    rotated = [kind for kind in kinds if kind.rope is not None]
    if position_range <= config.seq_len:
        raise ValueError(
            f"data.position_range={position_range} must be above seq_len={config.seq_len}: positions of a sequence are "
            "shifted up to it; set it to the context to extend to, or to 0"
        )
    if not rotated:
        raise ValueError(f"data.position_range={position_range} shifts positions, which no layer of the model has")
    if windows := sorted({kind.window for kind in rotated if kind.window}):
        raise ValueError(
            f"data.position_range={position_range} shows layers with a window of {windows[0]:,} tokens distances that "
            "they never meet: their keys are always near. Extend such a model on long sequences"
        )
