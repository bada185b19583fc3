#!/usr/bin/env bash
# Train on a TPU slice: queue it, install on all of its hosts, run one process a host. Again, it goes on where it was:
# a slice that exists is used, a run resumed. Needs gcloud, logged in.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/launch_options.sh
source scripts/launch_options.sh
usage() {
    cat <<END
usage: bash scripts/tpu_pod.sh --name=NAME --zone=ZONE --accelerator=v5litepod-256 --nfs=IP:/SHARE \\
           --config=FILE --run_dir=/mnt/share/DIR [option ...]

  --name=NAME         of the slice and of its queued resource
  --zone=ZONE         where, e.g. us-central2-b (v4), us-west4-a (v5e)
  --accelerator=TYPE  v4-512, v5litepod-256, v5p-128, v6e-64, tpu7x-128, ...
  --project=PROJECT   without: gcloud's own
  --nfs=IP:/SHARE     a file system that all hosts mount at /mnt/share; without: they share one already
  --spot              cheaper, and taken away at any time: run the command again
$COMMON_OPTIONS

  Delete the slice when all is done: gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
END
}
parse_options "$@"
name="" zone="" accelerator="" nfs="" where=() create=()
for option in "${own[@]}"; do
    case "$option" in
        --name=*) name=${option#*=} ;;
        --zone=*) zone=${option#*=} where+=("$option") ;;
        --project=*) where+=("$option") ;;
        --accelerator=*) accelerator=${option#*=} ;;
        --nfs=*) nfs=${option#*=} ;;
        --spot) create+=(--spot) ;;
        *) fail "unknown option $option (--help lists them)" ;;
    esac
done
[ -n "$name" ] && [ -n "$zone" ] || fail "which slice? --name=NAME --zone=ZONE"
# The table of ringformer/hardware.py: here, where ringformer may not be installed yet (tests/test_scripts.py compares).
[[ "$accelerator" =~ ^([a-z0-9]+)-[1-9][0-9]*$ ]] && type=${BASH_REMATCH[1]} || type=unknown
case "$type" in
    v4) slice=v4 image=tpu-ubuntu2204-base ;;
    v5litepod) slice=v5e image=v2-alpha-tpuv5-lite ;;
    v5p) slice=v5p image=v2-alpha-tpuv5 ;;
    v6e) slice=v6e image=v2-alpha-tpuv6e ;;
    tpu7x) slice=tpu7x image=v2-alpha-tpu7-ubuntu2404 ;;
    *) fail "--accelerator=$accelerator is none of v4-N, v5litepod-N, v5p-N, v6e-N and tpu7x-N" ;;
esac
target=${target:-$slice-${accelerator#*-}}
if [ -n "$nfs" ] && ! [[ "$nfs" =~ ^[A-Za-z0-9][A-Za-z0-9.-]*:/ ]]; then
    fail "--nfs=$nfs is no IP:/SHARE"
fi
tpus=(gcloud compute tpus)

# on_all_hosts COMMAND: a line of shell, on each of them at once.
on_all_hosts() {
    run "this host" "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" --worker=all "--command=$1"
    [ -z "$dry_run" ] || echo "[every host of $name] $1"
}

state() {
    "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>/dev/null || echo NONE
}

[ -n "$skip_estimate" ] || require_ringformer estimate
estimate_first
if [ -n "$dry_run" ] || [ "$(state)" = NONE ]; then
    run "this host" "${tpus[@]}" queued-resources create "$name" "--node-id=$name" "${where[@]}" \
        "--accelerator-type=$accelerator" "--runtime-version=$image" "${create[@]}"
fi
if [ -z "$dry_run" ]; then
    until [ "$(state)" = ACTIVE ]; do
        case "$(state)" in
            FAILED | SUSPENDED) fail "the queued resource $name is $(state): delete it, and run this again" ;;
        esac
        echo "waiting for $name ($accelerator in $zone): $(state)" >&2
        sleep 60
    done
fi

archive=$(mktemp -t ringformer-XXXXXX.tar.gz)
trap 'rm -f "$archive"' EXIT
run "this host" git archive --format=tar.gz "--output=$archive" HEAD
run "this host" "${tpus[@]}" tpu-vm scp "$archive" "$name:ringformer.tar.gz" "${where[@]}" --worker=all
[ -z "$nfs" ] || on_all_hosts "sudo apt-get install -y -q nfs-common && sudo mkdir -p /mnt/share && \
(mountpoint -q /mnt/share || sudo mount -t nfs $(printf %q "$nfs") /mnt/share)"
# The image's Python is older than ringformer's 3.11.
on_all_hosts "mkdir -p ringformer && tar -xzf ringformer.tar.gz -C ringformer && python3 -m pip install -q --user uv && \
(test -x ringformer/.venv/bin/python || python3 -m uv venv -q --python 3.12 ringformer/.venv) && \
python3 -m uv pip install -q --python ringformer/.venv/bin/python --require-hashes -r ringformer/requirements/train.txt && \
python3 -m uv pip install -q --python ringformer/.venv/bin/python -e './ringformer[train,tpu]'"
# No environment flags: the trainer passes the compiler its options, the hosts find each other.
on_all_hosts "cd ringformer && .venv/bin/python -m ringformer.cli train --distributed$(printf ' %q' "--config=$config" "${overrides[@]}")"
