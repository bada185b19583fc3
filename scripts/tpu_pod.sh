#!/usr/bin/env bash
# Train on a TPU slice, or on several that the network between their hosts joins: request them, install ringformer on all of
# their hosts, run one process per host, and show the output of process 0. The run continues if this script ends. The same
# command uses existing slices, follows a run that is under way, and resumes a run that ended. Needs gcloud with an active
# login.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/launch_options.sh
source scripts/launch_options.sh
usage() {
    cat <<END
usage: bash scripts/tpu_pod.sh --name=NAME --zone=ZONE --accelerator=v5litepod-256 --nfs=IP:/SHARE \\
           --config=FILE --run_dir=/mnt/share/DIR [option ...]

  --name=NAME         name of the slice and of its queued resource
  --zone=ZONE         zone of the slice, e.g. us-central2-b (v4), us-west4-a (v5e)
  --accelerator=TYPE  v4-512, v5litepod-256, v5p-128, v6e-64, tpu7x-128, ...
  --slices=N          train on N slices of this type, NAME-0, NAME-1, ... (default: 1, which is NAME); mesh_dim of the
                      config begins with a multiple of N
  --project=PROJECT   project of the slice (default: gcloud's project)
  --nfs=IP:/SHARE     a file system to mount at /mnt/share on all hosts, unless they already share one
  --bucket=gs://NAME  instead of it, a bucket with a hierarchical namespace, mounted with gcsfuse
  --spot              request a cheaper slice that can be taken away at any time; then run the command again
  --follow            only show the output of process 0; Ctrl-C does not stop the run
  --stop              save and end the current run
$COMMON_OPTIONS

  When you no longer need the slices, delete them: gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
END
}
parse_options "$@"
name="" zone="" accelerator="" slices=1 nfs="" bucket="" only="" where=() create=()
for option in "${own[@]}"; do
    case "$option" in
        --name=*) name=${option#*=} ;;
        --zone=*) zone=${option#*=} where+=("$option") ;;
        --project=*) where+=("$option") ;;
        --accelerator=*) accelerator=${option#*=} ;;
        --nfs=*) nfs=${option#*=} ;;
        --bucket=*) bucket=${option#*=} && [ -n "$bucket" ] || fail "--bucket= names no bucket" ;;
        --slices=*) slices=${option#*=} ;;
        --spot) create+=(--spot) ;;
        --follow | --stop) only=${option#--} ;;
        *) unknown_option "$option" ;;
    esac
done
[ -n "$name" ] && [ -n "$zone" ] || fail "which slice? --name=NAME --zone=ZONE"
# Copy of a table in ringformer/hardware/, because ringformer may not be installed here (tests/scripts/test_tpu_pod.py compares).
[[ "$accelerator" =~ ^([a-z0-9]+)-[1-9][0-9]*$ ]] && type=${BASH_REMATCH[1]} || type=unknown
case "$type" in
    v4) slice=v4 image=tpu-ubuntu2204-base ;;
    v5litepod) slice=v5e image=v2-alpha-tpuv5-lite ;;
    v5p) slice=v5p image=v2-alpha-tpuv5 ;;
    v6e) slice=v6e image=v2-alpha-tpuv6e ;;
    tpu7x) slice=tpu7x image=v2-alpha-tpu7-ubuntu2404 ;;
    *) fail "--accelerator=$accelerator is none of v4-N, v5litepod-N, v5p-N, v6e-N and tpu7x-N" ;;
