"""Places that are empty, missing, of another kind, or cannot be named; and variables of the environment."""

import os

from tests.bad_inputs.runner import Content, Row

PLACES: dict[str, tuple[str, dict[str, Content]]] = {
    "empty": ("", {}),
    "missing": ("row/nothing", {}),
    "a file": ("toys/config.py", {}),
    "a dangling link": ("row/l", {"l": lambda path: path.symlink_to("nothing")}),
    "a link to itself": ("row/l", {"l": lambda path: path.symlink_to("l")}),
    "a fifo": ("row/p", {"p": lambda path: os.mkfifo(path)}),
    "/dev/null": ("/dev/null", {}),
    "a NUL": ("row/a\0b", {}),
    "a long name": ("row/" + "x" * 300, {}),
    "a long path": ("row/" + "x/" * 3000, {}),
    "not UTF-8": ("row/\udcff", {}),
    "a URL": ("https://example.com/x", {}),
}
"""Paths that nobody should give, with files that are there."""

READERS = {
    "train config": "train --config='{}'",
    "train init_from": "train --config=toys/config.py '--config.init_from={}'",
    "estimate config": "estimate --target=v5e-8 --config='{}'",
    "plan store": "plan --model=tiny --target=v5e-8 --seq_len=64 --store='{}'",
    "generate run": "generate --prompt=a --run='{}'",
    "generate config": "generate --run=toys/model --prompt=a --config='{}'",
    "generate session": "generate --run=toys/model --prompt=a --session='{}'",
    "generate prompts": "generate --run=toys/model --out=row/o --prompts='{}'",
    "data inspect": "data inspect '{}'",
    "data prepare jsonl": "data prepare --store=row/store '--source=jsonl:{}'",
    "data prepare text": "data prepare --store=row/store '--source=text:{}'",
    "data prepare parquet": "data prepare --store=row/store '--source=parquet:{}'",
    "data prepare arrow": "data prepare --store=row/store '--source=arrow:{}'",
    "data prepare datasets": "data prepare --store=row/store '--source=datasets:{}'",
    "from-hf path": "convert from-hf '{}' row/out",
    "from-hf adapters": "convert from-hf toys/hf row/out --adapters='{}'",
    "to-hf ckpt": "convert to-hf '{}' row/out",
    "to-peft ckpt": "convert to-peft '{}' row/out",
    "verify hf": "convert verify '{}' toys/model",
    "verify ckpt": "convert verify toys/hf '{}'",
    "eval lines run": "eval lines --lengths=100 --out=row/out --run='{}'",
    "eval lines cases": "eval lines --run=toys/model --out=row/out --cases='{}'",
    "eval perplexity store": "eval perplexity --run=toys/run --lengths=16 --out=row/out --store='{}'",
    "eval longbench data": "eval longbench --run=toys/model --lengths=100 --out=row/out --data='{}'",
    "eval helmet data": "eval helmet --run=toys/model --lengths=8K --allow_longer --out=row/out --data='{}'",
    "eval longppl evaluator": "eval longppl --run=toys/run --store=toys/store --lengths=16 --out=row --evaluator='{}'",
    "eval report run": "eval report '{}'",
    "eval report evals": "eval report toys/model --out=row/out --evals='{}'",
    "checkpoint list": "checkpoint list '{}'",
    "checkpoint inspect": "checkpoint inspect '{}'",
    "checkpoint verify": "checkpoint verify '{}'",
    "checkpoint copy": "checkpoint copy '{}' file:///proc/nothing",
    "configs copy": "configs copy '{}' row/c.py",
}
"""Commands that read a place."""

