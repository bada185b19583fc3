#!/usr/bin/env bash
# Train a small LLaMA for line retrieval on the CPU. Makes a tokenizer and training records, trains from scratch, extends
# the context in stages on a ring of eight simulated devices, and measures and plots the accuracy by context. Writes OUT
# (default: runs/retrieval, or runs/retrieval_short with --short). If interrupted, run the same command again.
#   --short        numbers of two digits, one token each (default: LongEval's, of up to five digits, three tokens each)
#   --seed=N       seed of the records, of their order and of the parameters (default: 0)
#   --last=N       last stage to train: 4 reaches 1K tokens, 5 4K, 6 8K, 7 16K, 8 32K (default: 6)
#   --devices=N    simulated devices of the ring, from stage 5 on; 1 trains without a ring (default: 8)
#   --run=NAME     folder of the run in OUT, for a second run with the same records (default: run)
#   --train_only   train, and do not evaluate
#   --share=X      share of the records to make, to try something quickly
#   --config=FILE  a config to use instead of configs/retrieval.py
#   --test         finally evaluate once with cases that were not used to choose the recipe, also at 16K
set -euo pipefail
cd "$(dirname "$0")/.."
largest=50000
form=
seed=0
last=6
devices=8
run=run
evaluate=1
share=1
config=configs/retrieval.py
test=
out=
usage="usage: bash experiments/retrieval.sh [--short] [--seed=N] [--last=N] [--devices=N] [--run=NAME] [--train_only] \
[--share=X] [--config=FILE] [--test] [OUT]"
# shellcheck source=scripts/option_values.sh
source scripts/option_values.sh
join_values "$usage" "$@"
for argument in "${joined[@]}"; do
    case "$argument" in
        --short) largest=99 form=_short ;;
        --seed=*) seed=${argument#*=} ;;
        --last=[4-8]) last=${argument#*=} ;;
        --devices=*) devices=${argument#*=} ;;
        --run=*) run=${argument#*=} ;;
        --train_only) evaluate= ;;
        --share=*) share=${argument#*=} ;;
        --test) test=1 ;;
        --config=*) config=${argument#*=} ;;
        -*)
            echo "$usage" >&2
            exit 2
            ;;
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
step "Records, and a tokenizer" "$python" experiments/retrieval.py make "$out" --largest="$largest" --share="$share" \
    --seed="$seed"
train() {
    step "Stage $1, on $2 simulated devices" "$python" -m ringformer.cli train --config="$config" --stage="$1" \
        --config.cpu_devices="$2" --config.run_dir="$out/$run" --config.data.store="$out/store" \
        --config.data.source="jsonl:$out/records.jsonl" --config.data.tokenizer="$out/tokenizer" --config.seed="$seed"
}
# On two cores, a ring of eight is slower than two replicas, and a thousand tokens need no ring.
for stage in $(seq 1 "$last"); do
    train "$stage" $((stage < 5 ? 2 : devices))
done
[ -n "$evaluate" ] || exit 0
contexts=(1K 4K 8K 16K 32K)
lengths=$(IFS=,; echo "${contexts[*]:0:last-3}")
stage=$(ls -d "$out/$run/stage-$last"-*)
evaluate() {
    step "$1" "$python" -m ringformer.cli eval lines --run="$stage" "${@:2}" --max_value="$largest" --batch_size=10 \
        --mesh_dim=1,1,1,-1 --cpu_devices=8
}
evaluate "Evaluation" --lengths="$lengths" --num_cases=50
if [ -n "$test" ]; then
    evaluate "Test" --out="$stage/evals/test" --seed=7919 --lengths=1K,4K,8K,16K --allow_longer --num_cases=100
fi
