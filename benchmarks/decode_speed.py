"""How fast is decoding with a cache, beside a whole forward pass for each token? The quickstart's model at 4096 tokens.

    python benchmarks/decode_speed.py [--out=results/decode_speed.json]

Measured on simulated CPU devices, the ways in turn, in one process: one device and a ring of eight against the function
that ringformer had before the cache, on one device. Random weights: speed does not depend on them. Compilation is not
counted. The medians of the rounds are compared.
"""

import argparse
import datetime
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringformer.cli.parser import output_argument
from ringformer.inference.generator import Generator
from ringformer.models.decoder import Decoder
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config_file import load_config, parse
from ringformer.train.state import make_init

CONTEXT = 4096
MESHES = {"one device": "1,1,1,1", "ring of eight": "1,1,1,8"}


@partial(jax.jit, static_argnums=0)
def forward_for_each_token(definition, params, tokens, start, end):
    """Greedy tokens in the places from start to end of `tokens` [1, T]: the whole text is computed again for each."""
    model: Decoder = nnx.merge(definition, params)
    return jax.lax.fori_loop(start, end, lambda i, x: x.at[0, i].set(model(x)[0, i - 1].argmax()), tokens)


def cached(config, mesh_dim: str, prompt: list[int], new: int):
    """`run() -> (tokens, seconds)` of so many tokens after a prompt."""
    size = int(np.prod([int(x) for x in mesh_dim.split(",")]))
    mesh = make_mesh(mesh_dim, jax.devices()[:size])
    params = make_init(config, weight_shardings(config, mesh), mesh, seed=0)()
    model = Generator(config, params, mesh, max_length=CONTEXT)

    def run():
        session = model.session(1)
        session.append([prompt])
        tokens = [token for (token,) in session.decode(max_new_tokens=new)]
        return tokens, session.timings.decode_seconds

    return run


def plain(config, prompt: list[int], new: int):
    """The same, without a cache."""
    params = make_init(config, weight_shardings(config, one := make_mesh("1,1,1,1", jax.devices()[:1])), one, seed=0)()
    definition, text = abstract_model(config)[0], np.zeros((1, CONTEXT), np.int32)
    text[0, : len(prompt)] = prompt

    def run():
        start, end = time.perf_counter(), len(prompt) + new
        out = np.asarray(forward_for_each_token(definition, params, jnp.asarray(text), len(prompt), end))
        return out[0, len(prompt) : end].tolist(), time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/decode_speed.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--new_plain", type=int, default=4)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    config = parse(load_config("configs/quickstart.py", [])).model
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT - args.new).tolist()
    ways = {name: (cached(config, mesh_dim, prompt, args.new), args.new) for name, mesh_dim in MESHES.items()}
    ways["no cache"] = plain(config, prompt, args.new_plain), args.new_plain
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):  # the first compiles
        written = []
        for name, (run, new) in ways.items():
            tokens, seconds = run()
            written.append(tokens[: args.new_plain])
            if turn:
                rates[name].append(new / seconds)
        if written != [written[0]] * len(written):
            raise SystemExit(f"the ways write different tokens: {written}")
        print({name: round(r[-1], 1) for name, r in rates.items() if r}, flush=True)
    medians = {name: statistics.median(r) for name, r in rates.items()}
    result = {
        "what": "measured on simulated CPU devices of one machine: greedy tokens a second behind a prompt, medians",
        "command": "python benchmarks/decode_speed.py",
        "date": datetime.date.today().isoformat(),
        "model": "configs/quickstart.py",
        "context": CONTEXT,
        "dtype": config.compute_dtype,
        "jax": jax.__version__,
        "tokens_per_second": {name: round(x, 1) for name, x in medians.items()},
        "times_no_cache": {name: round(medians[name] / medians["no cache"], 1) for name in MESHES},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
