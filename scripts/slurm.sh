#!/usr/bin/env bash
#SBATCH --job-name=ringformer
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180
# Train on whole nodes of several GPUs under SLURM, with one process per GPU.
# Nodes have eight GPUs; on nodes of four, add --gpus-per-node=4 --ntasks-per-node=4 to sbatch.
# Three minutes before the job's time is up, all processes save and end, and the job is queued again to resume the run. If
# a process dies or stalls, the run is restarted within the job.
# Submit this script from the repository's root, or from the folder that contains a copy of scripts/.
set -euo pipefail
if [ -n "${SLURM_JOB_ID:-}" ]; then # sbatch runs a copy of this file from elsewhere
    cd "$SLURM_SUBMIT_DIR"
    here=scripts
    if [ ! -f scripts/launch_options.sh ]; then
        echo "slurm.sh: $PWD is not the repository: submit from its root, or from the folder that holds scripts/" >&2
        exit 2
    fi
else
    here=$(dirname "$0")
fi
# shellcheck source=scripts/launch_options.sh
source "$here/launch_options.sh"
usage() {
    cat <<END
usage: sbatch --nodes=4 scripts/slurm.sh --target=32xA100-80 --config=FILE --run_dir=DIR [option ...]

  --target=NAME       the GPUs of all nodes together: 8xA100-80, 32xA100-80, 16xH100, ...
  On nodes of four GPUs: sbatch --nodes=4 --gpus-per-node=4 --ntasks-per-node=4 scripts/slurm.sh --target=16xH100 ...
$COMMON_OPTIONS
END
}
parse_options "$@"
[ ${#own[@]} -eq 0 ] || unknown_option "${own[0]}"
[[ "$target" =~ ^[1-9][0-9]*x ]] || fail "which GPUs? --target=32xA100-80"
gpus=${target%%x*}
gpus_per_node=$(slurm_number 8 SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE)
[ $((gpus % gpus_per_node)) -eq 0 ] || fail "--target=$target: $gpus GPUs are not whole nodes of $gpus_per_node; nodes of \
another size: sbatch --gpus-per-node=4 --ntasks-per-node=4, in a dry run SLURM_GPUS_ON_NODE=4; for less than a node there \
is scripts/gpu_node.sh"
job="sbatch --nodes=$((gpus / gpus_per_node))"
[ "$gpus_per_node" -eq 8 ] || job+=" --gpus-per-node=$gpus_per_node --ntasks-per-node=$gpus_per_node"
nodes=$(slurm_number $((gpus / gpus_per_node)) SLURM_JOB_NUM_NODES SLURM_NNODES)
[ $((gpus_per_node * nodes)) -eq "$gpus" ] || fail "--target=$target has $gpus GPUs, $nodes nodes of $gpus_per_node have \
$((gpus_per_node * nodes)): $job"
tasks_per_node=$(slurm_number "$gpus_per_node" SLURM_NTASKS_PER_NODE)
[ "$tasks_per_node" -eq "$gpus_per_node" ] || fail "SLURM_NTASKS_PER_NODE=$tasks_per_node, but a node has $gpus_per_node \
GPUs, each with its own process: sbatch --ntasks-per-node=$gpus_per_node"
tasks=$(slurm_number "$gpus" SLURM_NTASKS)
[ "$tasks" -eq "$gpus" ] || fail "SLURM_NTASKS=$tasks, but there are $gpus GPUs, each with its own process: $job"
[ -n "$dry_run${SLURM_JOB_ID:-}" ] || fail "this is a job: $job scripts/slurm.sh ..., or --dry-run"
require_ringformer cuda
# By default JAX takes three quarters of a GPU's memory; the estimate assumes 92%. The estimate also gives the size of the
# host memory pool for offloaded arrays. The trainer passes options to the compiler itself. The processes find each other
# through SLURM's variables.
environment=(XLA_PYTHON_CLIENT_MEM_FRACTION=0.92)
[ -z "$skip_estimate" ] || check_devices "$gpus"
estimate_first
command=(env "${environment[@]}" "${ringformer[@]}" train --distributed "--config=$config" "${overrides[@]}" "${allow[@]}")
if [ -n "$dry_run" ]; then
    for ((node = 0; node < nodes; node++)); do
        first=$((gpus_per_node * node))
        run "node $node, tasks $first to $((first + gpus_per_node - 1))" "${command[@]}"
    done
    exit
fi
# The processes end each other and report the reason, so SLURM must not kill processes that are still saving. The mesh takes
# consecutive processes for those of a node, and nodes for those of a rack, whatever SLURM_DISTRIBUTION says.
AGAIN_ON_STOP=
code=0
keep_running "this job" srun --distribution=block --kill-on-bad-exit=0 --wait=180 "${command[@]}" || code=$?
if [ "$code" -eq 75 ]; then
    # A cancelled job stays cancelled. SLURM itself queues a preempted job again.
    state=$(squeue --noheader "--jobs=$SLURM_JOB_ID" --format=%T) || fail "squeue does not say what became of job $SLURM_JOB_ID"
    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
