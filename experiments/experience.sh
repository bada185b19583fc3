#!/usr/bin/env bash
# In-context reinforcement learning on the CPU: make chains of a dark room with hidden goals, train a small LLaMA on them
# in stages (4 episodes; 16 and 32; 64 and 128 on a ring of eight simulated devices), let it play after explorations for
# goals that it never saw, and draw its returns. If interrupted, run the same command again: it continues.
# OUT has the runs (default: runs/experience).
#   --seeds=N       train seeds 1 to N; a seed also draws the goals (default: 1)
#   --controls      also play with blank, exchanged and shuffled contexts and with the model of stage 1, and train the
#                   stage of the ring on one device
#   --count=N       episodes that are played after each number of explorations (default: 405); controls play a third
#   --share=X       share of the chains to make, to try something quickly
#   --config=FILE   a config to use instead of configs/in_context_rl.py
#   --results=FILE  file of results (default: OUT/experience.json)
#   --figure=FILE   figure (default: OUT/experience.png)
#   --machine=TEXT  description of the machine, for the file of results (default: two CPU cores)
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=1
controls=
count=405
share=1
config=configs/in_context_rl.py
results=
figure=
machine="two CPU cores"
out=
command="bash experiments/experience.sh $*"
usage="usage: bash experiments/experience.sh [--seeds=N] [--controls] [--count=N] [--share=X] [--config=FILE] \
[--results=FILE] [--figure=FILE] [--machine=TEXT] [OUT]"
# shellcheck source=scripts/option_values.sh
source scripts/option_values.sh
join_values "$usage" "$@"
for argument in "${joined[@]}"; do
    case "$argument" in
        --seeds=[1-9]) seeds=${argument#*=} ;;
        --controls) controls=1 ;;
        --count=*[!0-9]* | --count= | --count=0*)
            echo "$argument is not a number; give the episodes to play, e.g. --count=405" >&2
            exit 2
            ;;
        --count=*) count=${argument#*=} ;;
        --share=*) share=${argument#*=} ;;
        --config=*) config=${argument#*=} ;;
        --results=*) results=${argument#*=} ;;
        --figure=*) figure=${argument#*=} ;;
        --machine=*) machine=${argument#*=} ;;
        -*)
            echo "$usage" >&2
            exit 2
            ;;
        *)
            if [ -n "$out" ]; then
                echo "$out and $argument are two folders; give one" >&2
                exit 2
            fi
            out=$argument
            ;;
    esac
done
out=${out:-runs/experience}
if ((count < 27)); then
    echo "--count=$count is too small: give at least 27, so that controls play each goal" >&2
    exit 2
fi
if [ ! -f "$config" ]; then
    echo "there is no config $config" >&2
    exit 2
fi
for file in "$results" "$figure"; do
    if [ -n "$file" ] && { [ -d "$file" ] || [ ! -d "$(dirname "$file")" ]; }; then
        echo "$file cannot be a file: its folder is missing, or it is a folder; choose another file" >&2
        exit 2
    fi
done
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
python=${RINGFORMER_PYTHON:-$PWD/.venv/bin/python}
export JAX_PLATFORMS=cpu
mkdir -p "$out"

# timed SEED PART COMMAND...: run a part, and note its seconds
timed() {
    local began=$SECONDS
    echo "== $1: $2"
    "${@:3}"
    echo "$1 $2 $((SECONDS - began))" >>"$out/seconds.txt"
}
experience() {
    "$python" experiments/experience.py "$@"
}
# train SEED RUN STAGE DEVICES
train() {
    local folder=$out/seed-$1
    "$python" -m ringformer.cli train --config="$config" --stage="$3" --config.cpu_devices="$4" \
        --config.run_dir="$folder/$2" --config.data.store="$folder/store" \
        --config.data.source="jsonl:$folder/chains.jsonl" --config.data.tokenizer="$folder/tokenizer" --config.seed="$1"
}
# stage SEED RUN STAGE: print the folder of a stage
stage() {
    local found
    for found in "$out/seed-$1/$2/stage-$3-"*; do echo "$found"; done
}
# play SEED NAME STAGE EPISODES COUNT [--control=CONTROL] [--beyond]
play() {
    mkdir -p "$out/seed-$1/episodes"
    timed "seed-$1" "play-$2" experience play "$(stage "$1" run "$3")" --episodes="$4" --count="$5" \
        --out="$out/seed-$1/episodes/$2.json" "${@:6}"
}
collect() {
    "$python" experiments/experience_results.py "$out" --results="${results:-$out/experience.json}" \
        --figure="${figure:-$out/experience.png}" --measured_on="$machine" --command="$command"
}
for ((seed = 1; seed <= seeds; seed++)); do
    timed "seed-$seed" chains experience make "$out/seed-$seed" --seed="$seed" --share="$share"
    # On two cores, a ring of eight is slower than two replicas, and a thousand tokens need no ring.
    timed "seed-$seed" train-1 train "$seed" run 1 2
    timed "seed-$seed" train-2 train "$seed" run 2 2
    timed "seed-$seed" train-3 train "$seed" run 3 8
    play "$seed" run 3 1,4,16,32,128 "$count"
    collect
done
[ -n "$controls" ] || exit 0
for ((seed = 1; seed <= seeds; seed++)); do
    for control in blank other shuffled; do
        play "$seed" "run-$control" 3 16,32 $((count / 3)) --control="$control"
    done
    play "$seed" short 1 1,4,16,32 $((count / 3)) --beyond
    one_device=$out/seed-$seed/one-device
    if [ ! -e "$one_device" ]; then # the stages without a ring are those of the run
        rm -rf "$one_device.copying"
        mkdir "$one_device.copying"
        cp -r "$out/seed-$seed/run/stage-1-"* "$out/seed-$seed/run/stage-2-"* "$one_device.copying"
        mv "$one_device.copying" "$one_device"
    fi
    timed "seed-$seed" train-one-device train "$seed" one-device 3 1
    timed "seed-$seed" compare experience compare "$(stage "$seed" run 3)" "$(stage "$seed" one-device 3)" \
        --episodes=1,4,16,32,128 --out="$one_device.json"
    collect
done
