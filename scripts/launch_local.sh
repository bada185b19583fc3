#!/usr/bin/env bash
# Train with several processes on this host, each with its share of eight simulated CPU devices. This is how to try a run
# on several hosts. The losses equal those of a single process.
set -euo pipefail
# shellcheck source=scripts/launch_options.sh
source "$(dirname "$0")/launch_options.sh"
usage() {
    cat <<END
usage: bash scripts/launch_local.sh --processes=2 --config=FILE --run_dir=DIR [option ...]

  --processes=N       number of processes
  --devices=N         simulated devices per process (default: 8 divided by the number of processes)
$COMMON_OPTIONS
END
}
parse_options "$@"
processes="" devices=""
for option in "${own[@]}"; do
    case "$option" in
        --processes=*) processes=${option#*=} ;;
        --devices=*) devices=${option#*=} ;;
        *) unknown_option "$option" ;;
    esac
done
[[ "$processes" =~ ^[1-9][0-9]*$ ]] || fail "how many processes? --processes=2"
[ -n "$devices" ] || [ $((8 % processes)) -eq 0 ] || fail "$processes processes do not share eight devices equally: --devices=N"
devices=${devices:-$((8 / processes))}
[[ "$devices" =~ ^[1-9][0-9]*$ ]] || fail "how many devices has each of $processes processes? --devices=1"
require_ringformer train
check_devices $((processes * devices))
command=("${ringformer[@]}" train "--config=$config" "${overrides[@]}" "${allow[@]}" "--config.cpu_devices=$devices" --distributed
    "--num_processes=$processes")
if [ -n "$dry_run" ]; then
    for ((i = 0; i < processes; i++)); do
        run "process $i" "${command[@]}" --coordinator_address=localhost:PORT "--process_id=$i"
    done
    exit
fi

# all_processes: start all processes, pass signals on to them, and wait. After one fails, the others have 40 s to end.
# Returns the exit code of an error if there was one, else 76 if a process was lost, else the exit code of a stop.
all_processes() {
    local children=() i name code worst=0 ended=""
    for name in TERM USR1 INT; do
        # shellcheck disable=SC2064 # expand the signal now
        trap "kill -$name "'"${children[@]}" 2>/dev/null || true' "$name"
    done
    port=$("${ringformer[0]}" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
    for ((i = 0; i < processes; i++)); do
        set -m
        "${command[@]}" "--coordinator_address=localhost:$port" "--process_id=$i" &
        children+=($!)
        set +m
    done
    while [ ${#children[@]} -gt 0 ]; do
        for i in "${!children[@]}"; do
            kill -0 "${children[i]}" 2>/dev/null && continue
            code=0
            wait "${children[i]}" 2>/dev/null || code=$?
            unset "children[i]"
            case "$code" in 134 | 137 | 139) code=76 ;; esac
            [ "$(urgency "$code")" -le "$(urgency "$worst")" ] || worst=$code
            [ "$code" -eq 0 ] || ended=${ended:-$SECONDS}
        done
        [ -z "$ended" ] || [ $((SECONDS - ended)) -lt 40 ] || kill -KILL "${children[@]}" 2>/dev/null || true
        sleep 0.2
    done
    return "$worst"
}

urgency() {
    case "$1" in
        0) echo 0 ;;
        75) echo 1 ;;
        130) echo 2 ;;
        76) echo 3 ;;
        *) echo 4 ;;
    esac
}
keep_running "this host" all_processes
