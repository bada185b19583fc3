#!/usr/bin/env bash
# Line retrieval on the CPU, from nothing: a tokenizer and records are made, a small LLaMA learns to find lines, its
# context is extended in stages on a ring of eight simulated devices, and its accuracy over the context is measured and
# drawn. Writes OUT (runs/retrieval, with --short runs/retrieval_short); interrupted, the same command goes on.
#   --short        numbers of two digits, which are one token; without: those of LongEval, up to five, which are three
#   --seed=N       of the parameters and of the order of the records (default: 0)
#   --share=X      of the records, and
#   --config=FILE  another config than configs/retrieval.py: to try something
#   --test         then evaluate with cases that no choice was made with, at 16K, too: at the end, once
set -euo pipefail
cd "$(dirname "$0")/.."
largest=50000
form=
seed=0
share=1
config=configs/retrieval.py
test=
out=
for argument in "$@"; do
    case "$argument" in
        --short) largest=99 form=_short ;;
        --seed=*) seed=${argument#*=} ;;
        --share=*) share=${argument#*=} ;;
        --test) test=1 ;;
        --config=*) config=${argument#*=} ;;
        -*) echo "usage: bash scripts/retrieval.sh [--short] [--seed=N] [--share=X] [--config=FILE] [--test] [OUT]" >&2; exit 2 ;;
        *) out=$argument ;;
    esac
done
out=${out:-runs/retrieval$form}
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
python=${RINGFORMER_PYTHON:-.venv/bin/python}
export JAX_PLATFORMS=cpu

step() {
    echo
    echo "== $1"
    shift
    echo "   $*"
    "$@"
}
step "Records, and a tokenizer" "$python" scripts/retrieval.py make "$out" --largest="$largest" --share="$share"
train() {
    step "Stage $1, on $2 simulated devices" "$python" -m ringformer.cli train --config="$config" --stage="$1" \
        --config.cpu_devices="$2" --config.run_dir="$out/run" --config.data.store="$out/store" \
        --config.data.source="jsonl:$out/records.jsonl" --config.data.tokenizer="$out/tokenizer" --config.seed="$seed"
}
# A ring of eight costs two cores more than two replicas do, and a thousand tokens need no ring.
for stage in 1 2 3 4; do train $stage 2; done
for stage in 5 6; do train $stage 8; done
last=$(ls -d "$out"/run/stage-*-8192)
evaluate() {
    step "$1" "$python" -m ringformer.cli eval lines --run="$last" "${@:2}" --max_value="$largest" --batch_size=10 \
        --mesh_dim=1,1,1,-1 --cpu_devices=8
}
evaluate "Evaluation" --lengths=1K,4K,8K --num_cases=50
if [ -n "$test" ]; then
    evaluate "Test" --out="$last/evals/test" --seed=7919 --lengths=1K,4K,8K,16K --allow_longer --num_cases=100
fi
