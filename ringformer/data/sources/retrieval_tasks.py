"""Questions about a document at its end, which only the document answers: words counted, and sentences continued.

Two kinds alternate. Their evidence is anywhere in the document, so that a long one trains retrieval over its whole
length. OLMo 3 mixes such tasks into real documents (arXiv:2512.13961, CWE and REX); it has a model write the questions,
which need no model here.
"""

import re
from collections import Counter
from itertools import pairwise

import numpy as np

WORDS = 3
"""Words to count in a question."""
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


def add_tasks(text: str, tasks: int, digest: bytes) -> tuple[str, Counter[str]]:
    """Append questions with answers to a text; return it, and how many questions of each kind there are.

    Args:
      digest: decides the questions.
    """
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    counts: Counter[str] = Counter()
    occurrences = Counter(word.lower() for word in _WORD.findall(text))
    words = sorted(word for word, count in occurrences.items() if count > 1 and len(word) > 3)
    sentences = _SENTENCE_END.split(text)
    unique = Counter(sentences)
    usable = {sentence for sentence, count in unique.items() if count == 1 and len(sentence) in range(20, 400)}
    begins = []
    for i, neighbours in enumerate(pairwise(sentences)):
        if usable.issuperset(neighbours):
            begins.append(i)
    questions = []
    for task in range(tasks):
        if task % 2 == 0 and len(words) >= WORDS:
            chosen = []
            counted = []
            for i in rng.choice(len(words), WORDS, replace=False):
                chosen.append(words[i])
                counted.append(f"{words[i]} {occurrences[words[i]]}")
            question = f"How often does each of these words occur in the text above: {', '.join(chosen)}?"
            answer = ", ".join(counted)
            counts["retrieval tasks added: words counted"] += 1
        elif task % 2 and begins:
            i = begins[rng.integers(len(begins))]
            question = f"Which sentence of the text above follows this one: {sentences[i]}"
            answer = sentences[i + 1]
            counts["retrieval tasks added: sentences continued"] += 1
        else:
            counts["retrieval tasks left out: the document has too few words or sentences for them"] += 1
            continue
        questions.append(f"\n\nQuestion: {question}\nAnswer: {answer}")
    return text + "".join(questions), counts
