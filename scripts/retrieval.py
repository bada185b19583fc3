"""What scripts/retrieval.sh needs beside `ringformer`: a tokenizer and records to train on.

python scripts/retrieval.py make FOLDER [--share=1.0] [--largest=99]
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals.cases import seeded
from ringformer.evals.lines import FOOTER, HEADER, LINE, record_text
from ringformer.evals.words import ADJECTIVES, NOUNS, distinct_pairs

END = "</s>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Messages end to end, and the end token behind an answer: a prompt is the same text with the template and without."""


class Records(NamedTuple):
    """What a stage of configs/retrieval.py trains on."""

    count: int
    lines: tuple[int, int]
    """The fewest and the most lines of a record."""
    questions: int
    """Of a record, each for any of its lines: they repeat, or the last ones could be answered by elimination."""
    words: int | None = None
    """Adjectives, and nouns, that a record has; None: any. With few of them a noun alone tells no line."""


STAGES = (
    Records(30_000, (2, 4), 16),
    Records(30_000, (4, 16), 16),
    Records(30_000, (64, 111), 16),
    Records(3_000, (447, 447), 64),
    Records(1_000, (958, 958), 64),
)


def record(stage: int, records: Records, number: int, largest: int) -> dict[str, Any]:
    """A conversation: the record with its first question, the answer, and more questions with their answers.

    Its random numbers are those of no evaluation, whose seeds are whole numbers.
    """
    rng = seeded("records to train on", stage, number)
    count = rng.randint(*records.lines)
    words = [rng.sample(known, records.words or len(known)) for known in (ADJECTIVES, NOUNS)]
    lines = [(index, rng.randint(1, largest)) for index in islice(distinct_pairs(rng, *words), count)]
    messages = []
    for i, (index, number) in enumerate(rng.choices(lines, k=records.questions)):
        question = ("" if i else record_text(lines)) + FOOTER.format(index=index)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": str(number)}]
    return {"messages": messages}


def pieces() -> list[str]:
    """The tokens of the task: each fixed phrase, each word, and each number of one digit or two."""
    before, between, behind = LINE.replace("{number}", "{index}").split("{index}")
    question, rest = FOOTER.split("{index}")
    # The space that ends a prompt is a token of its own: an answer's number then stands as far behind the noun of its
    # question as a line's number behind the noun of its line.
    phrases = [HEADER, before, "-", between, *behind, question, rest.rstrip(" "), " "]
    return [*phrases, *ADJECTIVES, *NOUNS, *map(str, range(100))]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json with `pieces`, and bytes for any other text, and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys(pieces())])
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=1))


def make(folder: Path, share: float, largest: int) -> None:
    """Write the tokenizer, and the records of each stage, stage-N.jsonl."""
    (folder / "tokenizer").mkdir(parents=True)
    write_tokenizer(folder / "tokenizer")
    for stage, records in enumerate(STAGES, 1):
        path = folder / f"stage-{stage}.jsonl"
        with path.open("w") as file:
            for number in range(round(records.count * share)):
                file.write(json.dumps(record(stage, records, number, largest)) + "\n")
        print(f"{path}: {number + 1:,} records of {records.lines[0]} to {records.lines[1]} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--share", type=float, default=1.0, help="of the records")
    verb.add_argument("--largest", type=int, default=99, help="number of a line")
    args = parser.parse_args()
    make(args.folder, args.share, args.largest)


if __name__ == "__main__":
    main()
