# shellcheck shell=bash
# What the launch scripts share: their options, and how they print or run a command. Sourced by them.
# shellcheck disable=SC2034  # in their usage
COMMON_OPTIONS="  --config=FILE       the config (configs/)
  --init_from=DIR     begin with the parameters of this run or converted model
  --store=DIR         the token store
  --tokenizer=FILE    its tokenizer
  --run_dir=DIR       what the run writes; the same command again resumes it
  --stage=N           of a config with stages, this one alone (1 is the first)
  --config.KEY=VALUE  any other key of the config
  --allow=KEY,...     keys that may have changed since the run was begun
  --skip-estimate     do not ask the compiler first whether every stage fits
  --dry-run           print what each host would execute, and execute nothing

  In a clone ringformer is that of its .venv (scripts/setup_venv.sh makes it), of a script from \`ringformer configs
  copy\` that of the active environment; RINGFORMER_PYTHON=/path/to/python names another."

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -f "$repository/setup.py" ]; then # a clone, whether an environment is active or not
    python=$repository/.venv/bin/python
else # inside a wheel, or copied from there
    python=python
fi
# The command `ringformer`.
ringformer=("${RINGFORMER_PYTHON:-$python}" -m ringformer.cli)

# Sets config, target, run_dir, dry_run, skip_estimate and the arrays overrides (for train and estimate), allow (for
# train) and own (what is left for the script).
parse_options() {
    config="" target="" run_dir="" dry_run="" skip_estimate="" overrides=() allow=() own=()
    for option in "$@"; do
        case "$option" in
            --config=*) config=${option#*=} ;;
            --target=*) target=${option#*=} ;;
            --init_from=*) overrides+=("--config.init_from=${option#*=}") ;;
            --store=*) overrides+=("--config.data.store=${option#*=}") ;;
            --tokenizer=*) overrides+=("--config.data.tokenizer=${option#*=}") ;;
            --run_dir=*) run_dir=${option#*=} ;;
            --stage=*)
                [[ "${option#*=}" =~ ^[1-9][0-9]*$ ]] || fail "$option: a stage is a number, 1 is the first"
                overrides+=("$option")
                ;;
            --allow=*) allow+=("$option") ;;
            --config.*=*) overrides+=("$option") ;;
            --skip-estimate) skip_estimate=1 ;;
            --dry-run) dry_run=1 ;;
            -h | --help) usage && exit 0 ;;
            *) own+=("$option") ;;
        esac
    done
    [ -n "$config" ] || fail "which config? --config=configs/NAME.py"
    [ -f "$config" ] || fail "there is no config file $config"
    [ -n "$run_dir" ] || fail "where to? --run_dir=DIR, which all hosts must share"
    overrides+=("--config.run_dir=$run_dir")
}

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# run WHERE COMMAND...: execute it, or say where it would be.
run() {
    local where=$1
    shift
    if [ -n "$dry_run" ]; then
        printf '[%s]' "$where" && printf ' %q' "$@" && echo
    else
        "$@"
    fi
}

# keep_running WHERE COMMAND...: run it and pass signals on to it; run it again when it was stopped (75) though nobody
# signalled this script, and when a process of it stalled or died (76, or by a signal), of this at most RESTARTS times in
# a row without a new checkpoint in RUN_DIR. Returns its last exit code. With AGAIN_ON_STOP= it is not run again after 75.
RESTARTS=3
AGAIN_ON_STOP=1
keep_running() {
    [ -z "${dry_run:-}" ] || { run "$@" && return; }
    shift
    local code child signalled="" interrupted lost=0 before after
    before=$(newest_checkpoint)
    while :; do
        set -m # a group of its own: a terminal's Ctrl-C reaches it through us, once
        "$@" &
        child=$!
        set +m
        # shellcheck disable=SC2064 # this child
        for name in TERM USR1 INT; do trap "signalled=1 interrupted=1; kill -$name $child 2>/dev/null || true" "$name"; done
        interrupted=1
        while [ -n "$interrupted" ]; do
            interrupted="" code=0
            wait "$child" || code=$?
        done
        trap - TERM USR1 INT
        after=$(newest_checkpoint)
        [ "$after" = "$before" ] || lost=0
        before=$after
        [ -z "$signalled" ] || return "$code"
        case "$code" in
            75) [ -n "$AGAIN_ON_STOP" ] || return "$code" ;;
            76 | 134 | 135 | 137 | 139) lost=$((lost + 1)) ;;
            *) return "$code" ;;
        esac
        if [ "$lost" -gt "$RESTARTS" ]; then
            echo "$(basename "$0"): exit code $code, $lost times without a new checkpoint: not started again" >&2
            return "$code"
        fi
        echo "$(basename "$0"): exit code $code: the same command again" >&2
        sleep 1
    done
}

newest_checkpoint() {
    find "$run_dir" -maxdepth 3 -path '*/checkpoints/[0-9]*' -prune -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 || true
}

# require_ringformer EXTRA: fail, with what makes it, if there is no Python with ringformer. A dry run needs none.
require_ringformer() {
    [ -z "$dry_run" ] || return 0
    local cure="RINGFORMER_PYTHON=/path/to/python names that of another environment"
    if [ -f "$repository/setup.py" ]; then
        cure="make it: bash $(printf %q "$repository")/scripts/setup_venv.sh $1 (or $cure)"
    else
        cure="activate the environment that ringformer is installed in, with its extras train and $1 (or $cure)"
    fi
    command -v "${ringformer[0]}" >/dev/null || fail "there is no ${ringformer[0]}; $cure"
    "${ringformer[0]}" -c 'import ringformer.cli' || fail "${ringformer[0]} has no ringformer; $cure"
}

# The compiler's word on every stage before anything is rented or reserved any longer. Adds what the estimate says that
# the run's environment needs to the array environment, as NAME=VALUE. Without an estimate, and in a dry run where
# ringformer is at hand, it is what can be counted.
environment=()
estimate_first() {
    local command=("${ringformer[@]}" estimate "--config=$config" "--target=$target" "${overrides[@]}")
    local said needed verdict=0
    [ -z "$dry_run" ] || [ -n "$skip_estimate" ] || run "this host" "${command[@]}" --require_fit --quick
    if [ -n "$dry_run" ] || [ -n "$skip_estimate" ]; then
        [ -n "$target" ] && "${ringformer[@]}" --help >/dev/null 2>&1 || return 0
        said=$("${command[@]}" --closed_form 2>/dev/null) || return 0 # what is wrong with it the run will say
    else
        said=$("${command[@]}" --require_fit --quick) || verdict=$?
        printf '%s\n' "$said"
        [ "$verdict" -eq 0 ] ||
            fail "not every stage fits $target, or the estimate failed (above); --skip-estimate trains all the same"
    fi
    read -r -a needed <<<"$(sed -n 's/^environment: //p' <<<"$said")" || true
    environment+=("${needed[@]}")
}
