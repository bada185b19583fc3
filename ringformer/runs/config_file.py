"""Config files: users write `ml_collections`, and the code uses the dataclasses of `config.py`.

A config file's `get_config()` starts from `base_config(model)`, which has every key with its default. `load_config`
reads the file with the overrides of a command line, and `parse_stages` turns the result into one `Config` per stage
(`parse` does so for a config without stages). No code outside these functions reads a ConfigDict.

An existing store records how it was made. If the command line names the store, this record replaces the settings in the
config file (e.g. `data.source`). Keys on the command line are not replaced but compared with the record. If the file
itself names the store, its keys are compared too.

A run that starts from another model has this model's family and sizes, whatever preset the file began with; only keys
that the file or the command line sets differ, and are compared with it. Some values of a model determine what its
weights mean but not their shapes: for LLaMA, the rope and the norm's epsilon. Where a config does not set these values,
they are inherited from the model that the run starts from or, without one, from the preset.
"""

import dataclasses
import difflib
import reprlib
import sys
import traceback
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict, config_flags

from ringformer.checkpoints.saved_model import model_of
from ringformer.data.chats.templates import template_name
from ringformer.data.stores.integrity import read_meta
from ringformer.data.stores.options import NOT_RECORDED, REWRITTEN_BEFORE
from ringformer.files.run_layout import CONFIG, METRICS
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import family_of, family_with
from ringformer.runs.config import PARTS, Config, DataConfig

CONFIG_MODULE = "ringformer_config_file"
"""Name under which a config file is imported."""


