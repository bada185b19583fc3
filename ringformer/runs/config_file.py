"""Config files: `ml_collections` outside, the dataclasses of `config.py` inside.

A config file's `get_config()` starts from `base_config(model)`, which has every key there is, with its default.
`load_config` reads the file with the overrides of a command line, and `parse_stages` turns the result into one `Config`
for each stage (`parse`: of a config without stages); nothing past it reads a ConfigDict.

A store that is there says itself how it was made. That counts, and not what a config file pins (`data.source`), where
the command line names the store. What the command line writes is compared with the store, and so is what a file writes
beside a store that it names itself.

Some values of a model decide what its weights mean and not their shapes, a LLaMA's rope and the norm's epsilon. Where a
config does not write them they are inherited: from the model that the run begins with, or else from the preset.
"""

import dataclasses
import difflib
import sys
import traceback
from collections.abc import Collection, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from ringformer.checkpoints.saved_model import model_of
from ringformer.data.chats.templates import template_name
from ringformer.data.stores.integrity import read_meta
from ringformer.files.run_layout import CONFIG, METRICS
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import family_of
from ringformer.runs.config import Config, DataConfig, OptimizerConfig

CONFIG_MODULE = "ringformer_config_file"
"""The name under which a config file is imported."""


def load_config(path: str | Path, overrides: list[str]) -> ConfigDict:
    """The ConfigDict of a config file with its overrides, `--config.KEY=VALUE` each.

    The file may import what lies beside it. Raises FileNotFoundError for the file, ValueError for one that makes no
    config, for an override of a key that is not there, and for one that all stages overrule.
    """
    config, values = _run_file(Path(path)), flags.FlagValues()
    argv = ["ringformer", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", config, "the run", flag_values=values, sys_argv=argv)
        rest = values(argv)[1:]
    except (AttributeError, KeyError) as error:  # a key that the config does not have
        said = str(error.args[0].args[0] if isinstance(error.args[0], Exception) else error.args[0])
        raise ValueError(f"{path} has no key {said}".replace("\n", ". ")) from None
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if rest:
        raise ValueError(f"unexpected arguments: {' '.join(rest)}; overrides look like --config.steps=100")
    named = {word.removeprefix("--config.").partition("=")[0] for word in overrides}
    for key in sorted(named) if config.stages else ():
        if all(key in stage for stage in config.stages):
            raise ValueError(f"--config.{key}: every stage of {path} writes {key} itself; change it there")
    _take_from_store(values.config.data, named)
    return values.config


def _take_from_store(data: ConfigDict, named: Collection[str]) -> None:
    """Set what nobody wrote of the making of a store to what the store says, if there is one; the keys `named` are
    those of the command line. Raises ValueError for a store.json that is damaged."""
    path = Path(data.store, "train", "store.json")
    if not data.store or not path.is_file():
        return
    made = read_meta(path)["settings"]
    if "template" in made:
        made["template"] = template_name(made["template"])
    for field in dataclasses.fields(DataConfig):
        by_file = "data.store" not in named and data[field.name] != field.default
        if field.name in made and field.name != "tokenizer" and f"data.{field.name}" not in named and not by_file:
            data[field.name] = made[field.name]


def _run_file(path: Path) -> ConfigDict:
    """What the file's `get_config()` returns."""
    if not path.is_file():
        there = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py")))
        raise FileNotFoundError(f"there is no config file {path}" + (f"; there are: {there}" if there else ""))
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)
    try:
        spec = ModuleSpec(CONFIG_MODULE, loader := SourceFileLoader(CONFIG_MODULE, str(path)), origin=str(path))
        spec.has_location = True  # it has a __file__
        module = sys.modules[CONFIG_MODULE] = module_from_spec(spec)
        loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # of any kind: it is the user's program
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        said = f"{type(error).__name__}: {error}".replace("\n", " ") + (f" (line {lines[-1]})" if lines else "")
        raise ValueError(f"{path} cannot be read: {said}") from error
    if not isinstance(config, ConfigDict) or "preset" not in config:
        raise ValueError(
            f"get_config() of {path} returns {type(config).__name__}; it must return a `base_config(...)` "
            "of ringformer, with what differs written in it"
        )
    return config


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's values by their keys, "model.rope_theta"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def parse(config: ConfigDict, *, inherit: bool = True, before: ModelConfig | None = None) -> Config:
    """Return the validated dataclass of a config without stages.

    Args:
      inherit: read what the config leaves open of the model from the run itself if it is to be resumed, else from
        init_from. False: the checkpoint need not be here; it is the preset's, as without init_from.
      before: the model of the stage before this one, which comes before init_from and the preset.

    Raises:
      ValueError: for a value that cannot be.
      FileNotFoundError: if init_from is no folder of a run or of a converted model.
    """
    base = _begun(config.run_dir, config.init_from, before) if inherit else before
    values = config.to_dict()
    if values["stages"]:
        raise ValueError(f"the config has {len(values['stages'])} stages, one run was expected: use parse_stages")
    family = family_of(values["preset"])
    given = values["model"] = _without_none(values["model"])
    base = base or family.config(**family.presets[values["preset"]])
    for field in base.INHERITED:
        default: Any = getattr(base, field)
        nested = dataclasses.is_dataclass(default)
        if not nested:
            given.setdefault(field, default)
        elif "kind" not in given[field]:  # the fields that are written, in the scaling that is there
            given[field] = dataclasses.replace(default, **given[field])
    parts = {"model": family.config, "data": DataConfig, "optimizer": OptimizerConfig}
    return Config(**{k: parts[k](**v) if k in parts else v for k, v in values.items()})


