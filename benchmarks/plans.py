"""Four plans to their machine code, and whether a neighbour of what they recommend would be faster.

    python benchmarks/plans.py [--only=llama3_8b/v5p-128] [--out=results/plans.json]

Compiled, not measured: a quarter of an hour each, and more on few cores. A plan that is in --out stays.
"""

import argparse
import json
from dataclasses import replace

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.choices.candidates import Candidate, neighbours
from ringformer.estimate.closed_forms.training import computation_time
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.reports.run_estimate import RunCompiler, programs_json
from ringformer.estimate.search.plan import longest_plan
from ringformer.estimate.search.plan_report import plan_text
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import estimate_command, preset_workload

PLANS = (("llama3_8b", "v5p-128"), ("llama_7b", "v5e-256"), ("llama_13b", "32xA100-80"), ("llama3_8b", "8xH100"))


def seconds_nearby(chosen: Candidate, compiler: RunCompiler) -> dict[str, float | str]:
    """Seconds of a step of each neighbour, as the plan compares them (on TPU by machine code), or why it cannot be."""
    found: dict[str, float | str] = {}
    for other in neighbours(chosen):
        if reason := other.reason_against:
            found[str(other)] = reason
            continue
        try:
            step = compiler.timed(other.workload)
        except CompilerFailure as failure:
            found[str(other)] = str(failure)
            continue
        found[str(other)] = other.timed(step).step if step.fits else f"needs {step.peak_bytes / 2**30:.2f} GiB"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one of them, e.g. llama3_8b/v5p-128")
    parser.add_argument("--out", type=output_argument, default="results/plans.json")
    args = parser.parse_args()
    only_compilers()
    for model, name in PLANS:
        known = json.loads(args.out.read_text())["plans"] if args.out.exists() else {}
        if f"{model}/{name}" in known or args.only not in (None, f"{model}/{name}"):
            continue
        target, compiler = find_target(name), RunCompiler(lambda line: print(line, flush=True), generate_code=True)
        goal = replace(preset_workload(model, target, 1, compute_dtype="bfloat16"), batch_size=0)
        planned = longest_plan(goal, compiler)
        text = plan_text(planned)
        print(text, flush=True)
        assert planned.chosen and planned.run, "some length fits"
        said = {"text": text.splitlines(), "seq_len": planned.seq_len, "chosen": str(planned.chosen)}
        said |= {
            "seconds": planned.chosen.timed(compiler.timed(planned.chosen.workload)).step,
            "seconds_nearby": seconds_nearby(planned.chosen, compiler),
        }
        said |= programs_json(planned.run)
        workload = planned.chosen.workload
        said |= {"command": estimate_command(workload), "closed_form_seconds": computation_time(workload).step}
        said |= {"compiled_by": compiled_by(target), **made()}
        about = "compiled: the longest plan, its programs to machine code; seconds modelled from it"
        content = {"what": about, "command": "python benchmarks/plans.py", "plans": known | {f"{model}/{name}": said}}
        write_results(args.out, content)


if __name__ == "__main__":
    main()
