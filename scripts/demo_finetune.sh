#!/usr/bin/env bash
# Fine-tune end to end on the CPU. Makes a random LLaMA-3.1-style Hugging Face checkpoint with its own tokenizer, converts
# and verifies it, prepares and inspects chats, extends the context in stages, exports the result, and loads it in
# transformers. Writes OUT (default: runs/demo_finetune). With --short, each stage has only a few steps.
set -euo pipefail
cd "$(dirname "$0")/.."
short=
out=runs/demo_finetune
for argument in "$@"; do
    case "$argument" in
        --short) short=1 ;;
        -*) echo "usage: bash scripts/demo_finetune.sh [--short] [OUT]" >&2; exit 2 ;;
        *) out=$argument ;;
    esac
done
if [ -e "$out" ]; then
    echo "$out already exists: remove it or name another folder" >&2
    exit 2
fi
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
}
ringformer() {
    step "ringformer $1 $2" "ringformer $*"
    "$python" -m ringformer.cli "$@"
}

step "A checkpoint, and chats in ShareGPT's format" "scripts/demo_finetune.py make"
"$python" scripts/demo_finetune.py make "$out/hf" "$out/sharegpt.json" ${short:+--chats=200}
ringformer convert from-hf "$out/hf" "$out/converted"
ringformer convert verify "$out/hf" "$out/converted"
data=(--source="json:$out/sharegpt.json" --format=sharegpt --template=llama3 --chat_length=1024 --held_out=0.1)
ringformer data prepare --store="$out/store" --tokenizer="$out/converted" "${data[@]}"
ringformer data inspect "$out/store/train" --tokenizer="$out/converted" --samples=2
ringformer train --config=configs/demo_finetune.py --config.run_dir="$out/run" --config.init_from="$out/converted" \
    --config.data.store="$out/store" --config.data.tokenizer="$out/converted" \
    --config.data.source="json:$out/sharegpt.json" \
    ${short:+--config.steps=3 --config.optimizer.warmup_steps=1 --config.eval_batches=2}
last=$(ls -d "$out"/run/stage-3-*)
ringformer convert to-hf "$last" "$out/exported"
ringformer convert verify "$out/exported" "$last"
step "Generation in transformers" "scripts/demo_finetune.py generate"
"$python" scripts/demo_finetune.py generate "$out/exported" "$last"
