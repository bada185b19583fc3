"""`ringformer generate`."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from ringformer.cli.visible_text import visible
from ringformer.inference.options import add_model_options, add_template_option, load_generator
from ringformer.processes.flags import add_distributed_flags, member_of

if TYPE_CHECKING:
    from ringformer.processes.rendezvous import Membership

MEET_SECONDS = 60.0
"""Seconds that processes wait for each other."""


def add_generate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer generate`."""
    parser.description = (
        "Continue a prompt with the model of a run, or answer it with --chat. Text goes to stdout as it is generated, "
        "tokens per second to stderr. Without --prompt and --prompt_file, the prompt is read from stdin; on a "
        "terminal, prompts are read in a loop and a chat keeps its history. Ctrl-C ends an answer, Ctrl-D a "
        "conversation. With --distributed, several processes work on the same prompt, which each must be given; "
        "process 0 prints the answer."
    )
    add_model_options(parser, "the folder of a run, of a stage of one, or of a converted model", "run_dir")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; with --chat, a question")
    parser.add_argument("--prompt_file", metavar="FILE", help="a UTF-8 file with the prompt, including its newlines")
    parser.add_argument("--chat", action="store_true", help="answer using the run's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a chat; default: the template's own")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="the longest continuation")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end the text before this string; may be repeated",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (default: 0)")
    parser.add_argument("--top_k", type=int, help="sample from this many of the likeliest tokens")
    parser.add_argument("--top_p", type=float, help="sample from the likeliest tokens that reach this probability")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
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
    from ringformer.parallel.mesh import simulate_cpu_devices

    if args.prompt is not None and args.prompt_file is not None:
        raise ValueError("--prompt and --prompt_file: give one of them")
    if args.system is not None and not args.chat:
        raise ValueError("--system is the system message of a --chat")
    if (dp := args.mesh_dim.split(",")[0].strip()) != "1" and dp.lstrip("-").isdigit():
        raise ValueError(
            f"--mesh_dim={args.mesh_dim}: dp={dp} distributes rows, but a prompt is a single row: set dp=1 and give "
            "the devices to fsdp, tp or sp"
        )
    simulate_cpu_devices(args.cpu_devices)
    member = member_of(args, MEET_SECONDS)
    prompt = _prompt(args)
    from ringformer.inference.run_text import RunText
    from ringformer.inference.sampling import Sampling
    from ringformer.inference.session import check_decoding, check_room
    from ringformer.inference.text_generator import TextGenerator
    from ringformer.inference.text_stream import check_stops
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    check_decoding(args.max_new_tokens, sampling)
    text = RunText(args.run_dir, tokenizer=args.tokenizer, template=args.template)
    check_stops(args.stop, text.tokenizer)
    limit = _limit(args, text.context)
    if prompt is not None:
        tokens = len(text.encode_chat(_messages(args, prompt)).ids if args.chat else text.encode(prompt))
        needed = tokens + args.max_new_tokens
        check_room(tokens, args.max_new_tokens, needed if limit is None else limit)
        limit = needed
    elif limit is None:
        raise ValueError("the model does not name its context: set --max_length")
    if member is not None:
        _join(member, args, prompt)
    model = TextGenerator(load_generator(args.run_dir, args, limit), text)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models generate text that is not UTF-8
    ask = _asker(model, args, sampling)
    if member is not None and member.index > 0:
        for _ in ask(prompt):
            pass
        return 0
    return _interactive(ask) if prompt is None else _print_answer(ask(prompt))


def _join(member: "Membership", args: argparse.Namespace, prompt: str | None) -> None:
    """Meet the processes that were given the same arguments, before JAX has a device.

    From now on, output of C++ code (Gloo, which connects CPUs) goes to stderr: stdout is reserved for the answer.
    """
    from ringformer.files.hashes import hash_object
    from ringformer.processes.rendezvous import ProcessesMissing, known_places, meet, start_jax

    own = {"process_id", "coordinator_address", "num_processes", "prompt", "prompt_file"}
    asked = {f"--{key}": value for key, value in vars(args).items() if key not in own and not callable(value)}
    asked["the prompt's hash"] = hash_object({"prompt": prompt})
    try:
        meet(replace(member, asked=asked), MEET_SECONDS, known_places)
    except ProcessesMissing as error:
        raise TimeoutError(error) from None
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    start_jax(member, MEET_SECONDS)


def _prompt(args: argparse.Namespace) -> str | None:
    """Read the prompt; None if prompts will be typed."""
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
        content = Path(name).read_bytes() if args.prompt_file else sys.stdin.buffer.read()
    except OSError as error:
        raise ValueError(f"--prompt_file={name} cannot be read: {error.strerror}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start:,} of {len(content):,}"
        ) from None


def _messages(args: argparse.Namespace, question: str):
    from ringformer.data.chats.conversations import Message

    system = [] if args.system is None else [Message("system", args.system)]
    return [*system, Message("user", question)]


def _limit(args: argparse.Namespace, context: int | None) -> int | None:
    """Longest text in tokens; None: no limit. Raises ValueError if it is longer than the context of training."""
    longest = None if args.allow_longer else context
    if args.max_length is None:
        return longest
    if args.max_length < 2:
        raise ValueError(f"--max_length={args.max_length} leaves no room for a prompt and a token")
    if longest is not None and args.max_length > longest:
        raise ValueError(
            f"--max_length={args.max_length} exceeds the context of {longest:,} tokens that {args.run_dir} was "
            "trained at; --allow_longer permits it"
        )
    return args.max_length


def _asker(model, args: argparse.Namespace, sampling):
    """Return a function from a prompt to its Answer."""
    from ringformer.inference.chat import Chat

    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "stop": args.stop}
    if args.chat:
        conversation = Chat(model, args.system)
        return lambda question: conversation.ask(question, **options)
    return lambda prompt: model.stream(prompt, **options)


def _interactive(ask) -> int:
    """Answer typed prompts until Ctrl-D, or Ctrl-C at the prompt."""
    import readline  # noqa: F401  (gives input() line editing)

    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt) as end:
            print()
            return 130 if isinstance(end, KeyboardInterrupt) else 0
        if prompt:
            try:
                _print_answer(ask(prompt))
            except ValueError as error:
                print(f"ringformer generate: {visible(str(error))}", file=sys.stderr)
            except KeyboardInterrupt:  # during the prefill
                print()


def _print_answer(answer) -> int:
    """Print an answer as it is generated, and its speed; return the exit code."""
    if answer.began_anew:
        print("(reread the conversation: the cache held other tokens, or had no room left)", file=sys.stderr)
    code = 0
    try:
        _print(answer)
    except KeyboardInterrupt:
        code = 130
    print(flush=True)
    times = answer.session.timings
    print(
        f"prompt of {answer.prompt_tokens:,} tokens; prefill {times.prefill_tokens_per_second:,.1f} tokens/s, "
        f"decode {times.decode_tokens_per_second:,.1f} tokens/s",
        file=sys.stderr,
    )
    return code


def _print(pieces: Iterable[str]) -> None:
    """Print text as it arrives; on a terminal, make control characters visible."""
    shown = visible if sys.stdout.isatty() else str
    for piece in pieces:
        print(shown(piece), end="", flush=True)
