"""`ringformer generate`."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ringformer.cli.visible_text import visible
from ringformer.processes.flags import add_distributed_flags, member_of

if TYPE_CHECKING:
    from ringformer.processes.rendezvous import Membership

MEET_SECONDS = 60.0
"""Several processes wait so long for each other."""


def add_generate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Arguments of `ringformer generate`."""
    from ringformer.data.chats.templates import TemplateName

    parser.description = (
        "Continue a prompt with the model of a run, or answer it with --chat: text to stdout as it comes, tokens a "
        "second to stderr. Without --prompt and --prompt_file the prompt is read from stdin, on a terminal one after "
        "the other; a chat keeps what it has read and said. Ctrl-C ends an answer, Ctrl-D a conversation. Several "
        "processes, --distributed, share a prompt that all are given; process 0 says the answer."
    )
    parser.add_argument(
        "--run",
        dest="run_dir",
        metavar="DIR",
        required=True,
        help="the folder of a run, of a stage of one, or of a converted model",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the config file of the run, executed, if it registers the model"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; with --chat a question")
    parser.add_argument("--prompt_file", metavar="FILE", help="the same from a file in UTF-8, to its last newline")
    parser.add_argument("--chat", action="store_true", help="answer, by the run's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a chat; without: the template's own")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="the longest continuation")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end the text before this one; may be given several times",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (default: 0)")
    parser.add_argument("--top_k", type=int, help="sample among so many likeliest tokens")
    parser.add_argument("--top_p", type=float, help="sample among the likeliest tokens that have this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help="of prompt and continuation, or a chat; default: the context of the run",
    )
    parser.add_argument(
        "--allow_longer", action="store_true", help="go beyond the context that the model was trained at"
    )
    parser.add_argument("--mesh_dim", default="1,1,1,1", help="sizes of dp,fsdp,tp,sp; -1 is the rest")
    parser.add_argument(
        "--cpu_devices", type=int, default=0, help="simulate so many devices on the CPU; default: the machine's own"
    )
    parser.add_argument(
        "--prefill_chunk",
        type=int,
        metavar="TOKENS",
        help="read the prompt in chunks of so many tokens; default: at once",
    )
    parser.add_argument("--compute_dtype", help="float32 or bfloat16; default: that of the run")
    parser.add_argument(
        "--tokenizer",
        help="bytes, a SentencePiece .model file, a tokenizer.json, or a folder with one of them; default: the run's",
    )
    parser.add_argument(
        "--template",
        choices=get_args(TemplateName),
        help="the chat template; default: that of the run's conversations, else the tokenizer's own",
    )
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
            f"--mesh_dim={args.mesh_dim}: dp={dp} shares rows out, and a prompt is one: dp=1, and the "
            "devices to fsdp, tp or sp"
        )
    simulate_cpu_devices(args.cpu_devices)
    member = member_of(args, MEET_SECONDS)
    prompt = _prompt(args)
    from ringformer.inference.generator import Generator
    from ringformer.inference.run_text import RunText
    from ringformer.inference.sampling import Sampling
    from ringformer.inference.text_generator import TextGenerator, check_room
    from ringformer.inference.text_stream import check_stops
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    text = RunText(args.run_dir, tokenizer=args.tokenizer, template=args.template)
    check_stops(args.stop, text.tokenizer)
    limit = _limit(args, text.context)
    if prompt is not None:
        tokens = len(text.encode_chat(_messages(args, prompt)).ids if args.chat else text.encode(prompt))
        needed = tokens + args.max_new_tokens
        check_room(tokens, args.max_new_tokens, needed if limit is None else limit)
        limit = needed
    elif limit is None:
        raise ValueError("how long may it become? give --max_length")
    if member is not None:
        _join(member, args, prompt)
    generator = Generator.load(
        args.run_dir,
        mesh_dim=args.mesh_dim,
        max_length=limit,
        prefill_chunk=args.prefill_chunk,
        compute_dtype=args.compute_dtype,
    )
    model = TextGenerator(generator, text)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models say what is not UTF-8
    ask = _asking(model, args, sampling)
    if member is not None and member.index > 0:
        for _ in ask(prompt):
            pass
        return 0
    return _interactive(ask) if prompt is None else _say(ask(prompt))


def _join(member: "Membership", args: argparse.Namespace, prompt: str | None) -> None:
    """Meet the processes that were asked for the same, before JAX has a device.

    What C++ prints from now on (Gloo, which connects CPUs) goes to stderr: stdout is the answer's.
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
    """The prompt; None for those that somebody will type."""
    if args.prompt is not None:
        return args.prompt
    if args.distributed and args.prompt_file is None:
        raise ValueError(
            "several processes need the same prompt, and stdin is one's alone: give --prompt or --prompt_file"
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
            f"{name} is not text in UTF-8: byte {error.object[error.start]:#04x} at {error.start:,} of {len(content):,}"
        ) from None


def _messages(args: argparse.Namespace, question: str):
    from ringformer.data.chats.conversations import Message

    system = [] if args.system is None else [Message("system", args.system)]
    return [*system, Message("user", question)]


def _limit(args: argparse.Namespace, context: int | None) -> int | None:
    """The longest text in tokens; None: nothing limits it. Raises ValueError if the model was not trained at it."""
    longest = None if args.allow_longer else context
    if args.max_length is None:
        return longest
    if args.max_length < 2:
        raise ValueError(f"--max_length={args.max_length} leaves no room for a prompt and a token")
    if longest is not None and args.max_length > longest:
        raise ValueError(
            f"--max_length={args.max_length} is beyond the context of {longest:,} tokens that "
            f"{args.run_dir} was trained at; --allow_longer goes there nevertheless"
        )
    return args.max_length


def _asking(model, args: argparse.Namespace, sampling):
    """A function from a prompt to its Answer."""
    from ringformer.inference.chat import Chat

    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "stop": args.stop}
    if args.chat:
        conversation = Chat(model, args.system)
        return lambda question: conversation.ask(question, **options)
    return lambda prompt: model.stream(prompt, **options)


def _interactive(ask) -> int:
    """Prompts that somebody types, until Ctrl-D, or Ctrl-C where nothing is being said."""
    import readline  # noqa: F401  (input() then edits lines)

    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt) as end:
            print()
            return 130 if isinstance(end, KeyboardInterrupt) else 0
        if prompt:
            try:
                _say(ask(prompt))
            except ValueError as error:
                print(f"ringformer generate: {visible(str(error))}", file=sys.stderr)
            except KeyboardInterrupt:  # while the prompt was being read
                print()


def _say(answer) -> int:
    """Print an answer as it comes, and its speed; the exit code."""
    if answer.began_anew:
        print(
            "(the conversation so far was read again: the cache had other tokens, or no room behind them)",
            file=sys.stderr,
        )
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
    """Print text as it comes: on a terminal made visible, elsewhere as it is."""
    shown = visible if sys.stdout.isatty() else str
    for piece in pieces:
        print(shown(piece), end="", flush=True)
