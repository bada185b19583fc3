"""JSON that the verbs read: prompts, cases, metrics, locks, records of runs and stores."""

import json

from tests.bad_inputs.runner import Row

DEEP = "[" * 100_000
HUGE = "1" + "0" * 400
LONG = "1" * 5000
GENERATE = "generate --run=toys/model --max_new_tokens=2 --prompts=row/p --out=row/o"
LINES = "eval lines --run=toys/model --lengths=100 --out=row"

TEXTS: dict[str, str | bytes] = {
    "empty": "",
    "deep": DEEP,
    "cut": '{"a": [1, 2',
    "a list": "[]",
    "NaN": "NaN",
    "a long number": LONG,
    "a byte order mark": b"\xef\xbb\xbf{}",
    "not UTF-8": b'{"a": "\xff"}',
    "a lone surrogate": '"\\ud800"',
}
"""Contents that are not the object that a file should hold."""


def _each(name: str, command: str, file: str, copies: dict[str, str]) -> list[Row]:
    """Rows of one file of a folder, by its content."""
    rows = []
    for kind, content in TEXTS.items():
        rows.append(Row(f"{name} is {kind}", command, files={file: content}, copies=copies))
    return rows


ALL = dict.fromkeys(TEXTS)

ROWS = [
    *[
        Row(f"prompts: {name}", GENERATE, files={"p": content})
        for name, content in {
            "deep": DEEP,
            "deep in an object": '{"prompt": "a", "x": ' + "[" * 900 + "]" * 900 + "}",
            "deep but allowed": '{"prompt": 3, "x": ' + "[" * 150 + "]" * 150 + "}",
            "null": "null",
            "surrogate": '{"prompt": "\\ud800"}',
            "answered": '{"prompt": "a", "text": "b"}',
            "failed": '{"prompt": "a", "error": "b"}',
            "twice": '{"prompt": "a", "prompt": 3}',
            "too long": json.dumps({"prompt": "a" * 5000}),
        }.items()
    ],
    *[
        Row(f"answers: {name}", GENERATE, files={"p": '{"prompt": "a"}\n', "o": content, "o.made_by.json": record})
        for name, (content, record) in {
            "somebody else's": ("hello\n", "{}"),
            "deep record": ("a\n", DEEP),
            "record is a list": ("a\n", "[]"),
            "record is cut": ("a\n", "{"),
            "record is of another": ("a\n", '{"command": "x"}'),
            "settings are a list": ("a\n", '{"command": "ringformer generate", "settings": [1]}'),
            "settings are a number": ("a\n", '{"command": "ringformer generate", "settings": 3}'),
            "settings are others": ("a\n", '{"command": "ringformer generate", "settings": {"seed": "x"}}'),
            "command is a list": ("a\n", '{"command": []}'),
        }.items()
    ],
    *[
        Row(f"cases: {name}", LINES, files={"cases.jsonl": content})
        for name, content in {
            "deep": DEEP + "\n",
            "deep name": '{"evaluation": ' + DEEP + "\n",
            "of another": '{"evaluation": "x", "settings": {}}\n{}\n',
            "deep row": '{"evaluation": "lines", "settings": {}}\n' + DEEP + "\n",
            "row is null": '{"evaluation": "lines", "settings": {}}\nnull\n',
            "row is empty": '{"evaluation": "lines", "settings": {}}\n{}\n',
            "row has lists": '{"evaluation": "lines", "settings": {}}\n{"key": [], "prompt_hash": "a"}\n',
            "row is NaN": '{"evaluation": "lines", "settings": {}}\nNaN\n',
            "settings are a number": '{"evaluation": "lines", "settings": 3}\n',
            "settings are null": '{"evaluation": "lines", "settings": null}\n',
            "binary": b"\0\xff\n\n",
            "a byte order mark": b'\xef\xbb\xbf{"evaluation": "lines", "settings": {}}\n',
        }.items()
    ],
    *[
        Row(f"metrics: {name}", "checkpoint list row/run", copies={"run": "run"}, files={"run/metrics.jsonl": content})
        for name, content in {
            "deep": DEEP + "\n{}\n",
            "null": "null\n{}\n",
            "list": "[]\n{}\n",
            "no step": "{}\n{}\n",
            "step is a text": '{"step": "1"}\n{}\n',
            "step is true": '{"step": true}\n{}\n',
            "step is huge": '{"step": ' + LONG + "}\n{}\n",
            "step is NaN": '{"step": NaN}\n{}\n',
            "not UTF-8": b"\xff\n{}\n",
        }.items()
    ],
    Row(
        "metrics: step is 10**400",
        "checkpoint list row/run",
        harmless="no checkpoint has this step",
        copies={"run": "run"},
        files={"run/metrics.jsonl": '{"step": ' + HUGE + "}\n"},
    ),
    Row(
        "metrics: loss is NaN",
        "checkpoint list row/run",
        harmless="the list shows what was reported",
        copies={"run": "run"},
        files={"run/metrics.jsonl": '{"step": 2, "eval_loss": NaN}\n'},
    ),
    Row(
        "metrics: deep, of a run that goes on",
        "train --config=toys/config.py --config.steps=3 --allow=steps",
        copies={"run": "run"},
        files={"run/metrics.jsonl": DEEP + "\n{}\n"},
    ),
    *[
        Row(
            f"lock: {name}",
            "train --config=toys/config.py",
            harmless="a lock that cannot be read is taken over once it has been silent",
            copies={"run": "run"},
            files={"run/lock/99.json": content},
        )
        for name, content in {"deep": DEEP}.items()
    ],
    *_each("run's config.json", "generate --run=row/run --prompt=a", "run/config.json", {"run": "run"}),
    *_each("run's identity.json", "train --config=toys/config.py", "run/identity.json", {"run": "run"}),
    *_each("store.json", "data inspect row/store", "store/train/store.json", {"store": "store"}),
    *_each("store's manifest.json", "data inspect row/store", "store/manifest.json", {"store": "store"}),
    *_each("model's manifest.json", "convert to-hf row/model row/out", "model/manifest.json", {"model": "model"}),
    *_each("model's hf_config.json", "convert to-hf row/model row/out", "model/hf_config.json", {"model": "model"}),
    *_each("HF's config.json", "convert from-hf row/hf row/out", "hf/config.json", {"hf": "hf"}),
    *_each(
        "HF's generation_config.json",
        "generate --run=row/model --prompt=a",
        "model/generation_config.json",
        {"model": "model"},
    ),
    *_each("HF's index", "convert from-hf row/hf row/out", "hf/model.safetensors.index.json", {"hf": "hf"}),
    *[
        Row(f"LongEval's rows: {name}", "eval lines --run=toys/model --cases=row/c --out=row/out", files={"c": content})
        for name, content in {
            "empty": "",
            "deep": DEEP,
            "null": "null",
            "object": "{}",
            "wrong types": '{"prompt": 3, "expected_number": "a", "num_lines": 1, "random_idx": 3}',
            "not UTF-8": b"\xff",
            "huge": '{"prompt": "a", "expected_number": ' + LONG + "}",
            "empty prompt": '{"prompt": "", "expected_number": 3, "num_lines": 1, "random_idx": [1, 1]}',
            "too long": json.dumps({"prompt": "a" * 9999, "expected_number": 3, "num_lines": 1, "random_idx": [1, 1]}),
        }.items()
    ],
    *[
        Row(
            f"SQuAD: {name}",
            "eval ruler --run=toys/model --lengths=100 --tasks=qa_1 --squad=row/c --out=row/out",
            files={"c": content},
        )
        for name, content in TEXTS.items()
    ],
    *[
        Row(
            f"HotpotQA: {name}",
            "eval ruler --run=toys/model --lengths=100 --tasks=qa_2 --hotpotqa=row/c --out=row/out",
            files={"c": content},
        )
        for name, content in {"deep": DEEP, "objects": "[{}]", "numbers": "[1, 2]"}.items()
    ],
    *[
        Row(
            f"essays: {name}",
            "eval ruler --run=toys/model --lengths=100 --tasks=niah_single_2 --essays=row/c.json --out=row/out",
            files={"c.json": content},
        )
        for name, content in {"deep": DEEP, "number": "3", "text is a list": '{"text": []}'}.items()
    ],
    *[
        Row(
            f"LongBench: {name}",
            "eval longbench --run=toys/model --lengths=100 --tasks=qasper --data=row/c --out=row/out",
            files={
                "c/config/dataset2prompt.json": prompts,
                "c/config/dataset2maxlen.json": most,
                "c/data/qasper.jsonl": rows,
            },
        )
        for name, (prompts, most, rows) in {
            "deep": (DEEP, "{}", ""),
            "list": ("[]", "{}", ""),
            "no task": ("{}", "{}", ""),
            "prompt is a number": ('{"qasper": 3}', '{"qasper": 3}', "{}"),
            "braces": (
                '{"qasper": "{context.__class__} {input"}',
                '{"qasper": 3}',
                '{"context": "a", "input": "b", "answers": ["c"], "all_classes": null}\n',
            ),
            "most is negative": (
                '{"qasper": "{context} {input}"}',
                '{"qasper": -3}',
                '{"context": "a", "input": "b", "answers": ["c"], "all_classes": null}\n',
            ),
            "most is huge": (
                '{"qasper": "{context} {input}"}',
                '{"qasper": ' + HUGE + "}",
                '{"context": "a", "input": "b", "answers": ["c"], "all_classes": null}\n',
            ),
            "most is a text": (
                '{"qasper": "{context} {input}"}',
                '{"qasper": "3"}',
                '{"context": "a", "input": "b", "answers": ["c"], "all_classes": null}\n',
            ),
            "deep row": ('{"qasper": "{context} {input}"}', '{"qasper": 3}', DEEP),
            "empty row": ('{"qasper": "{context} {input}"}', '{"qasper": 3}', "{}"),
            "no rows": ('{"qasper": "{context} {input}"}', '{"qasper": 3}', ""),
        }.items()
    ],
    *[
        Row(
            f"HELMET: {name}",
            "eval helmet --run=toys/model --lengths=8K --allow_longer --tasks=json_kv --data=row/c --out=row/out",
            files={"c/data/json_kv/test_k105_dep6.jsonl": rows},
        )
        for name, rows in {"deep": DEEP, "empty": "", "null": "null"}.items()
    ],
    *[
        Row(f"report: {name}", "eval report toys/model --evals=row/e --out=row/out", files={"e/x/cases.jsonl": rows})
        for name, rows in {
            "deep": '{"evaluation": ' + DEEP + "\n",
            "empty": "",
            "null": "null\n",
            "name is a list": '{"evaluation": []}\n',
            "settings are a list": '{"evaluation": "lines", "settings": [3]}\n{}\n',
            "settings are null": '{"evaluation": "lines", "settings": null}\n',
        }.items()
    ],
]
