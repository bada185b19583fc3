"""Numbers and choices on the command line."""

from tests.bad_inputs.runner import Row

GENERATE = "generate --run=toys/model --prompt=ring"
LINES = "eval lines --run=toys/model --out=row/out"
PERPLEXITY = "eval perplexity --run=toys/run --store=toys/store --out=row/out"
ESTIMATE = "estimate --model=tiny --target=v5e-8 --closed_form --seq_len=4096"
PREPARE = "data prepare --source=jsonl:toys/documents.jsonl --store=row/store"
BILLIONS = "1" + "0" * 400
BITS = str(2**62)
OWN_TEMPLATE = (
    "data prepare --source=jsonl:toys/chats.jsonl --store=row/store --format=messages --held_out=0 "
    "--template=tokenizer --tokenizer=toys/tokenizer"
)
TRAIN = "train --config=toys/config.py --config.run_dir=row/run --config.handshake_seconds=1"
SCALED = f"{GENERATE} --max_new_tokens=2 --rope_scaling.kind=yarn --rope_scaling.factor=2"


def _for_values(name: str, command: str, values: list[str]) -> list[Row]:
    """Rows of one option, whose name ends the command, by its value."""
    return [Row(f"{name}={value[:12]}", f"{command}={value}") for value in values]


ROWS = [
    *_for_values(
        "generate max_new_tokens",
        f"{GENERATE} --max_new_tokens",
        ["-1", "1e300", "99999999999999999999"],
    ),
    *_for_values("generate temperature", f"{GENERATE} --temperature", ["nan", "inf", "x"]),
    *_for_values("generate top_k", f"{GENERATE} --max_new_tokens=2 --top_k", ["-1", BILLIONS, "1.5"]),
    *_for_values("generate top_p", f"{GENERATE} --top_p", ["nan", "1.01", "-inf"]),
    *_for_values(
        "generate seed",
        f"{GENERATE} --max_new_tokens=2 --temperature=1 --seed",
        ["1e20", "-1", "99999999999999999999"],
    ),
    *_for_values("generate max_length", f"{GENERATE} --max_length", ["-1", "0", BILLIONS]),
    *_for_values(
        "generate batch_size",
        "generate --run=toys/model --prompts=toys/prompts.jsonl --out=row/o --batch_size",
        ["0", "-5", BILLIONS],
    ),
    *_for_values("generate prefill_chunk", f"{GENERATE} --max_new_tokens=2 --prefill_chunk", ["-1", "0", BILLIONS]),
    *_for_values("generate q_chunk", f"{GENERATE} --max_new_tokens=2 --q_chunk", ["-1", "0", "[]"]),
    *_for_values(
        "generate mesh_dim",
        f"{GENERATE} --max_new_tokens=2 --mesh_dim",
        ["", "1,1,1,a", "1,1,1,-7"],
    ),
    *_for_values(
        "generate cpu_devices", f"{GENERATE} --max_new_tokens=2 --cpu_devices", ["-1", BILLIONS, "1000000000"]
    ),
    *_for_values(
        "generate rope_theta",
        f"{GENERATE} --max_new_tokens=2 --rope_theta",
        ["nan", "0", BILLIONS],
    ),
    *_for_values(
        "generate rope factor",
        f"{GENERATE} --max_new_tokens=2 --rope_scaling.kind=linear --rope_scaling.factor",
        ["nan", "-1", "inf"],
    ),
    *_for_values(
        "generate rope original",
        f"{SCALED} --rope_scaling.original_max_position",
        ["0", "-1", BILLIONS],
    ),
    *_for_values(
        "generate num_processes",
        f"{GENERATE} --distributed --coordinator_address=localhost:9 --process_id=1 --num_processes",
        ["1000000000", "-1", "1"],
    ),
    *_for_values(
        "generate coordinator_address",
        f"{GENERATE} --distributed --process_id=0 --num_processes=2 --coordinator_address",
        ["localhost:99999", f"localhost:{BILLIONS}", "localhost:٣"],
    ),
    *_for_values(
        "train num_processes",
        f"{TRAIN} --distributed --coordinator_address=localhost:9 --process_id=0 --num_processes",
        ["1000000000"],
    ),
    *_for_values(
        "train port",
        "train --config=toys/config.py --distributed --process_id=0 --num_processes=2 --coordinator_address",
        ["localhost:99999"],
    ),
    *_for_values("train stage", "train --config=toys/config.py --stage", ["0", BILLIONS, "1"]),
    *_for_values("train check_devices", "train --config=toys/config.py --check_devices", ["0", BILLIONS, "nan"]),
    *_for_values("train allow", "train --config=toys/config.py --allow", ["nothing"]),
    *_for_values("lines lengths", f"{LINES} --lengths", ["", "1e300", "64,64"]),
    *_for_values("lines num_lines", f"{LINES} --num_lines", ["", BILLIONS, "true"]),
    *_for_values("lines num_cases", f"{LINES} --lengths=100 --num_cases", ["0", BILLIONS, BITS]),
    *_for_values("lines questions", f"{LINES} --lengths=100 --questions", ["0", "-1", BILLIONS]),
    *_for_values("lines batch_size", f"{LINES} --lengths=100 --batch_size", ["0", "-1", BILLIONS]),
    *_for_values(
        "needle depths",
        "eval needle --run=toys/model --out=row/out --lengths=100 --depths",
        ["", "101", "1e300"],
    ),
    *_for_values(
        "needle needles", "eval needle --run=toys/model --out=row/out --lengths=100 --needles", ["0", "-1", BILLIONS]
    ),
    *_for_values("needle asked", "eval needle --run=toys/model --out=row/out --lengths=100 --asked", ["0", "2"]),
    *_for_values(
        "needle num_cases",
        "eval needle --run=toys/model --out=row/out --lengths=100 --num_cases",
        ["0", BILLIONS, BITS],
    ),
    *_for_values("nolima depths", "eval nolima --run=toys/model --out=row/out --lengths=100 --depths", ["x", "200"]),
    *_for_values(
        "nolima num_cases", "eval nolima --run=toys/model --out=row/out --lengths=100 --num_cases", ["0", BILLIONS]
    ),
    *_for_values(
        "mrcr needles", "eval mrcr --run=toys/model --out=row/out --lengths=100 --needles", ["0", "1", BILLIONS]
    ),
    *_for_values("mrcr num_cases", "eval mrcr --run=toys/model --out=row/out --lengths=100 --num_cases", ["0"]),
    *_for_values(
        "ruler num_cases",
        "eval ruler --run=toys/model --out=row/out --lengths=100 --tasks=vt --num_cases",
        ["0", "-1", BILLIONS],
    ),
    *_for_values("harness batch_size", "eval harness --run=toys/model --out=row/out --tasks=x --batch_size", ["0"]),
    *_for_values("perplexity lengths", f"{PERPLEXITY} --lengths", ["0", BILLIONS, "a"]),
    *_for_values("perplexity documents", f"{PERPLEXITY} --lengths=16 --documents", ["0", "-1", BILLIONS]),
    *_for_values("perplexity last", f"{PERPLEXITY} --lengths=16 --last", ["0", "17", BITS]),
    *_for_values(
        "sliding stride",
        "eval sliding --run=toys/run --store=toys/store --out=row/out --lengths=16 --stride",
        ["0", "17", BILLIONS],
    ),
    *_for_values(
        "sliding tokens",
        "eval sliding --run=toys/run --store=toys/store --out=row/out --lengths=16 --stride=8 --tokens",
        ["0", "-1", BILLIONS],
    ),
    *_for_values(
        "longppl alpha",
        "eval longppl --run=toys/run --store=toys/store --out=row/out --lengths=16 --short=8 --stride=4 --alpha",
        ["nan", "inf"],
    ),
    *_for_values(
        "longppl short",
        "eval longppl --run=toys/run --store=toys/store --out=row/out --lengths=16 --stride=4 --short",
        ["0", "16", BILLIONS],
    ),
    *_for_values(
        "longppl stride",
        "eval longppl --run=toys/run --store=toys/store --out=row/out --lengths=16 --short=8 --stride",
        ["0", "-3", BILLIONS],
    ),
    *_for_values("estimate tokens", f"{ESTIMATE} --tokens", ["nan", "0", "inf"]),
    *_for_values("estimate seq_len", f"{ESTIMATE} --seq_len", ["0", BILLIONS, "nan"]),
    *_for_values("estimate batch_size", f"{ESTIMATE} --batch_size", ["0", BILLIONS, BITS]),
    *_for_values("estimate accumulate", f"{ESTIMATE} --accumulate", ["0", BILLIONS]),
    *_for_values(
        "estimate target",
        "estimate --model=tiny --seq_len=4096 --closed_form --target",
        ["", "v5e--1", f"v5e-{BILLIONS}"],
    ),
    *_for_values("estimate window", f"{ESTIMATE} --window", ["-1", BILLIONS]),
    *_for_values("estimate ulysses", f"{ESTIMATE} --ulysses", ["0", "-1", BILLIONS]),
    *_for_values("estimate remat_group", f"{ESTIMATE} --remat_group", ["0", "-1", BILLIONS]),
    *_for_values("estimate q_chunk", f"{ESTIMATE} --q_chunk", ["0", BILLIONS]),
    *_for_values("estimate mesh_dim", f"{ESTIMATE} --mesh_dim", ["", "0,1,1,8", f"{BILLIONS},1,1,1"]),
    *_for_values("plan seq_len", "plan --model=tiny --target=v5e-8 --seq_len", ["0", BILLIONS, BITS]),
    *_for_values(
        "plan batch_size", "plan --model=tiny --target=v5e-8 --seq_len=64 --batch_size", ["0", BILLIONS, BITS]
    ),
    *_for_values("plan max_step_seconds", "plan --model=tiny --target=v5e-8 --max_step_seconds", ["nan", "-1", "0"]),
    *_for_values("plan target", "plan --model=tiny --target", ["nothing"]),
    *_for_values("tune target", "tune --target", ["", "nothing", "h100"]),
    *_for_values("tables row", "tables --row", ["nothing", ""]),
    *_for_values("tables passes", "tables --passes", ["nothing"]),
    *_for_values("tables only", "tables --only", ["nothing"]),
    *_for_values("prepare held_out", f"{PREPARE} --held_out", ["nan", "1", "1e-300"]),
    *_for_values("prepare max_document_bytes", f"{PREPARE} --max_document_bytes", ["0", "-1", BILLIONS]),
    *_for_values("prepare compressibility_tails", f"{PREPARE} --compressibility_tails", ["nan", "1", "-1"]),
    *_for_values("prepare retrieval_tasks", f"{PREPARE} --retrieval_tasks", ["-1", BILLIONS, "1e300"]),
    *_for_values(
        "prepare chat_length",
        "data prepare --source=jsonl:toys/chats.jsonl --store=row/store --format=messages --held_out=0 --chat_length",
        ["-1", "1", BILLIONS],
    ),
    *_for_values(
        "prepare chat_date",
        f"{OWN_TEMPLATE} --chat_date",
        ["x", "10000-01-01", "2024-02-30"],
    ),
    *_for_values("inspect samples", "data inspect toys/store --samples", ["0", "-1", BILLIONS]),
    *_for_values("inspect ring_size", "data inspect toys/store --seq_len=16 --ring_size", ["0", BILLIONS, BITS]),
    *_for_values("inspect seq_len", "data inspect toys/store --ring_size=2 --seq_len", ["0", BILLIONS, BITS]),
    *_for_values(
        "inspect min_length", "data inspect toys/store --ring_size=2 --seq_len=16 --min_length", ["-1", BILLIONS]
    ),
    *_for_values(
        "tokenizer vocab_size",
        "data tokenizer --source=jsonl:toys/documents.jsonl --out=row/t.model --vocab_size",
        ["0", BILLIONS, "100000000"],
    ),
    *_for_values("from-hf dtype", "convert from-hf toys/hf row/out --dtype", ["", "int8", "float64"]),
    *_for_values("to-hf dtype", "convert to-hf toys/model row/out --dtype", ["", "x"]),
    *_for_values(
        "to-hf shard_size",
        "convert to-hf toys/model row/out --shard_size",
        ["", "1e300", f"{BILLIONS}GB"],
    ),
    *_for_values("verify length", "convert verify toys/hf toys/model --length", ["0", "-1", BILLIONS]),
    *_for_values("checkpoint inspect step", "checkpoint inspect toys/run --step", ["-1", "7", BILLIONS]),
    *_for_values("checkpoint verify step", "checkpoint verify toys/run --step", ["-1", "nan"]),
]
