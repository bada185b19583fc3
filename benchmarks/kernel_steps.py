"""Whole train steps with and without the kernels, by `ringformer estimate`: seconds, MFU, memory, what stays exposed.

    python benchmarks/kernel_steps.py [--only=7b/pallas] [--out=results/kernel_steps.json]

Compiled, not measured: a minute or two a step, most of it once (machine code is cached). Of GPUs the seconds are HBM
bytes and FLOPs. What a step said replaces what it said before.
"""

import argparse
import json
import subprocess
import sys

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument

_7B = "--model=llama_7b --target=v5e-256 --mesh_dim=1,1,1,256 --seq_len=8388608"
_8B = "--model=llama3_8b --target=v5p-128 --seq_len=4194304 --head_groups=1 --remat_group=1"
KEPT = "--head_groups=1 --remat=attention --offload --no-fetch_ahead --kernel=pallas"
STEPS = {
    "7b/xla": f"{_7B} --head_groups=4 --kernel=xla",
    "7b/pallas": f"{_7B} --head_groups=4 --kernel=pallas",
    "7b/pallas/one head group": f"{_7B} --head_groups=1 --kernel=pallas",
    "7b/pallas/attention kept": f"{_7B} {KEPT}",
    "7b/pallas/attention kept, longest": f"{_7B.replace('8388608', '16777216')} {KEPT}",
    "8b/xla": f"{_8B} --kernel=xla",
    "8b/pallas": f"{_8B} --kernel=pallas --q_chunk=1024 --k_chunk=1024",
    "7b on v4/attention kept, longest": f"--model=llama_7b --target=v4-1024 --seq_len=67108864 {KEPT}",
    "8b on 8xH100": "--model=llama3_8b --target=8xH100 --seq_len=5242880 --head_groups=8 --offload --no-fetch_ahead "
    "--kernel=cudnn",
}
"""The flags of `ringformer estimate`."""

SAID = (
    "fits",
    "reasons_against",
    "step_seconds_model",
    "closed_form_seconds",
    "seconds_source",
    "mfu_causal_model",
    "mfu_palm_model",
    "peak_bytes",
    "hbm_bytes",
    "host_bytes",
    "exposed_in_ring_loops_bytes",
    "hidden_permute_bytes",
    "exposed_permute_bytes",
    "max_link_hops",
    "versions",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--out", type=output_argument, default="results/kernel_steps.json")
    args = parser.parse_args()
    for name, flags in STEPS.items():
        if args.only not in (None, name):
            continue
        command = [sys.executable, "-m", "ringformer.cli", "estimate", *flags.split(), "--json"]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        said = {"command": f"ringformer estimate {flags}"} | {field: answer[field] for field in SAID}
        said |= made()
        known = json.loads(args.out.read_text())["steps"] if args.out.exists() else {}
        about = "compiled: whole train steps, on TPU their attention to machine code; seconds modelled from it"
        content = {"what": about, "command": "python benchmarks/kernel_steps.py", "steps": known | {name: said}}
        write_results(args.out, content)
        print(f"{name}: {said['step_seconds_model']:,.0f} s, MFU (causal) {said['mfu_causal_model']:.1%}", flush=True)


if __name__ == "__main__":
    main()
