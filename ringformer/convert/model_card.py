"""Model card of an export, README.md: what the run, the runs before it, their stores and the original model recorded.

A text from a folder, which may be a stranger's, is one line of code here, or metadata with the form of a name.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

import ringformer
from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step, lora_of
from ringformer.cli.visible_text import visible
from ringformer.data import parse_mixture
from ringformer.data.stores.integrity import read_meta
from ringformer.files.hub import repository_of
from ringformer.files.run_layout import BASE_CARD, CASES, CHANGES, CHECKPOINTS, CONFIG, EVALS, METRICS, REPORT
from ringformer.files.untrusted import contained_files, read_object
from ringformer.runs.identity import Identity, contents, origin, store_hash
from ringformer.runs.metrics import read_metrics
from ringformer.runs.record import recorded

LICENCE = re.compile(r"""^(license(?:_name|_link)?): *(["']?)([\w.:/+-]{1,200})\2 *$""", re.ASCII | re.MULTILINE)
COLUMNS = "seq_len", "batch_size", "learning_rate", "rope_theta", "rope_scaling", "packed_attention", "position_range"
ESCAPES = str.maketrans({"\n": "\\n", "\t": "\\t", "`": "\\x60", "|": "\\x7c"})
LOAD = "from transformers import AutoModelForCausalLM", "model = AutoModelForCausalLM.from_pretrained({}, dtype='auto')"
LOAD_ADAPTERS = "from peft import PeftModel", "model = PeftModel.from_pretrained(model, '.')"
LOAD_TOKENIZER = "from transformers import AutoTokenizer", "tokenizer = AutoTokenizer.from_pretrained('.')"


class Run(NamedTuple):
    """A run that a model went through, and its last step that counts."""

    folder: Path
    step: int
    identity: Identity


def model_card(run_dir: Path, hf: dict[str, Any], parameters: int, carried: Iterable[Path], base: str = "") -> str:
    """Return the card of an export; `base` has the arguments that load the base of exported adapters."""
    runs, began = _history(run_dir)
    files = {path.name: path for path in carried}
    start = began.get("origin")
    if not start:
        start = "random weights" if runs else ""
    name, commit = repository_of(str(start))

    metadata: dict[str, Any] = {"library_name": "peft" if base else "transformers", "tags": ["ringformer"]}
    fits_base = len(runs) == 1 and "adapters" not in began
    if commit and (not base or fits_base):
        metadata["base_model"] = name
    facts: dict[str, dict[str, Any]] = {"Weights": {"parameters": parameters, "dtype": hf["dtype"]}}
    if name:
        facts["Base model"] = {"name": name, "commit": commit, "adapters": began.get("adapters")}
    facts["Rope"] = {"rope_parameters": hf["rope_parameters"]}
    if not base:
        facts["Rope"]["max_position_embeddings"] = hf["max_position_embeddings"]
    facts["Exported by"] = {"ringformer": ringformer.__version__, "jax": jax.__version__}
    if BASE_CARD in files:
        metadata |= _licence(files[BASE_CARD])
        facts["Card of the base model"] = {"file": BASE_CARD}
    if base.startswith("'BASE'"):
        facts["BASE, below"] = {"made by": "ringformer convert to-hf", "of": runs[-1].identity["init_from"]["at"]}

    lines = ["---"]
    for key, value in metadata.items():
        lines.append(f"{key}: {json.dumps(value)}")
    kind = "Adapters of " if base else ""
    lines += ["---", "", f"# {kind}{hf['architectures'][0]}", ""]
    for fact, values in facts.items():
        lines.append(_fact(fact, values))
    code = _loading_code(base, "tokenizer.json" in files)
    lines += ["", "## Load in this folder", "", "```python", *code, "```"]
    if runs:
        lines += _training(runs)
    lines += _evaluations(run_dir)
    return "\n".join([*lines, ""])


def _licence(card: Path) -> dict[str, str]:
    """Return the licence's keys of the metadata of a card."""
    front = re.match(r"\s*---\n(.*?)\n---$", card.read_text(errors="replace"), re.DOTALL | re.MULTILINE)
    if not front:
        return {}
    return {key: value for key, _, value in LICENCE.findall(front[1])}


def _loading_code(base: str, has_tokenizer: bool) -> list[str]:
    """Return the lines that load the export: the imports, then the statements."""
    more: tuple[str, ...] = ()
    if base:
        more = LOAD_ADAPTERS
    elif has_tokenizer:
        more = LOAD_TOKENIZER
    imports = [LOAD[0], *more[:1]]
    statements = [LOAD[1].format(base or "'.'"), *more[1:]]
    return imports + statements


def _history(run_dir: Path) -> tuple[list[Run], dict[str, Any]]:
    """Return the runs that led to a model, with their last steps, and the record of the model that they began with."""
    runs: list[Run] = []
    visited = set[Path]()
    folder = run_dir
    step = latest_step(run_dir) or 0
    while (folder / METRICS).is_file() and folder not in visited:
        visited.add(folder)
        identity = recorded(folder)
        runs.insert(0, Run(folder, step, identity))
        began = identity["init_from"]
        if not began:
            return runs, {}
        folder = Path(began["at"])
        step = began.get("step", 0)
        if contents(origin(began["at"])) not in ({}, contents(began)):  # it has other weights now
            return runs, {"origin": began["at"]}
    made_of: dict[str, Any] = {}
    if runs:
        made_of["origin"] = str(folder)
    if (folder / CONFIG).is_file():
        made_of |= read_object(folder, CONFIG)
    return runs, made_of


def _training(runs: list[Run]) -> Iterator[str]:
    """Yield facts of the runs, their table, and the held-out loss of the last one by position."""
    facts = list[str]()
    table = []
    evaluations = list[dict[str, Any]]()
    for folder, step, identity in runs:
        metrics = read_metrics(folder / METRICS)
        evaluations = [row for row in metrics if "eval_loss" in row and row["step"] <= step]
        changes = ""
        if (folder / CHANGES).is_file():
            changes = (folder / CHANGES).read_text(errors="replace")
        facts += _data(folder, identity)
        for line in changes.splitlines():
            facts.append(_fact("Changed", {"run": folder.name, "record": line}))
        resized = '"batch_size"' in changes or '"seq_len"' in changes
        tokens = None if resized else step * int(identity["batch_size"]) * int(identity["seq_len"])
        settings = {key.rpartition(".")[2]: value for key, value in identity.items()}
        row = {"run": folder.name, "steps": step, "tokens": tokens} | _selected(settings, COLUMNS)
        row["first held-out loss"] = evaluations[0]["eval_loss"] if evaluations else None
        row["last held-out loss"] = evaluations[-1]["eval_loss"] if evaluations else None
        table.append(row)
    yield from ("", "## Training", "", *dict.fromkeys(facts), "", *_table(table))
    if evaluations:
        last = evaluations[-1]
        by_position = []
        for bucket in last["eval_by_position"]:
            by_position.append(_selected(bucket, ("first", "last", "tokens", "loss")))
        yield from ("", f"Held-out loss by position at step {last['step']:,}, in nats per token:", "")
        yield from _table(by_position)


def _selected(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these names, in their order. Raises KeyError if there is none."""
    return {name: values[name] for name in names}


def _data(folder: Path, identity: Identity) -> Iterator[str]:
    """Yield the stores of a run, its tokenizer and adapters. Of a store that is gone or changed, the path is known."""
    data = read_object(folder, CONFIG)["data"]
    stored = identity.get("data.store", {}).get("train", ())
    parts: list[tuple[Any, ...]] = [(data["store"], None)]
    if data.get("mixture"):
        parts = list(parse_mixture(data["mixture"]))
    for (path, share), (digest, _) in zip(parts, stored, strict=False):
        meta = _meta(path, digest)
        facts = {
            "store": path,
            "share": share,
            "source": meta["settings"].get("snapshot") or meta["settings"].get("source"),
            "documents": meta.get("documents"),
            "tokens": meta.get("tokens"),
            "fingerprint": meta.get("fingerprint"),
        }
        yield _fact("Data", facts)
    yield _fact("Tokenizer", {"name": identity["data.tokenizer"]})
    if lora := lora_of(folder):
        projections = ", ".join(lora.names)
        yield _fact("Adapters", {"rank": lora.rank, "alpha": lora.scale * lora.rank, "projections": projections})


def _meta(store: str, digest: str) -> dict[str, Any]:
    """Return the record of a run's store, without a fact if the store is gone or has changed since."""
    with suppress(OSError, ValueError):
        meta = read_meta(Path(store, "train", "store.json"))
        if store_hash(meta) == digest:
            return meta
    return {"settings": {}}


def _evaluations(run_dir: Path) -> Iterator[str]:
    """Yield the table of the report (`eval report`) and those of the evaluations in the run's folder; those of other
    checkpoints are left out."""
    digest = checkpoint_hash(run_dir / CHECKPOINTS / str(latest_step(run_dir)))
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        report = read_object(run_dir / EVALS / REPORT, "report.json")
        if report["model"]["checkpoint"] == digest:
            rows = [_reported(line) for line in report["lines"]]
            yield from ("", "## Evaluations", "", *_table(rows))
    checkpoint = f'"checkpoint": "{digest}"'
    for folder in sorted((run_dir / EVALS).glob("*")):
        texts = [path.read_text() for path in contained_files(folder, (CASES, "table.txt"))]
        if len(texts) < 2:
            continue
        cases, table = texts
        if checkpoint in cases.partition("\n")[0]:
            yield from ("", f"## Evaluation {_text(folder.name)}", "")
            for line in table.splitlines():
                yield f"    {visible(line)}"


def _reported(line: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a line of a report. Raises ValueError, TypeError or LookupError for another form."""
    interval: list[float | None] = [None, None]
    if line["interval"] is not None:
        interval = list(map(float, line["interval"]))
    low, high = interval
    cells = _selected(line, ("evaluation", "task", "context", "cases", "value"))
    return cells | {"from": low, "to": high, "unit": line["unit"]}


def _fact(name: str, values: dict[str, Any]) -> str:
    parts = [f"{key} {_text(x)}" for key, x in values.items() if x is not None]
    return f"- {name}: " + ", ".join(parts)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(map(_text, row.values()))} |"


def _text(value: Any) -> str:
    """Return a number in digits, and anything else as code that ends nothing around it."""
    if type(value) is int:
        return f"{value:,}"
    if type(value) is float:
        return f"{value:.5g}"
    if isinstance(value, dict):
        value = json.dumps({key: x for key, x in value.items() if x is not None})
    return f"`{visible(str(value)[:1000]).translate(ESCAPES)}`" if value else "-"
