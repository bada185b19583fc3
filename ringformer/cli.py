"""`ringformer VERB`: each verb imports what it needs when it is called."""

import argparse
import difflib
import os
import signal
import sys
from importlib import import_module
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
  convert from-hf, convert to-hf, convert verify
                  LLaMA checkpoints of Hugging Face in and out, and the proof that they are the same model
                  ringformer convert from-hf PATH OUT; ringformer train ... --config.init_from=OUT
  estimate        compile a training step for hardware that is not here: does it fit, what is hidden
                  ringformer estimate --model=llama_7b --target=v5e-256 --mesh_dim=1,1,1,256 --seq_len=4194304
  plan            the fastest settings that fit a context, or the longest context
                  ringformer plan --model=llama_13b --target=32xA100-80
  tables          search the longest contexts of the paper's Table 3, compiled
                  ringformer tables --row=v5e-256/7b

Each verb has --help."""


class UsageError(ValueError):
    """A mistake of the caller's, to be told in one line."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    words = 2 if argv[0] in ("data", "convert") and len(argv) > 1 else 1
    verb, rest = " ".join(argv[:words]), argv[words:]
    try:
        if verb not in VERBS:
            near = difflib.get_close_matches(verb, VERBS, 1)
            raise UsageError(f"unknown verb {verb!r}" + (f"; did you mean {near[0]!r}?" if near else f"\n\n{USAGE}"))
        code = VERBS[verb](rest) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UsageError, ValueError, FileNotFoundError) as error:
        print(f"ringformer {verb}: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"ringformer {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ringformer {verb}: interrupted", file=sys.stderr)
        return 130


def load_config(argv: list[str]):
    """The ConfigDict of `--config=FILE` with its `--config.key=value` overrides."""
    from ringformer.train import config_files

    path = next((a.split("=", 1)[1] for a in argv if a.startswith("--config=")), None)
    if path is None:
        raise UsageError("which config? --config=configs/NAME.py")
    try:
        return config_files.load_config(path, [a for a in argv if not a.startswith("--config=")])
    except ValueError as error:
        raise UsageError(str(error)) from None


def train(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "ringformer train",
        usage="ringformer train --config=configs/NAME.py [--config.key=value ...] [--stage=N] [--distributed]",
        description="The keys and what they mean: ringformer/train/config.py. A run_dir that holds checkpoints is "
        "resumed; of a config with stages, where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("--stage", type=int, help="of a config with stages, train this one alone (1 is the first)")
    found = "on a TPU pod or under SLURM they find each other, elsewhere name the other three"
    parser.add_argument("--distributed", action="store_true", help=f"be one of many processes: {found}")
    parser.add_argument("--coordinator_address", help="HOST:PORT of process 0")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int, help="from 0")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(argv)
    values = load_config(rest)
    from ringformer.train.config_files import parse_stages

    configs = parse_stages(values)
    if args.stage is not None and not values.stages:
        raise UsageError(f"--stage={args.stage}: the config has no stages")
    simulate_cpu_devices(configs[0].cpu_devices)
    if args.distributed:
        join_processes(args.coordinator_address, args.num_processes, args.process_id)
    elif args.coordinator_address or args.num_processes or args.process_id is not None:
        raise UsageError("--coordinator_address, --num_processes and --process_id need --distributed")
    from ringformer.train.context_stages import prepare_stages, train_stages
    from ringformer.train.loop import prepare
    from ringformer.train.loop import train as run_training
    from ringformer.train.preemption import Terminated

    try:
        if values.stages:
            train_stages(configs, prepare_stages(configs, args.stage))
        else:
            run_training(prepare(configs[0]))
    except Terminated as end:
        print(f"ringformer train: {end}", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


MODEL_FLAGS = {"attention": str, "layout": str, "compute_dtype": str, "remat": str, "remat_group": int,
               "head_groups": int, "q_chunk": int, "k_chunk": int}  # fmt: skip


def estimate(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("ringformer estimate", description=(
        "Compile the training step for a target and report memory, communication and overlap. With --config, other "
        "arguments, such as --config.model.ffn_chunk=512, change the configuration; of one with stages, each is "
        "estimated, with the days and device-hours of its tokens."))  # fmt: skip
    parser.add_argument("--model", default="llama_7b", help="a preset (ringformer/models/llama_presets.py)")
    parser.add_argument("--config", help="a config file instead of a preset")
    parser.add_argument("--stage", type=int, help="of a config with stages, this one alone (1 is the first)")
    parser.add_argument("--target", required=True, help="v5e-256, v4-1024, v3-512, v5e:4x8, 8xH100, ...")
    parser.add_argument("--mesh_dim", help="dp,fsdp,tp,sp; -1 for the rest (a preset: 1,1,1,-1)")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; a preset needs it")
    parser.add_argument("--batch_size", type=int, help="sequences a step (a preset: 1)")
    chosen = {"head_groups", "remat_group"}
    for name, kind in MODEL_FLAGS.items():
        default = "; if neither is given, chosen so that it fits" if name in chosen else ""
        parser.add_argument(f"--{name}", type=kind, help=f"model.{name} (ringformer/models/llama.py){default}")
    parser.add_argument("--offload", action="store_true", help="layer inputs wait in host memory")
    parser.add_argument("--tokens", type=float, help="a budget, e.g. 1e9: days and device-hours to train on it")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, of each stage")
    parser.add_argument("--require_fit", action="store_true", help="exit with code 3 if something does not fit")
    parser.add_argument("--generate_code", action="store_true", help="compile on from the schedule to machine code: "
                        "ten times as long on TPU, the same verdict, and proof that all of it compiles")  # fmt: skip
    args, rest = parser.parse_known_args(argv)
    if args.tokens is not None and args.tokens <= 0:
        raise UsageError(f"--tokens={args.tokens:g} must be positive: how many tokens to train on, e.g. 1e9")
    if not args.config and args.seq_len is None:
        raise UsageError("which context? --seq_len=1048576, or a --config that says")
    values = load_config([f"--config={args.config}", *rest]) if args.config else _preset_config(args.model, rest)

    import json
    from dataclasses import replace

    from ringformer.estimate import closed_forms, report
    from ringformer.estimate.compile_step import CompilerFailure
    from ringformer.estimate.targets import only_compilers, target
    from ringformer.estimate.workload import Work, judge, row, table, work
    from ringformer.models.llama_config import LlamaConfig
    from ringformer.models.llama_presets import preset
    from ringformer.train.config_files import parse_stages

    only_compilers()
    goal = target(args.target)
    if args.config:
        works = work(parse_stages(values, inherit=False))
    else:
        works = [Work(args.model, LlamaConfig(**preset(args.model)), "1,1,1,-1", args.seq_len)]
    staged = bool(values.stages)
    if args.stage is not None and not (staged and 1 <= args.stage <= len(works)):
        raise UsageError(f"there is no stage {args.stage}: the config has {len(values.stages)}")
    named = {"mesh_dim": args.mesh_dim, "seq_len": args.seq_len, "batch_size": args.batch_size, "budget": args.tokens}
    model = {name: getattr(args, name) for name in (*MODEL_FLAGS, "offload") if getattr(args, name)}
    works = [one._replace(model=replace(one.model, **model), **{k: v for k, v in named.items() if v is not None})
             for one in (works[args.stage - 1 : args.stage] if args.stage else works)]  # fmt: skip
    choose = not (args.config or args.head_groups or args.remat_group)

    rows = []
    for one in works:
        try:
            one, found = judge(one, goal, choose, lambda line: print(line, file=sys.stderr), args.generate_code)
        except CompilerFailure as failure:
            said = f"the compiler broke down, which says nothing of whether it fits: {failure}"
            print(f"ringformer estimate: {one.name}: {said}", file=sys.stderr)
            return 1
        if staged:
            rows.append(row(one, goal, found))
            if args.json:
                print(json.dumps(rows[-1]), flush=True)
            if args.json or len(works) > 1:
                continue
        title = (f"{args.config or args.model}, {one.batch_size} x {one.seq_len:,} tokens, mesh {one.mesh_dim}, "
                 f"{args.target}")  # fmt: skip
        parts = one.memory(goal)
        if found is None:
            as_json = report.closed_form_as_json(goal, parts, closed_forms.host_bytes(one.model, one.local(goal)))
            print(json.dumps(as_json) if args.json else report.closed_form_as_text(title, goal, parts))
            rows = rows or [as_json]
            continue
        time = found.schedule and closed_forms.step_time(found.schedule, one.step_tokens)
        title += f", head_groups {one.model.head_groups}, remat_group {one.model.remat_group}"
        hops = _ring_hops(one, goal)
        saving = {name: getattr(one.model, name) for name in ("head_groups", "remat_group", "q_chunk", "k_chunk")}
        as_json = saving | report.as_json(found, time, hops)
        if one.budget and time:
            as_json |= report.budget_as_json(time, goal, one.budget)
        rows = rows or [as_json]
        print(json.dumps(as_json) if args.json
              else report.as_text(title, goal, found, time, parts, hops, one.budget))  # fmt: skip
    if staged and not args.json:
        print(table(rows))
    return 3 if args.require_fit and not all(r["fits"] and r["fits_host"] for r in rows) else 0


def _ring_hops(one, goal) -> dict:
    """A hop of the ring each way, modelled; nothing without a ring."""
    from ringformer.estimate import closed_forms
    from ringformer.mesh import mesh_shape

    _, _, tp, sp = mesh_shape(one.mesh_dim, goal.num_devices)
    if one.model.attention != "ring" or sp == 1:
        return {}
    return {
        name: closed_forms.hop(one.model, goal, one.seq_len // sp, ranks=sp * tp, tp=tp, backward=name == "backward")
        for name in ("forward", "backward")
    }


def plan(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer plan", description=(
        "The fastest mesh and memory settings that the compiler accepts for a context, or the longest. Fastest by a "
        "model of time: FLOPs at the share of the peak that `estimate` counts on, and what the schedule leaves "
        "exposed."))  # fmt: skip
    parser.add_argument("--model", required=True, help="a preset (ringformer/models/llama_presets.py)")
    parser.add_argument("--target", required=True, help="v5e-256, 32xA100-80, ...")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; without: as long as possible")
    parser.add_argument("--compute_dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args(argv)
    from ringformer.estimate.plan import as_text, longest_plan, plan
    from ringformer.estimate.targets import only_compilers

    only_compilers()

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
    from ringformer.estimate.targets import only_compilers
    from ringformer.paper import activation_memory
    from ringformer.paper.max_context import ROWS, SCALING, cells, fill
    from ringformer.paper.tables_document import write_tables

    only_compilers()

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
        activation_memory.fill(table1, log)
    fill(out, wanted, log, args.passes)
    write_tables(out, table1, docs)
    print(f"{out}, {docs}/tables.md, figure1.png, figure5.png")


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


def join_processes(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Make this process one of many that train together; before anything has asked JAX for a device."""
    import jax

    named = (coordinator_address, num_processes, process_id)
    if any(x is not None for x in named) and None in named:
        raise UsageError("name all of --coordinator_address, --num_processes and --process_id, or none of them")
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except ValueError as error:
        if coordinator_address:
            raise
        raise UsageError(
            f"--distributed: JAX finds no TPU pod and no SLURM job here ({error}); name --coordinator_address, "
            "--num_processes and --process_id"
        ) from None


def _verb(module: str, function: str):
    """A verb that lives in another module, which is imported when it is asked for."""

    def run(argv: list[str]) -> int | None:
        return getattr(import_module(module), function)(argv)

    return run


VERBS = {
    "train": train,
    "data prepare": _verb("ringformer.data.commands", "prepare"),
    "data inspect": _verb("ringformer.data.commands", "inspect"),
    "data tokenizer": _verb("ringformer.data.commands", "tokenizer"),
    "convert from-hf": _verb("ringformer.convert.commands", "convert_from_hf"),
    "convert to-hf": _verb("ringformer.convert.commands", "convert_to_hf"),
    "convert verify": _verb("ringformer.convert.commands", "convert_verify"),
    "estimate": estimate,
    "plan": plan,
    "tables": tables,
}


if __name__ == "__main__":
    sys.exit(main())
