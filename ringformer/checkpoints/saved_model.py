"""Saved models, trained or converted: their architecture, their tokenizer, their latest checkpoint, and their
parameters on a mesh."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.checkpoints.array_folder import Restore
from ringformer.checkpoints.sharded_arrays import Restored, checkpoint_handler
from ringformer.checkpoints.verify import advising, restore_checked, saved_steps, tree_folder, unverified
from ringformer.data import Tokenizer, load_tokenizer
from ringformer.data.tokenizers.special_tokens import ModelTokens, model_tokens
from ringformer.files.hashes import content_hash
from ringformer.files.manifest import MANIFEST, check_named
from ringformer.files.run_layout import CHECKPOINTS, CONFIG, HF_CONFIG, IDENTITY, METRICS
from ringformer.files.untrusted import contained_files, read_object
from ringformer.models.interface import ModelConfig
from ringformer.models.own_attention import UnknownAttention
from ringformer.models.registry import FAMILIES, Family, family_of, hugging_face_of
from ringformer.parallel.lora import Lora, LoraConfig
from ringformer.parallel.parameters import abstract_params


def model_of(run_dir: str | Path) -> ModelConfig:
    """Return the architecture of the model in the folder of a run or of a converted model.

    Raises FileNotFoundError or ValueError if the folder is neither, and DamagedFiles if a file of a converted model
    differs from what was written.
    """
    if not (Path(run_dir) / CONFIG).is_file():
        raise FileNotFoundError(f"{run_dir} has no config.json: name the folder of a run or of a converted model")
    advice = "convert or copy the model again"
    if (Path(run_dir) / METRICS).is_file():  # a run
        advice = "bring back a copy"
        if (Path(run_dir) / IDENTITY).is_file():
            advice = "delete it, and the run's own command writes it again"
    saved = read_object(run_dir, CONFIG, advice)
    check_named(Path(run_dir))
    if "model" not in saved:
        advice = "name a run's folder"
        if "model_type" in saved:
            advice = "convert it first, with ringformer convert from-hf"
        raise ValueError(f"{run_dir}/config.json is not that of a run or of a converted model: {advice}")
    family = _family(run_dir, saved)
    try:
        return family.config(**saved["model"])
    except UnknownAttention as error:
        raise ValueError(f"{run_dir}: {error}, the one that the run was trained with") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{run_dir}/config.json describes no {family.config.__name__} ({error}); {advice}") from None


def hugging_face_tokens(run_dir: str | Path, model: Any) -> ModelTokens:
    """Return the end tokens and the context that the Hugging Face config.json of a saved model names."""
    table = hugging_face_of(type(model))
    absent = table.absent if table else {}
    return model_tokens(Path(run_dir), HF_CONFIG, model.vocab_size, absent)


def context_of(run_dir: str | Path) -> int | None:
    """Return the context in tokens with which a saved model was trained, or which its Hugging Face config.json names;
    None if neither is available."""
    trained = run_context(read_object(run_dir, CONFIG))
    return trained or hugging_face_tokens(run_dir, model_of(run_dir)).context


def run_context(saved: Mapping[str, Any]) -> int | None:
    """Return the context in tokens that a run trained, given its config.json: the length of its sequences, or the range
    of their shifted positions. None for a converted model."""
    if "seq_len" not in saved:
        return None
    return max(saved["seq_len"], (saved.get("data") or {}).get("position_range", 0))


def _family(run_dir: str | Path, saved: Mapping[str, Any]) -> Family:
    """Return the family of a run or of a converted model: the recorded one, whatever the preset of a run is.

    Folders of older versions record no family for a LLaMA, and none for a registered family, which the preset names.
    Raises ValueError if the family is not registered; the message names the file that registers it, which is not
    executed.
    """
    name = saved.get("family")
    preset = saved.get("preset")
    if name in tuple(FAMILIES):
        return FAMILIES[name]
    if name is not None and "family_file" not in saved:
        raise ValueError(f"{run_dir} holds a {name!r}, which this version of ringformer does not know")
    if name is not None:
        raise ValueError(
            f"{run_dir} is a run of {preset!r}, which is registered as {name!r} by {saved['family_file']}: pass that "
            "config file, --config=FILE, which will be executed"
        )
    if not preset:
        return FAMILIES["llama"]
    try:
        family = family_of(preset)
    except ValueError as error:
        raise ValueError(f"{run_dir}: {error}; a config file registered it: pass --config=FILE") from None
    return FAMILIES["llama"] if family.config.__module__.startswith("ringformer.") else family


def other_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> str | None:
    """Return the name of the tokenizer that a saved model was trained with, if it is not `tokenizer`; None if it is, or
    if the folder has none.

    A run records the name, which is a hash, of its tokenizer. A converted model has the files of its tokenizer, which
    may be a tokenizer.json and a tokenizer.model; one of them must be the file of `tokenizer`.
    """
    folder = Path(folder)
    name = recorded_tokenizer(folder)
    if name is not None:
        return name if name != tokenizer.name else None
    files = contained_files(folder, ("tokenizer.json", "tokenizer.model"))
    own = [path.read_bytes() for path in tokenizer.files[:1]]
    if not files or any(path.read_bytes() in own for path in files):
        return None
    return " or ".join(load_tokenizer(str(path)).name for path in files)


def recorded_tokenizer(folder: Path) -> str | None:
    """Return the name of the tokenizer that a run records; None for a run of an older version, and for a converted
    model."""
    if (folder / IDENTITY).is_file():
        return read_object(folder, IDENTITY, "restore it")["identity"].get("data.tokenizer")
    if not (folder / CONFIG).is_file():
        return None
    data = read_object(folder, CONFIG).get("data") or {}
    return "bytes" if data.get("tokenizer") == "bytes" else None


def latest_step(run_dir: str | Path) -> int | None:
    """Return the step of a run's latest finished checkpoint; None if it has none."""
    return max(saved_steps(run_dir), default=None)


