"""Tokens per second of decoding, beside `transformers` with its own cache, for the quickstart's sizes at 4096 tokens.

    python benchmarks/decode_speed.py [--out=results/decode_speed.json]

Measured on CPU devices, the ways in turn, in one process: one device and a ring of eight simulated devices against
`generate` of transformers (torch, with as many threads as cores), all with the same checkpoint. All ways must write the
same tokens. The prompt is read once per way and round and is not counted, nor is compilation. The medians of the rounds
are compared.
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
import torch
import transformers

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.convert import from_hf
from ringformer.inference.generator import Generator
from ringformer.runs.config_file import load_config, parse

CONTEXT = 4096
MESHES = {"one device": "1,1,1,1", "ring of eight": "1,1,1,8"}


def checkpoint(folder: Path) -> Path:
    """Write a Hugging Face checkpoint of random weights of the quickstart's sizes."""
    c = parse(load_config("configs/quickstart.py", [])).model
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hf")
    from_hf(folder / "hf", folder / "ringformer")
    return folder


def ours(folder: Path, mesh_dim: str, prompt: list[int], new: int):
    """Return `run() -> (tokens, seconds)` of so many tokens after a prompt."""
    model = Generator.load(folder / "ringformer", mesh_dim=mesh_dim, max_length=CONTEXT, compute_dtype="float32")

    def run():
        session = model.session(1)
        session.append([prompt])
        tokens = [token for (token,) in session.decode(max_new_tokens=new)]
        return tokens, session.timings.decode_seconds

    return run


def theirs(folder: Path, prompt: list[int], new: int):
    """Return the same of transformers, from the first token, with which the prompt is read, to the last."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    ids = torch.tensor([prompt])

    def run():
        moments = []

        def note_the_time(_, scores):
            moments.append(time.perf_counter())
            return scores

        processors = transformers.LogitsProcessorList([note_the_time])
        options = {"max_new_tokens": new, "do_sample": False, "logits_processor": processors}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist(), (moments[-1] - moments[0]) * new / (new - 1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/decode_speed.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoint(Path(name))
        vocabulary = json.loads((folder / "hf" / "config.json").read_text())["vocab_size"]
        prompt = np.random.default_rng(0).integers(0, vocabulary, CONTEXT - args.new).tolist()
        ways = {way: ours(folder, mesh_dim, prompt, args.new) for way, mesh_dim in MESHES.items()}
        ways["transformers"] = theirs(folder, prompt, args.new)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(args.rounds + 1):  # the first compiles
            written = []
            for way, run in ways.items():
                tokens, seconds = run()
                written.append(tokens)
                if turn:
                    rates[way].append(args.new / seconds)
            if written != [written[0]] * len(written):
                raise SystemExit(f"the ways write different tokens: {written}")
            print({way: round(r[-1], 1) for way, r in rates.items() if r}, flush=True)
    medians = {way: statistics.median(r) for way, r in rates.items()}
    result = {
        "what": f"measured on one machine with {cores} cores: greedy tokens a second behind a prompt, medians",
        "command": "python benchmarks/decode_speed.py",
        **made(),
        "model": "configs/quickstart.py",
        "context": CONTEXT,
        "dtype": "float32",
        "versions": {package: version(package) for package in ("jax", "torch", "transformers")},
        "tokens_per_second": {way: round(x, 1) for way, x in medians.items()},
        "times_transformers": {way: round(medians[way] / medians["transformers"], 2) for way in MESHES},
    }
    write_results(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
