"""Sessions in a process of its own, for `test_x64.py`: `python -m tests.inference.x64_sessions CASE` prints the largest
error of a log-probability and the dtypes of all arrays, as JSON.

Errors are differences from whole forward passes in float64.
"""

import json
import sys
from dataclasses import replace

import jax
import numpy as np

from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from tests.inference.models import CONFIG, Transcript, generator, losses

SMALL = replace(CONFIG, num_layers=1)
PROMPTS = [[5, 9, 20, 3, 1, 2, 60, 33, 12], [1]]
TURN = [[4], [5, 6, 7]]
SAMPLING = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def dtypes(session: Session) -> list[str]:
    """Dtypes of the session's arrays."""
    return sorted({str(x.dtype) for x in jax.tree.leaves(session._state)})


def two_turns(session: Session) -> Transcript:
    """Append and decode twice. The second turn attends to whole and to mixed pieces of the cache."""
    transcript = Transcript(session)
    for turn in (PROMPTS, TURN):
        transcript.turn(turn, new=2)
    return transcript


def ring() -> tuple[float, list[str]]:
    """Two turns on a ring of two. Between them, tokens are sampled and forgotten again."""
    session = generator(SMALL, "1,1,1,2", prefill_chunk=8).session(2)
    transcript = Transcript(session)
    transcript.turn(PROMPTS, new=2)
    mark = session.mark()
    sampled = list(session.decode(max_new_tokens=2, sampling=SAMPLING))
    assert len(sampled) == 2
    session.rewind(mark)
    transcript.turn(TURN, new=2)
    return transcript.error(SMALL), dtypes(session)


def windows() -> tuple[float, list[str]]:
    """Two turns of a model with a window; devices exchange heads in pairs."""
    config = replace(SMALL, window=5, ulysses=2)
    transcript = two_turns(generator(config, "1,1,1,4", prefill_chunk=8).session(2))
    return transcript.error(config), dtypes(transcript.session)


def fork() -> tuple[float, list[str]]:
    """Scores of tokens after a text that two rows share, in a quantised cache."""
    session = generator(SMALL, "1,1,1,1", cache_dtype="int8").session(1)
    session.append(PROMPTS[:1])
    rows = session.fork(2, max_new=8)
    error = 0.0
    scores = rows.score(TURN)
    for row, tokens in zip(scores, TURN, strict=True):
        expected = losses(SMALL, PROMPTS[0] + tokens)[-len(tokens) :]
        error = max(error, float(np.abs(row.losses - expected).max()))
    (step,) = rows.decode(max_new_tokens=1)
    assert len(step) == 2
    return error, sorted({*dtypes(rows), *(str(x.dtype) for x in scores[0])})


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    error, found = {"ring": ring, "windows": windows, "fork": fork}[sys.argv[1]]()
    print(json.dumps({"error": error, "dtypes": found}))