def register_models(path: str | None) -> None:
    """Execute a config file that a user named, so that the models which it registers are known; None: nothing.

    Raises as `load_config`.
    """
    if path is not None:
        _run_file(Path(path))


def _begun(run_dir: str, init_from: str, before: ModelConfig | None = None) -> ModelConfig | None:
    """The model that a run goes on with: its own if it was begun, else `before`, else that of init_from."""
    if run_dir and (Path(run_dir) / METRICS).is_file() and (Path(run_dir) / CONFIG).is_file():
        return model_of(run_dir)
    return before or (model_of(init_from) if init_from else None)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}


def parse_stages(config: ConfigDict, *, inherit: bool = True) -> list[Config]:
    """The runs that a config describes, in their order: one for each of its stages; itself if it has none.

    Stage N is the config with the overrides of `config.stages[N - 1]` (dotted keys). It runs in
    RUN_DIR/stage-N-CONTEXT and begins with the parameters of stage N-1, the first with those of `init_from`; optimizer
    and schedule start anew. What it does not write of its rope is as in the stage before (`inherit`: see `parse`). Its
    data come in an order of their own: its seed is the config's plus N-1, unless the stage names one.

    Raises ValueError, naming the stage, for an unknown key, a value that cannot be, a context shorter than that of the
    stage before, and a rope theta beside a scaling of it.
    """
    if not config.stages:
        return [parse(config, inherit=inherit)]
    runs: list[Config] = []
    for number, overrides in enumerate(config.stages, 1):
        values = config.copy_and_resolve_references()
        values.stages = ()
        values.seed += number - 1
        try:
            _override(values, overrides)
            if config.run_dir:
                values.run_dir = f"{config.run_dir}/stage-{number}-{values.seq_len}"
            if config.copy_to:
                values.copy_to = f"{config.copy_to.rstrip('/')}/stage-{number}-{values.seq_len}"
            if runs:
                values.init_from = runs[-1].run_dir
            runs.append(parse(values, inherit=inherit, before=runs[-1].model if runs else None))
            runs[-1].model.check_stage({key.removeprefix("model.") for key in overrides if key.startswith("model.")})
        except (TypeError, ValueError) as error:
            raise ValueError(f"stage {number}: {error}") from None
    for number, (shorter, longer) in enumerate(pairwise(runs), 2):
        if longer.seq_len < shorter.seq_len:
            raise ValueError(
                f"stage {number} shrinks the context, from {shorter.seq_len} to {longer.seq_len} tokens: order the "
                "stages by seq_len"
            )
    return runs


def _override(values: ConfigDict, overrides: dict[str, Any]) -> None:
    """Set dotted keys of a config. Raises ValueError for one that is not there or that all stages share."""
    model = family_of(values.preset).config
    lasting = set(model.ARCHITECTURE + model.INHERITED) - set(model.CONTEXT)
    shared = {
        "stages",
        "run_dir",
        "copy_to",
        "init_from",
        "cpu_devices",
        "preset",
        "data.tokenizer",
        *(f"model.{name}" for name in lasting),
    }
    known = _dotted(values)
    for key, value in overrides.items():
        if key in shared:
            raise ValueError(f"{key} is the same in all stages: set it outside of them")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        *folders, field = key.split(".")
        place = values
        for folder in folders:
            place = place[folder]
        try:
            place[field] = value
        except TypeError as error:
            raise ValueError(f"{key}={value!r}: {error}") from None


def _dotted(values: ConfigDict, prefix: str = "") -> list[str]:
    """The dotted keys of a config."""
    keys: list[str] = []
    for key in values:
        place = values[key]
        keys += _dotted(place, f"{prefix}{key}.") if isinstance(place, ConfigDict) else [prefix + key]
    return keys
