"""Answers on a terminal: printed as they are generated, to one prompt or in a conversation."""

import sys
from collections.abc import Callable

from ringformer.cli.visible_text import visible
from ringformer.inference.text.answers import Answer


def converse(ask: Callable[[str], Answer]) -> int:
    """Answer prompts that the user types, until Ctrl-D, or Ctrl-C at the prompt."""
    import readline  # noqa: F401  (gives input() line editing)

    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt) as end:
            print()
            return 130 if isinstance(end, KeyboardInterrupt) else 0
        if prompt:
            try:
                print_answer(ask(prompt))
            except ValueError as error:
                print(f"ringformer generate: {visible(str(error))}", file=sys.stderr)
            except KeyboardInterrupt:  # during the prefill
                print()


def print_answer(answer: Answer) -> int:
    """Print an answer as it is generated, and its speed; return the exit code. On a terminal, control characters are
    made visible."""
    code = 0
    shown = visible if sys.stdout.isatty() else str
    try:
        for piece in answer:
            print(shown(piece), end="", flush=True)
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
