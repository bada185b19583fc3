"""`ringformer generate`."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringformer.cli.dataclass_flags import add_flags, from_flags
from ringformer.cli.parser import Switch, output_file
from ringformer.files.output_place import check_output
from ringformer.inference.options import (
    add_model_options,
    add_template_option,
    asked_dtype,
    check_template_option,
    load_generator,
)
from ringformer.inference.sampling import Sampling
from ringformer.processes.flags import add_distributed_flags, member_of

if TYPE_CHECKING:
    from ringformer.inference.text.answers import Answer
    from ringformer.inference.text.run_text import RunText
    from ringformer.inference.text.saved_text import SavedText
    from ringformer.processes.rendezvous import Membership

MEET_SECONDS = 60.0
"""Seconds that processes wait for each other."""


def add_generate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer generate`."""
    parser.description = (
        "Continue a prompt with the model of a run, or answer it with --chat. Text goes to stdout as it is generated, "
        "tokens per second to stderr. Without --prompt and --prompt_file, the prompt is read from stdin; on a "
        "terminal, prompts are read in a loop and a chat keeps its history. Ctrl-C ends an answer, Ctrl-D a "
        "conversation. With --distributed, several processes work on the same prompt, which must be given to each; "
        "process 0 prints the answer. --save_session keeps the cache of a prompt, and --session goes on with it."
    )
    add_model_options(parser, "the folder of a run, of a stage of one, or of a converted model", "run_dir")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the text to continue; with --chat, a question")
    source.add_argument("--prompt_file", metavar="FILE", help="a UTF-8 file with the prompt, including its newlines")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSON lines with "prompt"; the answers are written to --out, and resumed there',
    )
    parser.add_argument("--out", metavar="FILE", help='with --prompts: the same JSON lines with "text" or "error"')
    parser.add_argument("--batch_size", type=int, help="with --prompts: prompts to answer at a time; default: 1")
    parser.add_argument("--save_session", metavar="DIR", help="save the cache of the prompt, once it is read, here")
    parser.add_argument(
        "--session",
        metavar="DIR",
        help="begin the prompt with that of a saved session, which is not read again; its lengths and compute_dtype "
        "are the defaults",
    )
    parser.add_argument("--chat", action=Switch, help="answer using the run's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a chat; default: the template's own")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="the longest continuation")
    stop_help = "end the text before this string; may be repeated; default: none"
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help=stop_help)
    add_flags(parser, Sampling)
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help="longest prompt and continuation, or longest chat; default: the context of the run",
    )
    add_template_option(parser)
    add_distributed_flags(parser)
    return _generate


