"""A task at short contexts: which of four pieces goes on with a passage of Moby Dick. It shows what an extension costs
where the released model was good. lm-evaluation-harness asks and scores it, as a task of multiple choices."""

import json
import random
from pathlib import Path
from typing import Any

from ringformer.evals.texts.shipped import read_text

NAME = "continuation"
PASSAGE_WORDS = 80
"""Words of a passage, about 110 tokens."""
CHOICE_WORDS = 12
CHOICES = 4
LENGTH = 512
"""Context of the task in tokens; its longest question takes half of it."""
SEED = 0

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{passage}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def questions(count: int) -> list[dict[str, Any]]:
    """Return questions: a passage, four choices of 12 words, and the number of the right one. The wrong ones are
    pieces of the same text that stand elsewhere."""
    words = read_text().split()
    rng = random.Random(SEED)
    last = len(words) - PASSAGE_WORDS - CHOICE_WORDS
    rows = []
    for _ in range(count):
        start = rng.randrange(last)
        end = start + PASSAGE_WORDS
        choices = [words[end : end + CHOICE_WORDS]]
        for _ in range(CHOICES - 1):
            elsewhere = rng.randrange(last)
            choices.append(words[elsewhere : elsewhere + CHOICE_WORDS])
        order = rng.sample(range(CHOICES), CHOICES)
        rows.append(
            {
                "passage": " ".join(words[start:end]),
                "choices": [" ".join(choices[number]) for number in order],
                "answer": order.index(0),
            }
        )
    return rows


def write_task(folder: Path, count: int) -> None:
    """Write the folder of so many questions that `ringformer eval harness --include_path` reads."""
    folder.mkdir(exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions(count)))
    (folder / f"{NAME}.yaml").write_text(TASK.format(name=NAME, data=json.dumps(str(data))))
