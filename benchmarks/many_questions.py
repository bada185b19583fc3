"""Seconds of many questions to one document, with one prefill of the document and with one for each question.

    python benchmarks/many_questions.py [--out=results/many_questions.json]

Measured on the CPU, on one device: 50 questions of 24 tokens to a document of 4,000 tokens, ten at a time, eight new
tokens each, by a model of random weights with the quickstart's sizes. Both ways take turns in one process, and must
write the same tokens; the first turn compiles and does not count.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from benchmarks.decode_speed import checkpoint
from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.inference.generator import Generator
from ringformer.inference.shared_text import SharedText

DOCUMENT, QUESTIONS, QUESTION, ROWS, NEW = 4000, 50, 24, 10, 8
"""Tokens of the document; questions, tokens of each, and questions at a time; new tokens of each answer."""
ROUNDS = 5
"""Turns that count."""


def answers(model: Generator, document: list[int], questions: list[list[int]], one_prefill: bool) -> list[list[int]]:
    """Return the tokens that follow each question, for batches of `ROWS` questions."""
    shared = SharedText(model, document, ROWS) if one_prefill else None
    texts = []
    for first in range(0, len(questions), ROWS):
        batch = questions[first : first + ROWS]
        session = shared.session(QUESTION + NEW) if shared else model.session(ROWS)
        session.append(batch if shared else [document + question for question in batch])
        texts += list(map(list, zip(*session.decode(max_new_tokens=NEW), strict=True)))
        del session  # the next one may only then begin with the document
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/many_questions.json")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as name:
        model = Generator.load(checkpoint(Path(name)) / "ringformer", max_length=4096, compute_dtype="float32")
    rng = np.random.default_rng(0)
    document, *questions = (
        rng.integers(0, model.config.vocab_size, n).tolist() for n in [DOCUMENT, *[QUESTION] * QUESTIONS]
    )
    ways = {"one prefill": True, "a prefill for each question": False}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):
        written = []
        for way, one_prefill in ways.items():
            start = time.perf_counter()
            written.append(answers(model, document, questions, one_prefill))
            if turn:
                seconds[way].append(time.perf_counter() - start)
        if written[0] != written[1]:
            raise SystemExit("the two ways write different tokens")
        print({way: round(s[-1], 2) for way, s in seconds.items() if s}, flush=True)
    result = {
        "what": f"measured on one machine with {len(os.sched_getaffinity(0))} cores: medians of {ROUNDS} rounds",
        "command": "python benchmarks/many_questions.py",
        **made(),
        "document_tokens": DOCUMENT,
        "questions": QUESTIONS,
        "jax": version("jax"),
        "seconds": {way: round(statistics.median(s), 3) for way, s in seconds.items()},
    }
    write_results(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