esac
[[ "$slices" =~ ^[1-9][0-9]{0,3}$ ]] || fail "--slices=$slices is no number from 1 to 9999"
if [ "$slices" -eq 1 ]; then
    nodes=("$name") create+=("--node-id=$name") named=$accelerator
    target=${target:-$slice-${accelerator#*-}}
else
    nodes=() create+=("--node-count=$slices" "--node-prefix=$name") named="$slices of $accelerator"
    for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done
    target=${target:-${slices}x$slice-${accelerator#*-}}
fi
if [ -n "$nfs" ] && ! [[ "$nfs" =~ ^[A-Za-z0-9][A-Za-z0-9.-]*:/ ]]; then
    fail "--nfs=$nfs is no IP:/SHARE"
fi
if [ -n "$bucket" ] && ! [[ "$bucket" =~ ^gs://[a-z0-9][a-z0-9._-]*[a-z0-9]$ ]]; then
    fail "--bucket=$bucket is no gs://NAME"
fi
[[ "$run_dir" = /* ]] || fail "--run_dir=$run_dir is no folder that the hosts share, such as /mnt/share/runs/mine"
[ -z "$nfs" ] || [ -z "$bucket" ] || fail "--nfs and --bucket are both mounted at /mnt/share: choose one"
tpus=(gcloud compute tpus)

# on_hosts_of NODE COMMAND: run a line of shell on all hosts of a slice at once.
on_hosts_of() {
    [ -z "$dry_run" ] || echo "[every host of $1] $2"
    run "this host" "${tpus[@]}" tpu-vm ssh "$1" "${where[@]}" --worker=all "--command=$2"
}

# on_all_hosts COMMAND: run a line of shell on the hosts of all slices at once; in a dry run, print one after the other.
on_all_hosts() {
    local node others=() other code=0
    if [ -n "$dry_run" ]; then
        for node in "${nodes[@]}"; do on_hosts_of "$node" "$1"; done
        return
    fi
    for node in "${nodes[@]:1}"; do
        on_hosts_of "$node" "$1" &
        others+=($!)
    done
    on_hosts_of "${nodes[0]}" "$1" || code=$?
    for other in "${others[@]}"; do wait "$other" || code=$?; done
    return "$code"
}

# state: print gcloud's state of the queued resource, or NONE if gcloud reports that it does not exist. Fail on other errors.
errors=$(mktemp -t ringformer-XXXXXX)
archive=$(mktemp -t ringformer-XXXXXX.tar.gz)
trap 'rm -f "$archive" "$errors"' EXIT
state() {
    local said
    if said=$("${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>"$errors"); then
        case "$said" in
            ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING | CREATING | ACTIVE) echo "$said" ;;
            FAILED | SUSPENDED | SUSPENDING | DELETING)
                fail "the queued resource $name is $said: delete it (see --help), and run this again" ;;
            *) fail "gcloud says that $name is '$said', which this script does not know: nothing is created" ;;
        esac
    elif grep -q NOT_FOUND "$errors"; then
        echo NONE
    else
        echo "tpu_pod.sh: gcloud cannot say whether $name is there, so nothing is created: $(tr '\n' ' ' <"$errors")" >&2
        exit 3
    fi
}

# on_first_host COMMAND: print the command's output on the host of process 0, the first of the first slice.
on_first_host() {
    "${tpus[@]}" tpu-vm ssh "${nodes[0]}" "${where[@]}" --worker=0 "--command=$1"
}

# Files of a run on the hosts: process id, output and exit code.
# shellcheck disable=SC2016 # expanded there
running='test -s /tmp/ringformer.pid && grep -qs keep_running "/proc/$(cat /tmp/ringformer.pid)/cmdline"'
follow() {
    echo "what process 0 says; Ctrl-C ends this, not the run (--stop does)" >&2
    on_first_host "if $running; then tail -n 200 --pid=\$(cat /tmp/ringformer.pid) -F ringformer.log; else tail -n 200 ringformer.log; fi"
    local code
    code=$(on_first_host "cat ringformer.code")
    [[ "$code" =~ ^[0-9]+$ ]] || fail "the run's exit code on the first host is '$code'"
    echo "the run ended with exit code $code; the logs are in ringformer.log on every host" >&2
    exit "$code"
}
if [ -z "$dry_run" ] && [ -n "$only" ]; then
    now=$(state) || exit 2
    [ "$now" = ACTIVE ] || fail "there is no run: $name is $now"
    [ "$only" != stop ] || on_all_hosts "if $running; then kill -TERM \$(cat /tmp/ringformer.pid); else echo 'nothing runs here'; fi"
    follow
fi
[ -n "$skip_estimate" ] && [ -z "$dry_run" ] || require_ringformer estimate
# The hosts get HEAD, so there must be no uncommitted changes.
if [ -z "$dry_run" ]; then
    git rev-parse --git-dir >/dev/null 2>&1 || fail "$PWD is no git repository: the hosts get what is committed in one"
    changed=$(git status --porcelain -- ringformer configs scripts requirements setup.py pyproject.toml "$config" | head -n 5)
    [ -z "$changed" ] || fail "commit first, the hosts get what is committed; changed or new here:
$changed"
    git ls-files --error-unmatch -- "$config" >/dev/null 2>&1 || fail "$config is not committed: the hosts would not have it"
fi
# A finished checkpoint gets its name by a rename of its folder, which gcsfuse does at once in such buckets alone.
if [ -n "$bucket" ]; then
    describe=(gcloud storage buckets describe "$bucket" --raw '--format=value(hierarchicalNamespace.enabled)')
    if [ -n "$dry_run" ]; then
        run "this host" "${describe[@]}"
    else
        hierarchical=$("${describe[@]}") || fail "gcloud does not describe $bucket (above)"
        [[ "$hierarchical" =~ ^[Tt]rue$ ]] || fail "$bucket has no hierarchical namespace, so gcsfuse cannot rename folders \
there. Create another one: gcloud storage buckets create gs://NAME --location=REGION --uniform-bucket-level-access \
--enable-hierarchical-namespace"
    fi
fi
estimate_first
now=NONE
[ -n "$dry_run" ] || now=$(state) || exit 2
if [ "$now" = NONE ]; then
    run "this host" "${tpus[@]}" queued-resources create "$name" "${where[@]}" \
        "--accelerator-type=$accelerator" "--runtime-version=$image" "${create[@]}"
fi
unheard=0
while [ -z "$dry_run" ] && [ "$now" != ACTIVE ]; do
    echo "waiting for $name ($named in $zone): $now" >&2
    sleep 60
    code=0
    said=$(state) || code=$?
    case "$code" in
        0) now=$said unheard=0 ;;
        3) unheard=$((unheard + 1)) && [ "$unheard" -lt 5 ] || exit 2 ;;
        *) exit 2 ;;
    esac
done
for node in "${nodes[@]}"; do
    [ -z "$dry_run" ] || break
    under_way=$(on_hosts_of "$node" "if $running; then echo UNDER_WAY; else echo IDLE; fi")
    case "$under_way" in
        *UNDER_WAY*)
            echo "a run is under way on $node: it is not started again" >&2
            follow
            ;;
        *IDLE*) ;;
        *) fail "the hosts of $node do not say whether a run is under way: $under_way" ;;
    esac
done
# Slices of one queued resource have the number of slices, their own number and the address of the first host in their
# metadata (tpu-env: MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS), where JAX and the TPU's
# runtime read them. So no variable is set here. Without them each slice would train on its own.
metadata=http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env
[ "$slices" -eq 1 ] || on_all_hosts "curl -fsS -H 'Metadata-Flavor: Google' $metadata | \
grep -Eq \"^MEGASCALE_NUM_SLICES: *'?$slices'?\$\" || { echo \"\$(hostname) is not one of $slices slices: its tpu-env has no \
MEGASCALE_NUM_SLICES of $slices; delete $name and run this again (see --help)\" >&2; exit 1; }"

run "this host" git archive --format=tar.gz "--output=$archive" HEAD
for node in "${nodes[@]}"; do
    run "this host" "${tpus[@]}" tpu-vm scp "$archive" "$node:ringformer.tar.gz" "${where[@]}" --worker=all
done
[ -z "$nfs" ] || on_all_hosts "sudo apt-get install -y -q nfs-common && sudo mkdir -p /mnt/share && \
(mountpoint -q /mnt/share || sudo mount -t nfs $(printf %q "$nfs") /mnt/share)"
# What gcsfuse chooses for TPU hosts would break promises (docs/reliability.md, "A bucket as a file system").
gcsfuse="gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 --enable-streaming-writes=false \
--rename-dir-limit=0"
packages=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc
[ -z "$bucket" ] || on_all_hosts "(command -v gcsfuse >/dev/null || \
(curl -fsSL $packages/doc/apt-key.gpg | sudo tee $key >/dev/null && \
echo \"deb [signed-by=$key] $packages gcsfuse-\$(lsb_release -c -s) main\" | sudo tee /etc/apt/sources.list.d/gcsfuse.list && \
sudo apt-get update -q && sudo apt-get install -y -q gcsfuse)) && sudo mkdir -p /mnt/share && \
(! mountpoint -q /mnt/share || fusermount -u /mnt/share) && sudo chown \"\$(id -un)\" /mnt/share && \
$gcsfuse ${bucket#gs://} /mnt/share"
# The Python of the image is older than 3.11, which ringformer needs.
on_all_hosts "mkdir -p ringformer && tar -xzf ringformer.tar.gz -C ringformer && python3 -m pip install -q --user uv && \
(test -x ringformer/.venv/bin/python || python3 -m uv venv -q --python 3.12 ringformer/.venv) && \
python3 -m uv pip install -q --python ringformer/.venv/bin/python --require-hashes -r ringformer/requirements/train.txt && \
python3 -m uv pip install -q --python ringformer/.venv/bin/python -e './ringformer[train,tpu]'"
# No environment variables are needed: the trainer passes options to the compiler, and the hosts detect each other. In a
# separate session, the run is not stopped when ssh ends.
train=".venv/bin/python -m ringformer.cli train --distributed$(printf ' %q' "--config=$config" "${overrides[@]}" "${allow[@]}")"
kept="source scripts/launch_options.sh; run_dir=$(printf %q "$run_dir"); code=0; keep_running here $train || code=\$?; \
echo \$code >../ringformer.code"
on_all_hosts "cd ringformer && rm -f ../ringformer.code && \
{ setsid nohup bash -c $(printf %q "$kept") >../ringformer.log 2>&1 </dev/null & echo \$! >/tmp/ringformer.pid; }"
[ -n "$dry_run" ] || follow
