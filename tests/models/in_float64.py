"""The package's dense model in float64: an oracle that adds no rounding of its own to a difference.

Where terms nearly cancel, dense attention in float32 is as far off as the ring: 4.5e-6 and 3.0 to 5.2e-6 for the biases
of keys of the tiny Qwen2.
"""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from ringformer.models import decoder_config, layer_scan
from ringformer.models.decoder_config import DecoderConfig
from ringformer.train.state import init_state
from ringformer.train.step import make_train_step
from tests.helpers import unpadded
from tests.train.test_step import SGD_LIKE, setup


def trained_in_float64(config: DecoderConfig, steps: int):
    """The metrics of the steps on one device, the first gradient as AdamW's first moment after one step, and the
    parameters; the first ones are those of a run in float32."""
    dense = replace(config, attention="vanilla", remat="none")
    mesh, optimizer, shardings, _, batch = setup("1,1,1,1", dense, devices=1)
    state = init_state(dense, optimizer, shardings, mesh, seed=0)
    metrics = []
    with float64():
        state = jax.tree.map(lambda x: x.astype(float) if x.dtype == "float32" else x, state)
        config = replace(dense, compute_dtype="float64")
        step = make_train_step(config, optimizer, shardings, mesh, clip_norm=SGD_LIKE.clip_norm)
        for i in range(steps):
            state, m = step(state, batch)
            metrics.append(jax.device_get(m))
            if i == 0:
                gradient = unpadded(state.opt_state[0].mu, shardings.params)
        return metrics, gradient, unpadded(state.params, shardings.params)


@contextmanager
def float64():
    """Let the package compute in float64 what it computes in float32. For one device."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(jnp, "float32", jnp.float64)
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(decoder_config, "check_config", lambda config: None)  # refuses float64
        patch.setattr(layer_scan, "after", lambda tree, done: tree)  # reads 32 bits; one device needs no order
        yield
