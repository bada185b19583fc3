"""Memory of gathered keys: `ring="gathered"` holds the keys of a whole sequence on each device."""

from jax.sharding import AbstractMesh, Mesh

from ringformer.hardware import Chip, GiB
from ringformer.models.decoder_config import DecoderConfig


def check_gathered_keys(
    model: DecoderConfig, mesh: Mesh | AbstractMesh, seq_len: int, batch_size: int, chip: Chip | None
) -> None:
    """Raise ValueError if the gathered keys of one layer and their float32 gradients alone exceed the chip's memory.

    Args:
      batch_size: sequences of a microbatch, each of `seq_len` tokens.
      chip: None if it is not known; then nothing is checked.
    """
    if chip is None or not any(w == 0 or w >= seq_len for w in model.windows):  # a window gathers nothing
        return
    rows = batch_size // (mesh.shape["dp"] * mesh.shape["fsdp"])
    tp = mesh.shape["tp"]
    each = 2 * (4 + (2 if model.compute_dtype == "bfloat16" else 4))  # keys and values, with their gradients
    needed = rows * seq_len * model.held_key_heads(tp) * model.head_dim * each
    if needed > chip.hbm_bytes:
        raise ValueError(
            f"ring='gathered' holds the keys of {rows} x {seq_len:,} tokens and their gradients on each device, "
            f"{needed / GiB:.1f} GiB for one layer; {chip.name} has {chip.hbm_bytes / GiB:.1f} GiB: use ring='one_way'"
        )
