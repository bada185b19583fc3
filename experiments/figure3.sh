#!/usr/bin/env bash
# Make our form of the paper's Figure 3: train the model of configs/retrieval.py up to 32K tokens, for three seeds on a
# ring of eight simulated devices, and once up to 8K without a ring. Evaluate the models of 1K, 4K, 8K, 16K and 32K, and
# write results/figure3.json and docs/figures/figure3.png after each part. If interrupted, run the same command again: it
# continues. OUT has the runs (default: runs/figure3).
#   --last=N        last stage: 6 trains up to 8K tokens, 7 up to 16K, 8 up to 32K (default: 8)
#   --share=X       share of the records, to try something quickly
#   --config=FILE   a config to use instead of configs/retrieval.py
#   --cases=N       cases of a context, a multiple of 20; beyond 8K a document has 20 of them (default: 200)
#   --results=FILE  file of results (default: results/figure3.json)
#   --figure=FILE   figure (default: docs/figures/figure3.png)
#   --machine=TEXT  description of the machine, for the file of results (default: two CPU cores)
set -euo pipefail
cd "$(dirname "$0")/.."
last=8
cases=200
options=()
results=results/figure3.json
figure=docs/figures/figure3.png
machine="two CPU cores"
out=runs/figure3
usage="usage: bash experiments/figure3.sh [--last=N] [--share=X] [--config=FILE] [--cases=N] [--results=FILE] \
[--figure=FILE] [--machine=TEXT] [OUT]"
# shellcheck source=scripts/option_values.sh
source scripts/option_values.sh
join_values "$usage" "$@"
for argument in "${joined[@]}"; do
    case "$argument" in
        --last=[4-8]) last=${argument#*=} ;;
        --share=* | --config=*) options+=("$argument") ;;
        --cases=*[!0-9]* | --cases= | --cases=0*)
            echo "$argument is not a number; give a multiple of 20" >&2
            exit 2
            ;;
        --cases=*) cases=${argument#*=} ;;
        --results=*) results=${argument#*=} ;;
        --figure=*) figure=${argument#*=} ;;
        --machine=*) machine=${argument#*=} ;;
        -*)
            echo "$usage" >&2
            exit 2
            ;;
        *) out=$argument ;;
    esac
done
if ((cases % 20)); then
    echo "--cases=$cases is not a multiple of 20, the questions about a document" >&2
    exit 2
fi
for file in "$results" "$figure"; do
    if [ ! -d "$(dirname "$file")" ]; then
        echo "there is no folder $(dirname "$file") for $file; create it, or choose another file" >&2
        exit 2
    fi
done
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
export RINGFORMER_PYTHON=${RINGFORMER_PYTHON:-$PWD/.venv/bin/python}
export JAX_PLATFORMS=cpu
mkdir -p "$out"
contexts=(1K 4K 8K 16K 32K)  # of the models of stages 4 to 8

# train NAME STAGE SEED DEVICES: train a run up to a stage. The control has the records of seed 0 and begins with its
# stages 1 to 4, which have no ring.
train() {
    local folder=$out/$1 run=run
    if [ "$1" = control ]; then
        folder=$out/seed-0 run=control
        if [ ! -e "$folder/$run" ]; then
            rm -rf "$folder/$run.copying"
            mkdir "$folder/$run.copying"
            cp -r "$folder"/run/stage-[1-4]-* "$folder/$run.copying"
            rm -rf "$folder/$run.copying"/*/evals
            mv "$folder/$run.copying" "$folder/$run"
        fi
    fi
    bash experiments/retrieval.sh --short --train_only --last="$2" --seed="$3" --devices="$4" --run="$run" "${options[@]}" \
        "$folder"
}
# evaluate NAME STAGE CONTEXT...: evaluate the model of a stage with cases that did not choose the recipe. The steps of
# stages 7 and 8 were raised after an evaluation with the cases of the others.
evaluate() {
    local name=$1 seed=$(($2 < 7 ? 7927 : 7933)) run context few="" many="" began=$SECONDS
    if [ "$name" = control ]; then run=$out/seed-0/control; else run=$out/$name/run; fi
    run=$(ls -d "$run/stage-$2"-*)
    for context in "${@:3}"; do
        if [ "${context%K}" -le 8 ]; then few+=,$context; else many+=,$context; fi
    done
    echo "== Evaluation of $run at ${*:3}"
    [ -z "$few" ] || lines figure3 --lengths="${few#,}" --num_cases="$cases"
    [ -z "$many" ] || lines figure3_documents --lengths="${many#,}" --num_cases=$((cases / 20)) --questions=20
    echo "$name $(basename "$run") $((SECONDS - began))" >>"$out/evaluation_seconds.txt"
    "$RINGFORMER_PYTHON" experiments/figure3.py "$out" --results="$results" --figure="$figure" --measured_on="$machine"
}
lines() {
    "$RINGFORMER_PYTHON" -m ringformer.cli eval lines --run="$run" --out="$run/evals/$1" "${@:2}" --seed="$seed" \
        --batch_size=10 --max_value=99 --allow_longer --cpu_devices=2 --mesh_dim=1,1,1,-1
}
# family STAGE: evaluate the model of seed 0 from 1K to four times its context, at most 64K
family() {
    case $1 in
        4) evaluate seed-0 4 1K 2K 4K ;;
        5) evaluate seed-0 5 1K 2K 4K 8K 16K ;;
        6) evaluate seed-0 6 1K 2K 4K 8K 16K 32K ;;
        *) evaluate seed-0 "$1" 1K 2K 4K 8K 16K 32K 64K ;;
    esac
}
# own STAGE: train all runs up to a stage, and evaluate each model at its own context
own() {
    local name seed devices
    for run in "seed-0 0 8" "seed-1 1 8" "seed-2 2 8" "control 0 1"; do
        read -r name seed devices <<<"$run"
        if [ "$name" = control ] && [ "$1" -gt 6 ]; then continue; fi
        train "$name" "$1" "$seed" "$devices"
        evaluate "$name" "$1" "${contexts[$1 - 4]}"
    done
}
for stage in $(seq 4 "$last"); do own "$stage"; done
for stage in $(seq 4 "$last"); do family "$stage"; done