def load_config(path: str | Path, overrides: list[str]) -> ConfigDict:
    """Return the ConfigDict of a config file with overrides of the form `--config.KEY=VALUE`; `--config.KEY` alone sets
    a boolean.

    The file may import modules in its own folder. Raises FileNotFoundError if the file does not exist, and ValueError
    if it returns no config, or if an override sets an unknown key or a key that every stage sets itself, or has no
    value.
    """
    config = _run_file(Path(path))
    values = flags.FlagValues()
    alone = []
    for word, following in pairwise([*overrides, "--"]):
        if word.startswith("--config.") and "=" not in word and following.startswith("--"):
            alone.append(word)
    if alone:
        _check_booleans(config, alone)
    argv = ["ringformer", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", config, "the run", flag_values=values, sys_argv=argv)
        rest = values(argv)[1:]
    except (AttributeError, KeyError) as error:  # an unknown key
        key = error.args[0]
        if isinstance(key, Exception):
            key = key.args[0]
        raise ValueError(f"{path} has no key {key}".replace("\n", ". ")) from None
    except (flags.Error, TypeError) as error:
        raise ValueError(f"{path}: {error}".replace("\n", " ")) from None
    if rest:
        raise ValueError(f"unexpected arguments: {' '.join(rest)}; overrides look like --config.steps=100")
    _check_parts(values.config, path)
    named = {word.removeprefix("--config.").partition("=")[0] for word in overrides}
    if config.stages:
        for key in sorted(named):
            if all(key in stage for stage in config.stages):
                raise ValueError(f"--config.{key}: every stage of {path} sets {key} itself; change it there")
    _take_from_store(values.config.data, named)
    return values.config


def _check_parts(config: ConfigDict, path: str | Path) -> None:
    """Raise ValueError if a config lacks a key or has one too many, in itself or in a part, or if its stages are no
    dicts."""
    parts: dict[str, type] = {"": Config}
    for name, cls in PARTS.items():
        parts[f"{name}."] = cls
    for prefix, cls in parts.items():
        part = config[prefix.removesuffix(".")] if prefix else config
        if not isinstance(part, ConfigDict):
            raise ValueError(f"{path} sets {prefix.removesuffix('.')} to {reprlib.repr(part)}: set its keys one by one")
        keys = {field.name for field in dataclasses.fields(cls)}
        for key in sorted(keys ^ set(part)):
            fault = "lacks the key" if key in keys else "has no key"
            raise ValueError(f"{path} {fault} {prefix}{key}: begin with the keys of `base_config`, and set values")
        for field in dataclasses.fields(cls):
            if type(field.default) is str and type(part[field.name]) is not str:
                raise ValueError(f"{path} sets {prefix}{field.name} to {reprlib.repr(part[field.name])}, not to a text")
    if not isinstance(config.model, ConfigDict):
        raise ValueError(f"{path} sets model to {reprlib.repr(config.model)}: set its keys one by one")
    for number, stage in enumerate(config.stages, 1):
        if not isinstance(stage, dict) or not all(type(key) is str for key in stage):
            described = reprlib.repr(stage).replace("\n", " ")
            raise ValueError(
                f"stage {number} of {path} is {described}: it must be a dict of the keys that it changes, "
                "e.g. {'seq_len': 131072}"
            )


def _check_booleans(config: ConfigDict, without_value: list[str]) -> None:
    """Raise ValueError for an override without a value whose key is not a boolean. Unknown keys are left to absl."""
    for word in without_value:
        *parents, name = word.removeprefix("--config.").split(".")
        part = config
        for parent in parents:
            part = part.get(parent) if isinstance(part, ConfigDict) else None
        if isinstance(part, ConfigDict) and name in part and part.get_type(name) is not bool:
            raise ValueError(f"{word} needs a value: {word}=VALUE")


def _take_from_store(data: ConfigDict, named: Collection[str]) -> None:
    """Set the keys that the user left unset to the settings that an existing store was built with.

    `named` are the keys of the command line. Raises ValueError for a damaged store.json.
    """
    path = Path(data.store, "train", "store.json")
    if not data.store or not path.is_file():
        return
    made = read_meta(path)["settings"]
    if "template" in made:
        made["template"] = template_name(made["template"])
        if made["template"] == "tokenizer":
            made.setdefault("rewritten", REWRITTEN_BEFORE)
    if "begin" in made:
        made["begin"] = "true" if made["begin"] else "false"
    for field in dataclasses.fields(DataConfig):
        if "format" in made and field.name in NOT_RECORDED:  # what such a format does not record it does not have
            made.setdefault(field.name, field.default)
        by_file = "data.store" not in named and data[field.name] != field.default
        if field.name in made and field.name != "tokenizer" and f"data.{field.name}" not in named and not by_file:
            data[field.name] = made[field.name]


def _run_file(path: Path) -> ConfigDict:
    """Execute a config file and return the result of its `get_config()`."""
    if not path.is_file():
        there = ", ".join(sorted(map(str, Path("configs").glob("*.py"))))
        hint = f"; there are: {there}" if there else ""
        raise FileNotFoundError(f"there is no config file {path}{hint}")
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        loader = SourceFileLoader(CONFIG_MODULE, str(path))
        spec = ModuleSpec(CONFIG_MODULE, loader, origin=str(path))
        spec.has_location = True  # sets __file__
        module = sys.modules[CONFIG_MODULE] = module_from_spec(spec)
        loader.exec_module(module)
        config = module.get_config()
    except (Exception, SystemExit) as error:  # any error, or end: the file is the user's program
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        where = f" (line {lines[-1]})" if lines else ""
        raise ValueError(f"{path} cannot be read: {why}{where}") from error
    if not isinstance(config, ConfigDict) or "preset" not in config:
        raise ValueError(
            f"get_config() of {path} returns {type(config).__name__}; it must return a `base_config(...)` "
            "of ringformer, with its own values set in it"
        )
    return config


def parse(config: ConfigDict, *, inherit: bool = True, before: ModelConfig | None = None) -> Config:
    """Return the validated dataclass of a config without stages.

    Args:
      inherit: False: if init_from does not exist, take the preset's architecture, as without init_from.
      before: model of the previous stage, which takes the place of init_from.

    Raises:
      ValueError: for an invalid value.
      FileNotFoundError: if init_from is not the folder of a run or of a converted model.
    """
    values = config.to_dict()
    if values["stages"]:
        raise ValueError(f"the config has {len(values['stages'])} stages, one run was expected: use parse_stages")
    values["model"] = _model(config, starting_model(config, inherit=inherit, before=before), before)
    for key, value in values.items():
        if key in PARTS:
            values[key] = PARTS[key](**value)
    return Config(**values)


def starting_model(config: ConfigDict, *, inherit: bool, before: ModelConfig | None = None) -> ModelConfig | None:
    """Return the model that a run goes on with: its own if it is resumed, else that of the previous stage or of
    init_from; None if it begins with fresh parameters. For the arguments and errors see `parse`."""
    run_dir = Path(config.run_dir)
    init_from = config.init_from
    if config.run_dir and (run_dir / METRICS).is_file() and (run_dir / CONFIG).is_file():
        return model_of(run_dir)
    if before is not None:
        return before
    if init_from and (inherit or Path(init_from).exists()):
        return model_of(init_from)
    return None


def _model(config: ConfigDict, start: Any, before: ModelConfig | None) -> ModelConfig:
    """Return the model of a run that goes on with the model `start`, or with fresh parameters if it is None.

    If the parameters come from another model, the run has this model's architecture, except for the keys that the user
    set, which are compared with it later. Otherwise it has the architecture of the config.

    Raises ValueError for a key that the model's family does not have, and for a preset that is not that of
    `base_config`.
    """
    preset = config.preset
    keys = config.model
    family = family_of(preset)
    values = {path: value for path, value in flatten_dict(keys.to_dict()).items() if value is not None}
    if start is not None and (config.init_from or before is not None):
        family = family_with(type(start))
        set_keys = getattr(keys, "keys_set", set(keys))  # all of them if the file replaced config.model
        fields = {field.name for field in dataclasses.fields(family.config)}
        names = {path[0] for path in values}
        foreign = sorted(names & set_keys - fields)
        if foreign:
            raise ValueError(
                f"model.{foreign[0]} is no key of {family.config.__name__}, the model that the run starts from: leave "
                "it out, or choose another init_from"
            )
        kept = fields & {*set_keys, *family.config.INHERITED}
        changed = {path: value for path, value in values.items() if path[0] in kept}
        values = {}
        for name in family.config.ARCHITECTURE:
            values[name,] = getattr(start, name)
        values |= changed
    elif getattr(keys, "made_from", preset) != preset:
        raise ValueError(
            f"preset={preset!r}, but the config's model is that of base_config({keys.made_from!r}): call "
            f"base_config({preset!r}) in the config file"
        )
    given = unflatten_dict(values)
    if type(start) is not family.config:  # fresh parameters, or a run of another family, which is refused later
        start = family.config(**family.presets[preset])
    for field in start.INHERITED:
        inherited: Any = getattr(start, field)
        nested = dataclasses.is_dataclass(inherited)
        if nested and "kind" not in given.get(field, {}):
            # The config sets some fields, or none: replace these fields in the inherited scaling.
            given[field] = dataclasses.replace(inherited, **given.get(field, {}))
        given.setdefault(field, inherited)
    return family.config(**given)


def register_models(path: str | None) -> None:
    """Execute a config file for the models that it registers; None: do nothing. Raises the errors of `load_config`."""
    if path is not None:
        _run_file(Path(path))


def parse_stages(config: ConfigDict, *, inherit: bool = True) -> list[Config]:
    """Return the runs that a config describes, in order: one run per stage, or a single run if there are no stages.

    Stage N is the config with the overrides of `config.stages[N - 1]` (dotted keys). It runs in RUN_DIR/stage-N-CONTEXT
    and starts from the parameters of stage N-1; the first stage starts from the parameters of `init_from`. Optimizer
    and schedule start anew. Unset rope values are taken from the previous stage (for `inherit` see `parse`). Each stage
    has its own data order: its seed is the config's seed plus N-1, unless the stage sets a seed.

    Raises ValueError, naming the stage, for an unknown key, an invalid value, a context shorter than the previous
    stage's, and a rope theta together with a scaling.
    """
    if not config.stages:
        return [parse(config, inherit=inherit)]
    runs: list[Config] = []
    for number, overrides in enumerate(config.stages, 1):
        values = config.copy_and_resolve_references()
        values.stages = ()
        values.seed += number - 1
        try:
            families = [family_of(config.preset).config]
            for earlier in runs:
                families.append(type(earlier.model))
            _override(values, overrides, families)
            if config.run_dir:
                values.run_dir = f"{config.run_dir}/stage-{number}-{values.seq_len}"
            if config.copy_to:
                values.copy_to = f"{config.copy_to.rstrip('/')}/stage-{number}-{values.seq_len}"
            before = None
            if runs:
                values.init_from = runs[-1].run_dir
                before = runs[-1].model
            run = parse(values, inherit=inherit, before=before)
            run.model.check_stage({key.removeprefix("model.") for key in overrides if key.startswith("model.")})
            runs.append(run)
        except (TypeError, ValueError) as error:
            raise ValueError(f"stage {number}: {error}") from None
    for number, (shorter, longer) in enumerate(pairwise(runs), 2):
        if longer.seq_len < shorter.seq_len:
            raise ValueError(
                f"stage {number} shrinks the context, from {shorter.seq_len} to {longer.seq_len} tokens: order the "
                "stages by seq_len"
            )
    return runs


def _override(values: ConfigDict, overrides: dict[str, Any], families: Sequence[type[ModelConfig]]) -> None:
    """Set dotted keys of a config. Raises ValueError for an unknown key and for a key that all stages share.

    Args:
      families: classes of the preset's configuration and of earlier stages, whose architecture all stages share.
    """
    shared = {
        "stages",
        "run_dir",
        "copy_to",
        "init_from",
        "cpu_devices",
        "preset",
        "data.tokenizer",
    }
    for model in families:
        lasting = {*model.ARCHITECTURE, *model.INHERITED} - {*model.CONTEXT}
        for name in lasting:
            shared.add(f"model.{name}")
    keys = flatten_dict(values.to_dict(), sep=".")
    for key, value in overrides.items():
        if key in shared:
            raise ValueError(f"{key} is the same in all stages: set it outside the stages")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no key {key!r}{hint}")
        try:
            values.update_from_flattened_dict({key: value})
        except TypeError as error:
            raise ValueError(f"{key}={value!r}: {error}".replace("\n", " ")) from None
