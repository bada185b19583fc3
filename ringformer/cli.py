"""`ringformer VERB`: each verb imports what it needs when it is called."""

import argparse
import difflib
import sys
from pathlib import Path

USAGE = """usage: ringformer VERB [options]

  train           train a model
                  ringformer train --config=configs/quickstart.py [--config.steps=100]
  data prepare    tokenize documents or conversations into a store
                  ringformer data prepare --store=DIR --source='jsonl:docs/*.jsonl'
  data inspect    show documents of a store, and what of them is trained on
                  ringformer data inspect DIR --tokenizer=my.model --samples=3
  data tokenizer  train a SentencePiece tokenizer
                  ringformer data tokenizer --source='text:docs/*.txt' --vocab_size=8192 --out=my.model
  estimate        compile a training step for hardware that is not here: does it fit, what is hidden
                  ringformer estimate --model=llama_7b --target=v5e-256 --mesh_dim=1,1,1,256 --seq_len=4194304
  plan            the fastest settings that fit a context, or the longest context
                  ringformer plan --model=llama_13b --target=32xA100-80
  tables          search the longest contexts of the paper's Table 3, compiled
                  ringformer tables --row=v5e-256/7b

Each verb has --help."""


class UsageError(Exception):
    """A mistake of the caller's, to be told in one line."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    words = 2 if argv[0] == "data" and len(argv) > 1 else 1
    verb, rest = " ".join(argv[:words]), argv[words:]
    try:
        if verb not in VERBS:
            near = difflib.get_close_matches(verb, VERBS, 1)
            raise UsageError(f"unknown verb {verb!r}" + (f"; did you mean {near[0]!r}?" if near else f"\n\n{USAGE}"))
        return VERBS[verb](rest) or 0
    except (UsageError, ValueError, FileNotFoundError) as error:
        print(f"ringformer {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ringformer {verb}: interrupted", file=sys.stderr)
        return 130


def load_config(argv: list[str]):
    """The ConfigDict of `--config=FILE` with its `--config.key=value` overrides."""
    from absl import flags
    from ml_collections import config_flags

    path = next((a.split("=", 1)[1] for a in argv if a.startswith("--config=")), None)
    if path is None:
        raise UsageError("which config? --config=configs/NAME.py")
    if not Path(path).is_file():
        there = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py")))
        raise UsageError(f"there is no config file {path}" + (f"; there are: {there}" if there else ""))
    values = flags.FlagValues()
    argv = ["ringformer", *argv]
    config_flags.DEFINE_config_file("config", None, "the run", flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)[1:]
    except (AttributeError, KeyError) as error:  # a key that the config does not have
        raise UsageError(f"{path} has no key {error.args[0]}".replace("\n", ". ")) from None
    except flags.Error as error:
        raise UsageError(str(error)) from None
    if rest:
        raise UsageError(f"unexpected arguments: {' '.join(rest)}; overrides look like --config.steps=100")
    return values.config


def train(argv: list[str]) -> None:
    if "-h" in argv or "--help" in argv:
        print("usage: ringformer train --config=configs/NAME.py [--config.key=value ...]\n\n"
              "The keys and what they mean: ringformer/train/config.py.\n"
              "A run_dir that holds checkpoints is resumed.")  # fmt: skip
        return
    values = load_config(argv)
    from ringformer.train.config import parse

    config = parse(values)
    simulate_cpu_devices(config.cpu_devices)
    from ringformer.train.loop import prepare
    from ringformer.train.loop import train as run_training

    run_training(prepare(config))


MODEL_FLAGS = {"attention": str, "layout": str, "compute_dtype": str, "remat": str, "remat_group": int,
               "head_groups": int, "q_chunk": int, "k_chunk": int}  # fmt: skip


def estimate(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("ringformer estimate", description=(
        "Compile the training step for a target and report memory, communication and overlap. With --config, other "
        "arguments, such as --config.model.ffn_chunk=512, change the configuration."))  # fmt: skip
    parser.add_argument("--model", default="llama_7b", help="a preset (ringformer/models/presets.py)")
    parser.add_argument("--config", help="a config file instead of a preset")
    parser.add_argument("--target", required=True, help="v5e-256, v4-1024, v3-512, v5e:4x8, 8xH100, ...")
    parser.add_argument("--mesh_dim", default="1,1,1,-1", help="dp,fsdp,tp,sp; -1 for the rest")
    parser.add_argument("--seq_len", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--batch_size", type=int, default=1, help="sequences a step")
    chosen = {"head_groups", "remat_group"}
    for name, kind in MODEL_FLAGS.items():
        default = "; if neither is given, chosen so that it fits" if name in chosen else ""
        parser.add_argument(f"--{name}", type=kind, help=f"model.{name} (ringformer/models/llama.py){default}")
    parser.add_argument("--offload", action="store_true", help="layer inputs wait in host memory")
    parser.add_argument("--tokens", type=float, help="a budget, e.g. 1e9: days and device-hours to train on it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args, rest = parser.parse_known_args(argv)
    if args.tokens is not None and args.tokens <= 0:
        raise UsageError(f"--tokens={args.tokens:g} must be positive: how many tokens to train on, e.g. 1e9")
    values = load_config([f"--config={args.config}", *rest]) if args.config else _preset_config(args.model, rest)
    for name in (*MODEL_FLAGS, "offload"):
        if getattr(args, name):
            values.model[name] = getattr(args, name)

    import json
    from dataclasses import replace

    _only_compilers()
    from ringformer.estimate import report, roofline
    from ringformer.estimate.compile import CompilerFailure, compile_step
    from ringformer.estimate.search import Saving, likely_savings
    from ringformer.estimate.targets import MissingCompiler, target
    from ringformer.mesh import mesh_shape
    from ringformer.models.llama import LlamaConfig

    model, goal, tokens = LlamaConfig(**values.model.to_dict()), target(args.target), args.seq_len * args.batch_size
    _, fsdp, tp, sp = mesh_shape(args.mesh_dim, goal.num_devices)
    local = tokens // goal.num_devices
    shards = {"devices": fsdp * tp * sp, "tp": tp}
    title = (
        f"{args.config or args.model}, {args.batch_size} x {args.seq_len:,} tokens, mesh {args.mesh_dim}, {args.target}"
    )
    settings = [Saving(model.head_groups, model.remat_group, model.q_chunk, model.k_chunk)]
    if not (args.config or args.head_groups or args.remat_group):
        settings = likely_savings(model, goal, local, **shards)
    try:
        for saving in settings:
            model = replace(model, **vars(saving))
            parts = roofline.memory(model, local, **shards)
            print(f"compiling for {goal.topology} with {saving}; minutes for a large model", file=sys.stderr)
            found = compile_step(model, goal, args.mesh_dim, seq_len=args.seq_len, batch_size=args.batch_size)
            if found.fits:
                break
    except MissingCompiler as missing:
        print(missing, file=sys.stderr)
        as_json = report.closed_form_as_json(goal, parts, roofline.host_bytes(model, local))
        print(json.dumps(as_json) if args.json else report.closed_form_as_text(title, goal, parts))
        return 0
    except CompilerFailure as failure:
        said = f"the compiler broke down, which says nothing of whether it fits: {failure}"
        print(f"ringformer estimate: {said}", file=sys.stderr)
        return 1
    time = found.schedule and roofline.step_time(found.schedule, tokens)
    title += f", head_groups {model.head_groups}, remat_group {model.remat_group}"
    hops = {
        name: roofline.hop(model, goal, args.seq_len // sp, ranks=sp * tp, tp=tp, backward=name == "backward")
        for name in ("forward", "backward") if model.attention == "ring" and sp > 1
    }  # fmt: skip
    as_json = vars(saving) | report.as_json(found, time, hops)
    if args.tokens and time:
        as_json |= report.budget_as_json(time, goal, args.tokens)
    print(json.dumps(as_json) if args.json else report.as_text(title, goal, found, time, parts, hops, args.tokens))
    return 0


def plan(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer plan", description=(
        "The fastest mesh and memory settings that the compiler accepts for a context, or the longest."))  # fmt: skip
    parser.add_argument("--model", required=True, help="a preset (ringformer/models/presets.py)")
    parser.add_argument("--target", required=True, help="v5e-256, 32xA100-80, ...")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; without: as long as possible")
    parser.add_argument("--compute_dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args(argv)
    _only_compilers()
    from ringformer.estimate.plan import as_text, longest_plan, plan

    def log(line):
        print(line, file=sys.stderr, flush=True)

    if args.seq_len is None:
        found = longest_plan(args.model, args.target, args.compute_dtype, log)
    else:
        found = plan(args.model, args.target, args.seq_len, args.compute_dtype, log)
    print(as_text(args.model, args.target, found))


def tables(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer tables", description=(
        "Search the paper's Table 3 with the real compilers: hours for all of it. Each attempt is kept; run it again "
        "to go on."))  # fmt: skip
    parser.add_argument("--row", help="one row, e.g. v5e-256/7b; without: all")
    parser.add_argument("--out", default="results/max_context.json")
    parser.add_argument("--docs", default="docs", help="the folder of tables.md and its pictures")
    parser.add_argument("--passes", type=int, help="stop after this many lengths of each cell; 0 only writes --docs")
    parser.add_argument("--only", default="", help="cells with this in their name, e.g. ring/bfloat16; or table1")
    args = parser.parse_args(argv)
    _only_compilers()
    from ringformer.estimate import activations
    from ringformer.estimate.document import write_tables
    from ringformer.estimate.tables import ROWS, SCALING, cells, fill

    known = ROWS + SCALING
    rows = [row for row in known if args.row in (None, row.name)]
    if not rows:
        raise UsageError(f"no row {args.row!r}; rows: {', '.join(row.name for row in known)}")
    wanted = [cell for cell in cells(rows) if args.only in cell.name]
    out, docs = Path(args.out), Path(args.docs)
    if out.is_dir():
        raise UsageError(f"--out={args.out} is a folder; name the JSON file, e.g. results/max_context.json")
    if not wanted and args.only != "table1":
        raise UsageError(f"no cell has {args.only!r} in its name; a name is like {cells(rows)[0].name}, or table1")

    def log(line):
        print(line, flush=True)

    table1 = out.with_name("activations.json")
    if args.only == "table1" or not (args.row or args.only or args.passes == 0):
        activations.fill(table1, log)
    fill(out, wanted, log, args.passes)
    write_tables(out, table1, docs)
    print(f"{out}, {docs}/tables.md, figure1.png, figure5.png")


def _only_compilers() -> None:
    """The compilers are all that is wanted of a TPU or GPU here; several estimates may load them at once."""
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def _preset_config(model: str, overrides: list[str]):
    """The config of a preset alone, with overrides."""
    if overrides:
        raise UsageError(f"unexpected arguments: {' '.join(overrides)}; with --config=FILE, overrides are possible")
    from ringformer.train.config import base_config

    return base_config(model)


def simulate_cpu_devices(count: int) -> None:
    """Make JAX run on `count` simulated CPU devices (0: leave it as it is); before anything has asked it for one."""
    import jax

    if count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def data_prepare(argv: list[str]) -> None:
    from ringformer.data.commands import prepare

    prepare(argv)


def data_inspect(argv: list[str]) -> None:
    from ringformer.data.commands import inspect

    inspect(argv)


def data_tokenizer(argv: list[str]) -> None:
    from ringformer.data.commands import tokenizer

    tokenizer(argv)


VERBS = {"train": train, "data prepare": data_prepare, "data inspect": data_inspect, "data tokenizer": data_tokenizer,
         "estimate": estimate, "plan": plan, "tables": tables}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
