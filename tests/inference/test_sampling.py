"""Draws against the distribution that a plain reading of temperature, top-k and top-p gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.inference.next_token import row_keys, sample
from ringformer.inference.sampling import Sampling
from tests.inference.models import CONFIG, generator

LOGITS = np.array([1.0, -1.0, 0.5, 1.9, -3.0, 2.0])


def draws(sampling: Sampling, count: int) -> np.ndarray:
    keys = row_keys(jnp.int32(sampling.seed), jnp.arange(count), jnp.zeros(count, jnp.int32))
    logits = jnp.tile(jnp.asarray(LOGITS, jnp.float32), (count, 1))
    numbers = np.float32(sampling.temperature), np.int32(sampling.top_k or 1), np.float32(sampling.top_p or 1)
    return np.asarray(jax.jit(sample, static_argnums=5)(logits, keys, *numbers, sampling.kind))


def distribution(sampling: Sampling) -> np.ndarray:
    """Token by token: the likeliest first, until there are k or they have p together."""
    p = np.exp(LOGITS / sampling.temperature)
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    if sampling.top_p:
        together = 0.0
        for token in order:
            if together >= sampling.top_p:
                p[token] = 0
            together += p[token]
    return p / p.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5, seed=3),
        Sampling(2.0, top_k=3),
        Sampling(1.0, top_p=0.7),
        Sampling(1.0, top_p=0.01),
        Sampling(1.5, top_k=4, top_p=0.85),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-46),
        Sampling(3e38),
    ],
    ids=str,
)
def test_frequencies(sampling):
    """Of 20000 draws, within four standard deviations; what is cut off is never drawn."""
    expected, count = distribution(sampling), 20000
    found = np.bincount(draws(sampling, count), minlength=len(LOGITS)) / count
    assert (found[expected == 0] == 0).all()
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / count)).all()


def test_greedy_takes_the_likeliest():
    assert (draws(Sampling(), 3) == LOGITS.argmax()).all()


@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e-6, 2e-38, 1e-40, 1e-300])
def test_next_to_no_temperature_takes_the_likeliest(temperature, more):
    """What float32 makes of the quotients is beyond its range, or the temperature itself is 0 there."""
    assert (draws(Sampling(temperature, **more), 20) == LOGITS.argmax()).all()


def test_a_row_draws_alone():
    """The same tokens whatever stands in the other rows; others with another seed, in another row or on."""
    model = generator(CONFIG, "1,1,1,1")
    sampling = Sampling(temperature=1.0, seed=5)
    row = [3, 1, 4]

    def written(prompts, sampling):
        return model.generate(prompts, max_new_tokens=12, sampling=sampling)

    first = written([row, [2, 7, 1]], sampling)
    assert written([row, [8] * 9], sampling)[0] == first[0] == written([row, row], sampling)[0]
    assert written([row, row], sampling)[1] != first[0]
    assert written([row, row], replace(sampling, seed=6))[0] != first[0]
    session = model.session(2)
    session.append([row, [2, 7, 1]])
    in_parts = [step for n in (5, 7) for step in session.decode(max_new_tokens=n, sampling=sampling)]
    assert [list(column) for column in zip(*in_parts, strict=True)] == first


def test_every_place_has_a_key_of_its_own():
    """Of 8 rows and 8 lengths, with two seeds."""
    rows, lengths = (x.ravel() for x in np.indices((8, 8), np.int32))
    keys = [jax.random.key_data(row_keys(jnp.int32(seed), rows, lengths)) for seed in (0, 1)]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 128


def test_rows_on_two_devices_draw_as_on_one():
    """Rows of the same prompt draw apart; where a row of either device ends, it alone stays as it was."""
    sampling, written = Sampling(temperature=1.0, seed=5), {}
    for mesh_dim in ("1,1,1,1", "2,1,1,1"):
        session = generator(CONFIG, mesh_dim).session(4)
        session.append([[3, 1, 4]] * 4)
        steps = []
        for ending, last in ((0, 2), (3, 3)):
            decoding = session.decode(max_new_tokens=6, sampling=sampling)
            steps += [next(decoding) for _ in range(last)]
            session.end(ending)
            steps += list(decoding)
        written[mesh_dim] = [[token for token in column if token is not None] for column in zip(*steps, strict=True)]
        np.testing.assert_array_equal(np.asarray(session._state.lengths), [11, 15, 15, 12])
    assert written["2,1,1,1"] == written["1,1,1,1"]
    assert [len(row) for row in written["1,1,1,1"]] == [8, 12, 12, 9]
    assert len({tuple(row[:8]) for row in written["1,1,1,1"]}) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0, .* at most 3.4e\+38, the maximum of float32"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed=-1 must lie in"),
        ({"temperature": 0.0, "top_k": 5}, "set a temperature"),
    ],
)
def test_nonsense(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
