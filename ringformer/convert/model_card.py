"""Model card of an export, README.md: what the run, the runs before it, their stores and the original model recorded.

A text from a folder, which may be a stranger's, is one line of code here, or metadata with the form of a name.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import ringformer
from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step, lora_of
from ringformer.cli.visible_text import visible
from ringformer.data import parse_mixture
from ringformer.data.stores.integrity import read_meta
from ringformer.files.hub import repository_of
from ringformer.files.run_layout import BASE_CARD, CHANGES, CHECKPOINTS, CONFIG, EVALS, METRICS, REPORT
from ringformer.files.untrusted import contained_files, read_object
from ringformer.runs.identity import Identity, contents, identity_hash, origin
from ringformer.runs.metrics import read_metrics
from ringformer.runs.record import recorded

LICENCE = re.compile(r"""^(license(?:_name|_link)?): *(["']?)([\w.:/+-]{1,200})\2 *$""", re.ASCII | re.MULTILINE)
COLUMNS = "seq_len", "batch_size", "learning_rate", "rope_theta", "rope_scaling", "packed_attention", "position_range"
ESCAPES = str.maketrans({"\n": "\\n", "\t": "\\t", "`": "\\x60", "|": "\\x7c"})
LOAD = "from transformers import AutoModelForCausalLM", "model = AutoModelForCausalLM.from_pretrained({}, dtype='auto')"
LOAD_ADAPTERS = "from peft import PeftModel", "model = PeftModel.from_pretrained(model, '.')"
LOAD_TOKENIZER = "from transformers import AutoTokenizer", "tokenizer = AutoTokenizer.from_pretrained('.')"


def model_card(run_dir: Path, hf: dict[str, Any], parameters: int, carried: Iterable[Path], base: str = "") -> str:
    """Return the card of an export; `base` has the arguments that load the base of exported adapters."""
    runs, began = _history(run_dir)
    name, commit = repository_of(str(began.get("origin") or ("random weights" if runs else "")))
    metadata: dict[str, Any] = {"library_name": "peft" if base else "transformers", "tags": ["ringformer"]}
    metadata |= {"base_model": name} if commit and (not base or (len(runs) == 1 and "adapters" not in began)) else {}
    facts: dict[str, dict[str, Any]] = {"Weights": {"parameters": parameters, "dtype": hf["dtype"]}}
    facts |= {"Base model": {"name": name, "commit": commit, "adapters": began.get("adapters")}} if name else {}
    facts["Rope"] = {"rope_parameters": hf["rope_parameters"]}
    facts["Rope"] |= {} if base else {"max_position_embeddings": hf["max_position_embeddings"]}
    facts["Exported by"] = {"ringformer": ringformer.__version__, "jax": jax.__version__}
    if BASE_CARD in (files := {path.name: path for path in carried}):
        front = re.match(r"\s*---\n(.*?)\n---$", files[BASE_CARD].read_text(errors="replace"), re.DOTALL | re.MULTILINE)
        metadata |= {key: value for key, _, value in LICENCE.findall(front[1])} if front else {}
        facts["Card of the base model"] = {"file": BASE_CARD}
    if base.startswith("'BASE'"):
        facts["BASE, below"] = {"made by": "ringformer convert to-hf", "of": runs[-1][2]["init_from"]["at"]}
    more = LOAD_ADAPTERS if base else LOAD_TOKENIZER if "tokenizer.json" in files else ()
    code = sorted([LOAD[0], LOAD[1].format(base or "'.'"), *more], key=lambda line: not line.startswith("from"))
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", ""]
    lines += [f"# {'Adapters of ' if base else ''}{hf['architectures'][0]}", "", *(_fact(*x) for x in facts.items())]
    lines += ["", "## Load in this folder", "", "```python", *code, "```"]
    lines += [*(_training(runs) if runs else ()), *_evaluations(run_dir), ""]
    return "\n".join(lines)


def _history(run_dir: Path) -> tuple[list[tuple[Path, int, Identity]], dict[str, Any]]:
    """Return the runs that led to a model, with their last steps, and the record of the model that they began with."""
    runs: list[tuple[Path, int, Identity]] = []
    folder = run_dir
    step = latest_step(run_dir) or 0
    while (folder / METRICS).is_file() and folder not in [run[0] for run in runs]:
        runs.insert(0, (folder, step, identity := recorded(folder)))
        if not (began := identity["init_from"]):
            return runs, {}
        folder = Path(began["at"])
        step = began.get("step", 0)
        if contents(origin(began["at"])) not in ({}, contents(began)):  # it has other weights now
            return runs, {"origin": began["at"]}
    made_of = read_object(folder, CONFIG) if (folder / CONFIG).is_file() else {}
    return runs, ({"origin": str(folder)} if runs else {}) | made_of


def _training(runs: list[tuple[Path, int, Identity]]) -> Iterator[str]:
    """Yield facts of the runs, their table, and the held-out loss of the last one by position."""
    facts = list[str]()
    table = []
    evaluations = list[dict[str, Any]]()
    for folder, step, identity in runs:
        evaluations = [row for row in read_metrics(folder / METRICS) if "eval_loss" in row and row["step"] <= step]
        first, last = (evaluations[0]["eval_loss"], evaluations[-1]["eval_loss"]) if evaluations else (None, None)
        changes = (folder / CHANGES).read_text(errors="replace") if (folder / CHANGES).is_file() else ""
        facts += _data(folder, identity)
        facts += [_fact("Changed", {"run": folder.name, "record": line}) for line in changes.splitlines()]
        resized = '"batch_size"' in changes or '"seq_len"' in changes
        tokens = None if resized else step * int(identity["batch_size"]) * int(identity["seq_len"])
        settings = {key.rpartition(".")[2]: value for key, value in identity.items()}
        steps = {"run": folder.name, "steps": step, "tokens": tokens} | {name: settings[name] for name in COLUMNS}
        table.append(steps | {"first held-out loss": first, "last held-out loss": last})
    yield from ("", "## Training", "", *dict.fromkeys(facts), "", *_table(table))
    for row in evaluations[-1:]:
        yield from ("", f"Held-out loss by position at step {row['step']:,}, in nats per token:", "")
        yield from _table([{k: x[k] for k in ("first", "last", "tokens", "loss")} for x in row["eval_by_position"]])


def _data(folder: Path, identity: Identity) -> Iterator[str]:
    """Yield the stores of a run, its tokenizer and adapters. Of a store that is gone or changed, the path is known."""
    data = read_object(folder, CONFIG)["data"]
    stored = identity.get("data.store", {}).get("train", ())
    parts: list[tuple[Any, ...]] = parse_mixture(data["mixture"]) if data.get("mixture") else [(data["store"], None)]
    for (path, share), (digest, _) in zip(parts, stored, strict=False):
        meta: dict[str, Any] = {"settings": {}}
        with suppress(OSError, ValueError):
            present = read_meta(Path(path, "train", "store.json"))
            meta = present if identity_hash([present["fingerprint"], present["files"]]) == digest else meta
        source = meta["settings"].get("snapshot") or meta["settings"].get("source")
        counts = {key: meta.get(key) for key in ("documents", "tokens", "fingerprint")}
        yield _fact("Data", {"store": path, "share": share, "source": source} | counts)
    yield _fact("Tokenizer", {"name": identity["data.tokenizer"]})
    if lora := lora_of(folder):
        projections = ", ".join(lora.names)
        yield _fact("Adapters", {"rank": lora.rank, "alpha": lora.scale * lora.rank, "projections": projections})


def _evaluations(run_dir: Path) -> Iterator[str]:
    """Yield the table of the report (`eval report`) and those of the evaluations in the run's folder; those of other
    checkpoints are left out."""
    digest = checkpoint_hash(run_dir / CHECKPOINTS / str(latest_step(run_dir)))
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        report = read_object(run_dir / EVALS / REPORT, "report.json")
        if report["model"]["checkpoint"] == digest:
            yield from ("", "## Evaluations", "", *_table([_reported(line) for line in report["lines"]]))
    checkpoint = f'"checkpoint": "{digest}"'
    for folder in sorted((run_dir / EVALS).glob("*")):
        cases, *table = [path.read_text() for path in contained_files(folder, ("cases.jsonl", "table.txt"))] or [""]
        if table and checkpoint in cases.partition("\n")[0]:
            yield from ("", f"## Evaluation {_text(folder.name)}", "")
            yield from (f"    {visible(line)}" for line in table[0].splitlines())


def _reported(line: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a line of a report. Raises ValueError, TypeError or LookupError for another form."""
    low, high = (None, None) if line["interval"] is None else map(float, line["interval"])
    cells = {key: line[key] for key in ("evaluation", "task", "context", "cases", "value")}
    return cells | {"from": low, "to": high, "unit": line["unit"]}


def _fact(name: str, values: dict[str, Any]) -> str:
    return f"- {name}: " + ", ".join(f"{key} {_text(x)}" for key, x in values.items() if x is not None)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}")
    yield from (f"| {' | '.join(map(_text, row.values()))} |" for row in rows)


def _text(value: Any) -> str:
    """Return a number in digits, and anything else as code that ends nothing around it."""
    if type(value) in (int, float):
        return f"{value:,}" if type(value) is int else f"{value:.5g}"
    if isinstance(value, dict):
        value = json.dumps({key: x for key, x in value.items() if x is not None})
    return f"`{visible(str(value)[:1000]).translate(ESCAPES)}`" if value else "-"