WRITERS = {
    "train run_dir": "train --config=toys/config.py '--config.run_dir={}'",
    "train store": "train --config=toys/config.py '--config.data.store={}'",
    "data prepare store": "data prepare --source=jsonl:toys/documents.jsonl --held_out=0 --store='{}'",
    "data tokenizer out": "data tokenizer --source=jsonl:toys/documents.jsonl --vocab_size=300 --out='{}'",
    "from-hf out": "convert from-hf toys/hf '{}'",
    "to-hf out": "convert to-hf toys/model '{}'",
    "to-peft out": "convert to-peft toys/run '{}'",
    "generate out": "generate --run=toys/model --max_new_tokens=2 --prompts=toys/prompts.jsonl --out='{}'",
    "generate save_session": "generate --run=toys/model --max_new_tokens=2 --prompt=a --save_session='{}'",
    "eval lines out": "eval lines --run=toys/model --lengths=100 --out='{}'",
    "eval report out": "eval report toys/model --out='{}'",
    "checkpoint copy to": "checkpoint copy file:///nothing '{}'",
    "configs copy to": "configs copy quickstart '{}'",
    "tune out": "tune --target=nothing --out='{}'",
    "tables out": "tables --row=nothing --out='{}'",
}
"""Commands that write a place."""


ALLOWED = {
    "train config is a file",
    "estimate config is a file",
    "train init_from is empty",
    "train run_dir is empty",
    "train run_dir is the current folder",
    "train run_dir is the run",
    "train run_dir is a store",
    "train store is a store",
    "data prepare store is a store",
    "configs copy to is empty",
    "generate prompts is a file",
    "configs copy to is the run",
    "configs copy to is a store",
    "configs copy to is the current folder",
    "eval lines out is the current folder",
    "eval lines out is a store",
}
"""Places that these options may be given."""


def _rows(commands: dict[str, str], places: dict[str, tuple[str, dict[str, Content]]]) -> list[Row]:
    rows = []
    for verb, command in commands.items():
        for name, (place, files) in places.items():
            if f"{verb} is {name}" not in ALLOWED:
                rows.append(Row(f"{verb} is {name}", command.format(place), files=files))
    return rows


OF_OUTPUTS = {
    name: PLACES[name]
    for name in (
        "empty",
        "a file",
        "a link to itself",
        "a fifo",
        "a NUL",
        "a long name",
        "a URL",
    )
}
OF_OUTPUTS |= {
    "the current folder": (".", {}),
    "/proc": ("/proc/x", {}),
    "among checkpoints": ("toys/run/checkpoints/x", {}),
    "the run": ("toys/run", {}),
    "a store": ("toys/store", {}),
    "in a converted model's checkpoints": ("toys/model/checkpoints/x", {}),
}

ENVIRONMENT = [
    Row(
        "completion without a line",
        "configs list",
        harmless="a shell that completes words also says which line",
        variables={"_ARGCOMPLETE": "1"},
    ),
    Row(
        "a cache that is empty",
        "configs list",
        harmless="an empty variable counts as unset",
        variables={"XDG_CACHE_HOME": ""},
    ),
    Row(
        "SLURM with nonsense",
        "train --config=toys/config.py --config.run_dir=row/run --distributed",
        variables={
            "SLURM_JOB_ID": "x",
            "SLURM_STEP_NODELIST": "[[[",
            "SLURM_NTASKS": "nan",
            "SLURM_PROCID": "-1",
            "SLURM_LOCALID": "x",
            "SLURM_STEP_NUM_NODES": "x",
        },
    ),
    Row(
        "SLURM without a number of tasks",
        "train --config=toys/config.py --config.run_dir=row/run --distributed",
        variables={"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a"},
    ),
    Row(
        "Open MPI with nonsense",
        "train --config=toys/config.py --config.run_dir=row/run --distributed",
        variables={"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "nan", "OMPI_COMM_WORLD_RANK": "x"},
    ),
    Row(
        "a pool of host memory that is no number",
        "train --config=toys/config.py --config.run_dir=row/run --config.steps=0",
        variables={"XLA_PYTHON_CLIENT_MEM_FRACTION": "nan"},
    ),
]

OF_INPUTS = {name: PLACES[name] for name in ("missing", "a file", "a fifo", "a NUL", "a long name")}

OTHERS = {name: place for name, place in PLACES.items() if name not in OF_INPUTS}
OF_EVERY_KIND = {name: READERS[name] for name in ("data inspect", "generate run", "eval report evals")}

ROWS = [*_rows(READERS, OF_INPUTS), *_rows(OF_EVERY_KIND, OTHERS), *_rows(WRITERS, OF_OUTPUTS), *ENVIRONMENT]
