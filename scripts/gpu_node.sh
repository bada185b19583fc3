#!/usr/bin/env bash
# Train on one host with several GPUs, one process for all of them.
# It is started again when it was stopped (not through this script), or stalled.
set -euo pipefail
# shellcheck source=scripts/launch_options.sh
source "$(dirname "$0")/launch_options.sh"
usage() {
    cat <<END
usage: bash scripts/gpu_node.sh --target=8xH200 --config=FILE --run_dir=DIR [option ...]

  --target=NAME       8xA100-80, 8xH100, 8xH200: what the estimate is for
$COMMON_OPTIONS
END
}
parse_options "$@"
[ ${#own[@]} -eq 0 ] || fail "unknown option ${own[0]} (--help lists them)"
[ -n "$target$skip_estimate" ] || fail "which GPUs? --target=8xH200, or --skip-estimate"
require_ringformer cuda
# JAX takes three quarters of a GPU's memory by default; the estimate counts on 92%, and says how large the pool of host
# memory must be for what is offloaded. The trainer itself passes the compiler its options.
environment=(XLA_PYTHON_CLIENT_MEM_FRACTION=0.92)
estimate_first
keep_running "this host" env "${environment[@]}" "${ringformer[@]}" train "--config=$config" "${overrides[@]}" "${allow[@]}"