def latest_checkpoint(run_dir: str | Path) -> Path:
    """Return the folder of a run's latest checkpoint. Raises FileNotFoundError if there is none."""
    step = latest_step(run_dir)
    if step is None:
        raise FileNotFoundError(f"{run_dir}: there is no checkpoint in this folder")
    return tree_folder(run_dir, step)


def checkpoint_hash(folder: Path) -> str:
    """Return a hash that differs between any two saves. It is the hash of the manifest or, without one, of the time of
    the save and the sizes of the files."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    hashed = any(path.name == MANIFEST for path in files.values())
    described = MANIFEST if hashed else "_CHECKPOINT_METADATA"
    texts = {}
    sizes = []
    for name, path in files.items():
        if path.name == described:
            texts[name] = path.read_text(errors="replace")
        if not hashed:
            sizes.append((name, path.stat().st_size))
    content = json.dumps([texts, sizes], sort_keys=True).encode()
    return content_hash(content)


def weights_hash(run_dir: str | Path) -> str:
    """Return the `checkpoint_hash` of a run's latest checkpoint, or of a converted model. Raises FileNotFoundError if
    there is none."""
    return checkpoint_hash(latest_checkpoint(run_dir).parent)


def restore_arguments(target: Any, shardings: Any) -> Any:
    """Return the arguments that restore a tree of abstract arrays with these `WeightSharding`s."""
    return jax.tree.map(lambda x, w: Restored(array=x, logical_shape=w.shape), target, shardings)


def restore_params(
    run_dir: str | Path, weights: dict[str, Any], mesh: Mesh, dtypes: dict[str, Any] | None = None
) -> Any:
    """Return only the parameters of a run's latest checkpoint, or of a converted model, laid out for this mesh. If the
    run trained adapters, they are added to the weights that it started from.

    Args:
      dtypes: dtype in which each parameter is read; None: float32.

    Raises DamagedFiles, naming the files, if they differ from what was written; FileNotFoundError or ValueError if the
    weights that adapters belong to are not there, or are others now.
    """
    base, adapted = runs_with_adapters(run_dir)
    params = _restore(base, weights, mesh, dtypes)
    for run, lora in adapted:
        params = Lora(lora, model_of(run), mesh).merge(params, restore_adapters(run, mesh))
    return params


def restore_adapters(run_dir: str | Path, mesh: Mesh) -> Any:
    """Return the adapters of a run's latest checkpoint, laid out for this mesh. Raises ValueError if it has none."""
    lora = lora_of(run_dir)
    if lora is None:
        raise ValueError(f"{run_dir} has no adapters")
    return _restore(run_dir, Lora(lora, model_of(run_dir), mesh).adapters, mesh)


def lora_of(run_dir: str | Path) -> LoraConfig | None:
    """Return the adapters that a run trained; None if it trained all weights, and for a converted model."""
    if not (Path(run_dir) / CONFIG).is_file():  # checkpoints are also read without it
        return None
    values = read_object(run_dir, CONFIG, "restore it").get("lora") or {}
    return LoraConfig(**values) if values.get("rank") else None


def runs_with_adapters(run_dir: str | Path) -> tuple[Path, list[tuple[Path, LoraConfig]]]:
    """Return the folder of the weights that a run began with, and the runs that trained adapters on them, the first one
    first and this run last; none if it trained all weights. Raises as `base_of`, and ValueError for runs in a circle.
    """
    base = Path(run_dir)
    adapted: list[tuple[Path, LoraConfig]] = []
    while (lora := lora_of(base)) is not None:
        if any(base.samefile(run) for run, _ in adapted):
            raise ValueError(f"{base} has adapters of its own weights: its {IDENTITY} is not what a run wrote")
        adapted.insert(0, (base, lora))
        base = base_of(base)
    return base, adapted


def base_of(run_dir: str | Path) -> Path:
    """Return the folder of the model that a run's adapters belong to. Raises FileNotFoundError if it is not there, and
    ValueError if it has other weights than when the run began."""
    identity = read_object(run_dir, IDENTITY, "restore it")["identity"]
    base = Path(identity["init_from"]["at"])
    if not (base / CONFIG).is_file():
        raise FileNotFoundError(
            f"{run_dir} has adapters of the model in {base.absolute()}, which is not there: bring it back"
        )
    actual = checkpoint_hash(base / CHECKPOINTS / str(latest_step(base)))
    if actual != identity["init_from"].get("checkpoint"):
        raise ValueError(f"{run_dir} has adapters of the model in {base}, which has other weights now: bring it back")
    return base


def _restore(run_dir: str | Path, weights: dict[str, Any], mesh: Mesh, dtypes: dict[str, Any] | None = None) -> Any:
    """Return the parameters of a run's latest checkpoint, as they were saved."""
    folder = latest_checkpoint(run_dir)
    step = int(folder.parent.name)
    abstract = abstract_params(weights, mesh)
    if dtypes is not None:
        abstract = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes)
    arguments = {"params": restore_arguments(abstract, weights)}
    args = Restore(arguments, restore_args=arguments, partial_restore=True)
    handler = checkpoint_handler()
    with ocp.Checkpointer(handler) as checkpointer, advising(run_dir, step):
        restored = restore_checked(
            run_dir, step, handler, lambda: checkpointer.restore(folder, args), lambda name: name.startswith("params.")
        )
    if jax.process_index() == 0:
        for line in unverified(run_dir, step):
            print(line, file=sys.stderr)
    return restored["params"]
