"""Peak host memory of converting a model that is larger than it: random float16 weights, there and back, bit for bit.

    python benchmarks/convert_memory.py --model=llama_7b --folder=/scratch/convert    # 13 GB + 17 GB of disk, deleted

Writes results/convert_memory.json: seconds and the largest resident set of each command, read by wait4.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from benchmarks.result_files import write_results
from ringformer.cli.parser import output_argument
from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import TensorFolder, write_tensors
from ringformer.models.families.llama import LlamaConfig, preset


def rows(name: str, shape: tuple[int, ...]):
    """The tensor `name`, a function of its name, in pieces of 4096 rows."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for start in range(0, shape[0], 4096):
        part = (min(4096, shape[0] - start), *shape[1:])
        yield (0.02 * rng.standard_normal(part, np.float32)).astype(np.float16)


def measured(*command: str) -> dict[str, float]:
    """Run `ringformer convert ...`."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ringformer.cli", "convert", *command])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return {"seconds": round(time.perf_counter() - start), "peak_rss_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama_7b")
    parser.add_argument("--folder", required=True, type=Path, help="a new folder with room for the model")
    parser.add_argument("--out", type=output_argument, default="results/convert_memory.json")
    args = parser.parse_args()
    config = LlamaConfig(**preset(args.model))
    plan = {name: w.tensor_shape for w in weights(config) for name in w.names}
    theirs, ours, back = (args.folder / name for name in ("theirs", "ours", "back"))
    args.folder.mkdir(parents=True)
    try:
        theirs.mkdir()
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        hf_config = to_hf_config(config, max_position=2048, dtype="float16", token_ids=ids)
        (theirs / "config.json").write_text(json.dumps(hf_config))
        write_tensors(theirs, plan, np.dtype(np.float16), 5 * 10**9, lambda name: rows(name, plan[name]))
        result = {
            "model": args.model,
            "parameters": config.num_params,
            "from_hf": measured("from-hf", str(theirs), str(ours)),
        }
        shutil.rmtree(theirs)
        result["stored_bytes"] = sum(f.stat().st_size for f in ours.rglob("*") if f.is_file())
        result["to_hf"] = measured("to-hf", str(ours), str(back), "--dtype=float16")
        shutil.rmtree(ours)
        tensors = TensorFolder(back)
        assert tensors.shapes == plan
        for name, shape in plan.items():
            parts = [slice(i, min(i + 4096, shape[0])) for i in range(0, shape[0], 4096)]
            pairs = zip(tensors.blocks(name, parts), rows(name, shape), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs), name
        result["bit_exact"] = True
    finally:
        shutil.rmtree(args.folder)
    write_results(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
