#!/usr/bin/env bash
# Train on one host with several GPUs, in one process.
# The process is restarted if it stalls, or if it is stopped by anything but this script.
set -euo pipefail
# shellcheck source=scripts/launch_options.sh
source "$(dirname "$0")/launch_options.sh"
usage() {
    cat <<END
usage: bash scripts/gpu_node.sh --target=8xH200 --config=FILE --run_dir=DIR [option ...]

  --target=NAME       the GPUs: 8xA100-80, 8xH100, 4xH200, ...
$COMMON_OPTIONS
END
}
parse_options "$@"
[ ${#own[@]} -eq 0 ] || unknown_option "${own[0]}"
[ -n "$target$skip_estimate" ] || fail "which GPUs? --target=8xH200, or --skip-estimate"
nodes=$(slurm_number 1 SLURM_JOB_NUM_NODES SLURM_NNODES)
[ "$nodes" -eq 1 ] || fail "this job has $nodes nodes, and this script trains on one: sbatch scripts/slurm.sh"
if [[ "$target" =~ ^[1-9][0-9]*x ]]; then
    gpus=${target%%x*}
    [ "$gpus" -le 8 ] || fail "--target=$target is more than a node of 8 GPUs, and this script trains on one: sbatch \
scripts/slurm.sh"
    there=$(slurm_number "$gpus" SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE)
    [ "$there" -eq "$gpus" ] || fail "--target=$target has $gpus GPUs, but SLURM gives this host $there: \
--target=${there}x${target#*x}"
fi
require_ringformer cuda
[ -z "$skip_estimate" ] || [ -z "${gpus:-}" ] || check_devices "$gpus"
# By default JAX takes three quarters of a GPU's memory; the estimate assumes 92%. The estimate also gives the size of the
# host memory pool for offloaded arrays. The trainer passes options to the compiler itself.
environment=(XLA_PYTHON_CLIENT_MEM_FRACTION=0.92)
estimate_first
keep_running "this host" env "${environment[@]}" "${ringformer[@]}" train "--config=$config" "${overrides[@]}" "${allow[@]}"
