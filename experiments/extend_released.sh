#!/usr/bin/env bash
# Extend a released model, SmolLM2-135M-Instruct of 8K tokens, and measure what its larger rope theta and what the training
# did: losses by position, tasks and chats. Writes OUT (default: runs/extend_released/FORM), and after each group of parts
# results/extension.json and docs/figures/extension_FORM.png (--toy: both in OUT). If interrupted, run the same command again:
# parts that ended are kept. Without an option the form is whole: hours on two cores.
#   --core         three models up to 16K tokens: an hour on two cores
#   --gpu          steps at 16K, 32K and 64K and evaluations up to 128K, on one H100 or H200: eight minutes
#   --toy          the parts of all forms at the size of a CPU: minutes
#   --accelerator  take the core or the whole form on one H100 or H200: minutes
#   --pack=DIR     write the inputs of a machine without a network to DIR, from the documents of OUT, and stop
#   --inputs=DIR   read the inputs that --pack wrote
#   --results=FILE --figure=FILE  other files for the results
set -euo pipefail
cd "$(dirname "$0")/.."
plan=whole
out=
pack=
inputs=
results=
figure=
accelerator=
usage="usage: bash experiments/extend_released.sh [--core | --gpu | --toy] [--accelerator] [--pack=DIR] [--inputs=DIR] \
[--results=FILE] [--figure=FILE] [OUT]"
# shellcheck source=scripts/option_values.sh
source scripts/option_values.sh
join_values "$usage" "$@"
for argument in "${joined[@]}"; do
    case "$argument" in
        --core | --gpu | --toy) plan=${argument#--} ;;
        --accelerator) accelerator=--accelerator ;;
        --pack=*) pack=${argument#*=} ;;
        --inputs=*) inputs=${argument#*=} ;;
        --results=*) results=${argument#*=} ;;
        --figure=*) figure=${argument#*=} ;;
        -*)
            echo "$usage" >&2
            exit 2
            ;;
        *) out=$argument ;;
    esac
done
out=${out:-runs/extend_released/$plan}
mkdir -p "$out"
if [ "$plan" = toy ]; then
    results=${results:-$out/results.json} figure=${figure:-$out/losses.png}  # no results to keep
fi
results=${results:-results/extension.json}
figure=${figure:-docs/figures/extension_$plan.png}
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
    bash scripts/fetch_released.sh
fi
python=${RINGFORMER_PYTHON:-.venv/bin/python}
[ "$plan" = gpu ] || [ -n "$accelerator" ] || export JAX_PLATFORMS=cpu
export TQDM_DISABLE=1
if [ -n "$pack" ]; then
    exec "$python" -m experiments.extension.pack "$out/documents" "$pack"
fi
"$python" -m experiments.extension.study --plan="$plan" ${accelerator:+"$accelerator"} ${inputs:+--inputs="$inputs"} --results="$results" \
    --figure="$figure" "$out"