def _generate(args: argparse.Namespace) -> int:
    from ringformer.parallel.compilation_cache import keep_programs
    from ringformer.parallel.mesh import simulate_cpu_devices

    _check(args)
    simulate_cpu_devices(args.cpu_devices)
    member = member_of(args, MEET_SECONDS)
    if member is None:
        keep_programs()
    prompt = None
    if args.prompts is None:
        prompt = _prompt(args)
        if prompt is None and args.save_session:
            raise ValueError("--save_session saves the cache of one prompt: give --prompt or --prompt_file")
    from ringformer.checkpoints.rope_change import rope_change
    from ringformer.inference.text.run_text import RunText
    from ringformer.inference.text.text_stream import check_stops
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    sampling = from_flags(args, Sampling)
    text = RunText(
        args.run_dir,
        tokenizer=args.tokenizer,
        template=args.template,
        template_option=args.template_option,
        allow=[args.allow],
        rope=rope_change(args),
    )
    check_stops(args.stop, text.tokenizer)
    if args.prompts is not None:
        return _answer_rows(args, text, sampling)
    return _answer(args, text, sampling, prompt, member)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that contradict one another."""
    if args.system is not None and not args.chat:
        raise ValueError("--system is the system message of a --chat")
    check_template_option(args)
    dp = args.mesh_dim.split(",")[0].strip()
    if dp != "1" and dp.lstrip("-").isdigit():
        raise ValueError(
            f"--mesh_dim={args.mesh_dim}: dp={dp} distributes rows, but a prompt is a single row: set dp=1 and give "
            "the devices to fsdp, tp or sp"
        )
    of_file = args.prompts is not None
    if (args.out is not None) != of_file or (args.batch_size is not None and not of_file):
        raise ValueError("--prompts=FILE, --out=FILE and --batch_size belong together: give --prompts and --out")
    if of_file:
        out = output_file(args.out)
        if out.exists() and Path(args.prompts).exists() and out.samefile(args.prompts):
            raise ValueError(f"--out={args.out} is the file of the prompts: choose another --out")
    if of_file and (args.distributed or args.system is not None or args.session or args.save_session):
        raise ValueError("--prompts takes none of --distributed, --system, --session and --save_session")
    if args.save_session is not None and check_output(args.save_session, "--save_session").exists():
        raise ValueError(f"--save_session={args.save_session} exists: choose another folder, or delete it")
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch_size={args.batch_size} must be at least 1")


def _answer(
    args: argparse.Namespace, text: "RunText", sampling: Sampling, prompt: str | None, member: "Membership | None"
) -> int:
    """Answer a prompt, or those that the user types; return the exit code."""
    from ringformer.inference.rows import check_room
    from ringformer.inference.text.chat import Chat
    from ringformer.inference.text.saved_text import SavedText, save_text
    from ringformer.inference.text.terminal import converse, print_answer
    from ringformer.inference.text.text_generator import TextGenerator

    encode = partial(_encode, args, text)
    saved = None
    begin = ""
    if args.session:
        saved = SavedText.read(Path(args.session), encode)
        begin = saved.text
        _take_settings(args, saved)
    limit = _limit(args, text.context)
    tokens = 1
    if prompt is not None:
        tokens = len(encode(begin + prompt))
    goes_on = prompt is None or saved is not None or args.save_session is not None
    if goes_on and limit is None:
        raise ValueError("the model does not name its context: set --max_length")
    needed = tokens + args.max_new_tokens
    if limit is None:
        limit = needed
    check_room(tokens, args.max_new_tokens, limit)
    if member is not None:
        _join(member, args, begin + (prompt or ""))
    speaks = member is None or member.index == 0
    if speaks:
        text.beginning.say_earlier(chat=args.chat)
    model = TextGenerator(load_generator(args.run_dir, args, limit if goes_on else needed, text.rope), text)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models generate text that is not UTF-8
    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "stop": args.stop}
    session = saved.session(model) if saved else model.session()
    chat = Chat(model, args.system, session, begin) if args.chat else None

    def ask(prompt: str) -> "Answer":
        return chat.ask(prompt, **options) if chat else model.stream(begin + prompt, session=session, **options)

    if prompt is None:
        return converse(ask)
    answer = ask(prompt)
    if args.save_session:
        save_text(Path(args.save_session), begin + prompt, answer)
        if speaks:
            print(f"saved a session of {tokens:,} tokens in {args.save_session}", file=sys.stderr)
    if speaks:
        return print_answer(answer)
    for _ in answer:  # process 0 prints it
        pass
    return 0


def _answer_rows(args: argparse.Namespace, text: "RunText", sampling: Sampling) -> int:
    """Answer the rows of a file; return the exit code, 1 if some could not be answered."""
    from ringformer.checkpoints.saved_model import weights_hash
    from ringformer.files.resumed_lines import resumed_lines
    from ringformer.inference.generator import LONGEST
    from ringformer.inference.text.prompt_rows import PromptRows, read_prompts
    from ringformer.inference.text.text_generator import TextGenerator

    limit = _limit(args, text.context)
    prompts = read_prompts(Path(args.prompts))
    settings = answer_settings(args, text, sampling, limit)
    with resumed_lines(Path(args.out), "ringformer generate", settings) as out:
        rows = PromptRows(
            Path(args.prompts),
            prompts,
            out,
            text,
            chat=args.chat,
            max_new_tokens=args.max_new_tokens,
            limit=LONGEST if limit is None else limit,
        )
        needed = max(rows.longest, 1) + args.max_new_tokens
        text.beginning.say_earlier(chat=args.chat)
        model = TextGenerator(load_generator(args.run_dir, args, needed, text.rope), text)
        if weights_hash(args.run_dir) != settings["checkpoint"]:
            raise ValueError(f"{args.run_dir} wrote a checkpoint while it was being read: start again")
        rows.answer(model, args.batch_size or 1, args.max_new_tokens, sampling, args.stop)
    return 1 if rows.failed else 0


SAME_ANSWERS = frozenset(
    ("prompts", "out", "batch_size", "mesh_dim", "cpu_devices", "prefill_chunk", "kernel", "kernel_check")
    + ("q_chunk", "k_chunk", "config", "run_dir", "tokenizer", "allow", "allow_longer", "template", "template_option")
)
"""Options of `generate --prompts` that a resumed command may change: they decide how an answer is computed, or what
they decide is among the settings (the run's weights, the tokenizer's name, the template's hash)."""


def answer_settings(args: argparse.Namespace, text: "RunText", sampling: Sampling, limit: int | None) -> dict[str, Any]:
    """Return what decides the answer to a prompt, for the record of a file of answers."""
    from ringformer.checkpoints.saved_model import weights_hash

    settings = {
        "checkpoint": weights_hash(args.run_dir),
        "compute_dtype": asked_dtype(args, args.run_dir),
        "cache_dtype": args.cache_dtype,
        "tokenizer": text.tokenizer.name,
        "max_new_tokens": args.max_new_tokens,
        "max_length": limit,
        "stop": args.stop,
    }
    settings |= asdict(sampling) | text.settings(chat=args.chat)
    if text.rope is not None:
        settings |= text.rope.settings
    return settings


def _encode(args: argparse.Namespace, text: "RunText", prompt: str) -> list[int]:
    """Return the tokens of a prompt that the model reads."""
    from ringformer.data.chats.conversations import Message

    if not args.chat:
        return text.encode(prompt)
    messages = [Message("user", prompt)]
    if args.system is not None:
        messages.insert(0, Message("system", args.system))
    return text.encode_chat(messages).ids


def _take_settings(args: argparse.Namespace, saved: "SavedText") -> None:
    """Take the settings that the command leaves open from a saved session. Raises ValueError, before weights are read,
    if others differ from it."""
    from ringformer.checkpoints.saved_model import weights_hash
    from ringformer.inference.session_files import check_settings

    names = "max_length", "prefill_chunk", "compute_dtype"
    for name in names:
        if getattr(args, name) is None:
            setattr(args, name, saved.settings[name])
    here = {name: getattr(args, name) for name in (*names, "cache_dtype")}
    if "-1" not in args.mesh_dim:
        here["mesh_dim"] = args.mesh_dim.replace(" ", "")
    check_settings(saved.folder, saved.settings, here | {"checkpoint": weights_hash(args.run_dir)})


def _join(member: "Membership", args: argparse.Namespace, prompt: str | None) -> None:
    """Connect the processes, which must have the same arguments and prompt, before JAX has a device.

    From then on, what C++ code writes to stdout is dropped, such as Gloo's line for each connection: stdout is reserved
    for the answer. Errors of C++ go to stderr.
    """
    from ringformer.files.hashes import hash_object
    from ringformer.processes.rendezvous import ProcessesMissing, known_places, meet, start_jax
    from ringformer.processes.software import software
    from ringformer.processes.stderr import divert_native_stdout

    own = {"process_id", "coordinator_address", "num_processes", "prompt", "prompt_file"}
    asked = {f"--{key}": value for key, value in vars(args).items() if key not in own and not callable(value)}
    asked["the prompt's hash"] = hash_object({"prompt": prompt})
    asked |= software()
    try:
        meet(replace(member, asked=asked), MEET_SECONDS, known_places)
    except ProcessesMissing as error:
        raise TimeoutError(error) from None
    divert_native_stdout(os.devnull)
    start_jax(member, MEET_SECONDS)


def _prompt(args: argparse.Namespace) -> str | None:
    """Read the prompt; None if the user will type prompts."""
    if args.prompt is not None:
        return args.prompt
    if args.distributed and args.prompt_file is None:
        raise ValueError(
            "several processes need the same prompt, and stdin belongs to one of them: give --prompt or --prompt_file"
        )
    if args.prompt_file is None and sys.stdin.isatty():
        return None
    name = args.prompt_file or "stdin"
    try:
        if args.prompt_file:
            return Path(name).read_bytes().decode()
        return sys.stdin.buffer.read().decode()
    except OSError as error:
        raise ValueError(f"--prompt_file={name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start:,} of {len(error.object):,}"
        ) from None


def _limit(args: argparse.Namespace, context: int | None) -> int | None:
    """Return the maximum length of a text in tokens, None if there is no limit. Raises ValueError if it exceeds the
    context of training."""
    longest = None if args.allow_longer else context
    if longest is not None and (args.max_length or 0) > longest:
        raise ValueError(
            f"--max_length={args.max_length} exceeds the context of {longest:,} tokens that {args.run_dir} was "
            "trained at; --allow_longer permits it"
        )
    if args.max_length is None:
        return longest
    return args.max_length
