"""Tasks of lm-evaluation-harness 0.4.13, whose data are read before a model is loaded.

Its RULER tasks make their prompts with the model's tokenizer. Six of them need no other data; the others download
essays or questions, which `ringformer eval ruler` reads from files.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind

from ringformer.data.tokenizers.base import Tokenizer

RULER: dict[str, str | None] = {
    "niah_single_1": None,
    "niah_single_2": "--essays",
    "niah_single_3": "--essays",
    "niah_multikey_1": "--essays",
    "niah_multikey_2": None,
    "niah_multikey_3": None,
    "niah_multivalue": "--essays",
    "niah_multiquery": "--essays",
    "ruler_vt": None,
    "ruler_cwe": None,
    "ruler_fwe": None,
    "ruler_qa_squad": "--squad",
    "ruler_qa_hotpot": "--hotpotqa",
}
"""The harness's RULER tasks, and the option of `ringformer eval ruler` for the data that a task downloads."""
RULER_LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072]
"""Contexts for which these tasks have a metric."""


def read_tasks(
    names: Sequence[str], include_path: str | None, tokenizer: Tokenizer, lengths: Sequence[int]
) -> tuple[TaskManager, list[Any]]:
    """Read tasks, groups and tags by name, or by a pattern of names; return them with their manager.

    Args:
      include_path: folder with tasks of your own.
      tokenizer, lengths: with which RULER's prompts are made.

    Raises ValueError, which names the task, for one that the harness does not have or whose data cannot be read, and
    for a task of RULER that downloads its data.
    """
    with tempfile.TemporaryDirectory(prefix="ringformer-tokenizer-") as folder:
        metadata = {"tokenizer": _save(tokenizer, Path(folder)), "max_seq_lengths": list(lengths)}
        with_defaults = (False, True) if include_path else (True,)  # to read all takes seconds
        for include_defaults in with_defaults:
            manager = TaskManager(include_path=include_path, include_defaults=include_defaults, metadata=metadata)
            unknown = [name for name in names if not manager.match_tasks([name])]
            if not unknown:
                break
        if unknown:
            raise ValueError(f"the harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists those there are")
        matching: dict[str, None] = {}
        for name in names:
            matching |= dict.fromkeys(manager.match_tasks([name]))
        ruler = []
        for name in matching:
            for leaf in _leaves(manager, name):
                if leaf in RULER:
                    ruler.append(leaf)
        _check_ruler(ruler, tokenizer, lengths)
        random.seed(DEFAULT_RANDOM_SEED)  # as the harness does before it reads tasks: some draw their data
        np.random.seed(DEFAULT_OTHER_SEED)
        tasks: list[Any] = []
        for name in matching:
            try:
                loaded = manager.load(name)
            except Exception as error:  # of any library that reads data
                reason = str(error).strip().splitlines() or [type(error).__name__]
                raise ValueError(f"the data of task {name!r} cannot be read: {reason[0]}") from error
            groups = loaded.get("groups") or {}
            if name in groups:
                tasks.append(groups[name])
            else:
                tasks += loaded["tasks"].values()
    return manager, tasks


def _leaves(manager: TaskManager, name: str) -> Iterator[str]:
    """Yield the names of the tasks that a task, group or tag consists of."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind not in (Kind.GROUP, Kind.TAG):
        yield name
        return
    members = entry.tags
    if entry.kind is Kind.GROUP:
        members = (entry.cfg or {}).get("task") or []
    for member in members:
        yield from _leaves(manager, member if isinstance(member, str) else str(member.get("task")))


def _check_ruler(names: Sequence[str], tokenizer: Tokenizer, lengths: Sequence[int]) -> None:
    """Raise ValueError for tasks of RULER that cannot be read here."""
    if not names:
        return
    for name in names:
        if RULER[name]:
            others = ", ".join(task for task, option in RULER.items() if option is None)
            raise ValueError(
                f"task {name!r} downloads its data: run `ringformer eval ruler {RULER[name]}=FILE`; those that do not "
                f"are {others}"
            )
    for length in lengths:
        if length not in RULER_LENGTHS:
            raise ValueError(
                f"task {names[0]!r} has no metric for {length} tokens: set --lengths to some of "
                f"{', '.join(map(str, RULER_LENGTHS))}, or run `ringformer eval ruler`"
            )
    if _tokenizer_json(tokenizer) is None:
        raise ValueError(
            f"task {names[0]!r} needs a tokenizer.json, which tokenizer {tokenizer.name} has not: run `ringformer eval "
            "ruler`"
        )


def _save(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Copy a tokenizer.json to a folder from which transformers loads it; None if the tokenizer has none."""
    path = _tokenizer_json(tokenizer)
    if path is None:
        return None
    shutil.copyfile(path, folder / path.name)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)


def _tokenizer_json(tokenizer: Tokenizer) -> Path | None:
    for path in tokenizer.files:
        if path.name == "tokenizer.json":
            return path
    return None
