# shellcheck shell=bash
# Options of the launch scripts, and functions that print or run their commands. The launch scripts source this file.
# shellcheck source=scripts/option_values.sh
source "$(dirname "${BASH_SOURCE[0]}")/option_values.sh"
# shellcheck disable=SC2034  # used in their usage texts
COMMON_OPTIONS="  --config=FILE       the config (configs/)
  --init_from=DIR     start with the parameters of this run or converted model
  --store=DIR         the token store
  --tokenizer=FILE    the tokenizer of the store
  --run_dir=DIR       the folder of the run; the same command resumes the run
  --stage=N           train only this stage of a config with stages (1 is the first)
  --config.KEY=VALUE  override any other key of the config
  --allow=KEY,...     keys that may have changed since the run started
  --skip-estimate     start without an estimate of whether every stage fits
  --dry-run           print the commands that each host would execute, and execute nothing

  In a clone, the scripts use the ringformer of the clone's .venv (scripts/setup_venv.sh makes it). Scripts from
  \`ringformer configs copy\` use that of the active environment. RINGFORMER_PYTHON=/path/to/python selects another."

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -f "$repository/setup.py" ]; then # in a clone, even if another environment is active
    python=$repository/.venv/bin/python
else # in an installed package, or copied from it
    python=python
fi
# The command `ringformer`.
ringformer=("${RINGFORMER_PYTHON:-$python}" -m ringformer.cli)

# parse_options OPTION...: set config, target, run_dir, dry_run and skip_estimate, and the arrays overrides (for train and
# estimate), allow (for train) and own (options that the script itself handles).
parse_options() {
    config="" target="" run_dir="" dry_run="" skip_estimate="" overrides=() allow=() own=()
    join_values "$(usage)" "$@"
    for option in "${joined[@]}"; do
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
    [[ ! "$target" =~ ^([1-9][0-9]*)x([1-9][0-9]*)x([A-Za-z].*)$ ]] || fail "--target=$target: a launch names all GPUs \
together, --target=$((BASH_REMATCH[1] * BASH_REMATCH[2]))x${BASH_REMATCH[3]}; for its groups, begin mesh_dim with \
${BASH_REMATCH[1]}"
    overrides+=("--config.run_dir=$run_dir")
}

# unknown_option OPTION: fail, and name the option that may have been meant.
unknown_option() {
    local nearest
    nearest=$(nearest_option "$(usage)" "$1")
    fail "unknown option $1; ${nearest:+did you mean $nearest? }--help lists all"
}

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# slurm_number DEFAULT VARIABLE...: print the number that these variables of SLURM have, or the default if none is set.
# Fail if one is not a number or two differ. The number of a typed resource comes last: a100:4.
slurm_number() {
    local number="" first="" name value
    for name in "${@:2}"; do
        [ -n "${!name:-}" ] || continue
        value=${!name##*:}
        [[ "$value" =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is no number from 1"
        [ "${number:-$value}" -eq "$value" ] || fail "$first=${!first} and $name=${!name} contradict each other"
        number=$value first=$name
    done
    echo "${number:-$1}"
}

# run WHERE COMMAND...: execute the command; in a dry run, print it with the place where it would run.
run() {
    local where=$1
    shift
    if [ -n "$dry_run" ]; then
        printf '[%s]' "$where" && printf ' %q' "$@" && echo
    else
        "$@"
    fi
}

# keep_running WHERE COMMAND...: run the command and pass signals on to it. Run it again after exit code 75, unless this
# script was signalled (never with AGAIN_ON_STOP=). Run it again after a process stalled or died (76, or a signal), at most
# RESTARTS times in a row without a new checkpoint in RUN_DIR. Returns the last exit code of the command.
RESTARTS=3
AGAIN_ON_STOP=1
keep_running() {
    [ -z "${dry_run:-}" ] || { run "$@" && return; }
    shift
    local code child signalled="" interrupted lost=0 before after
    before=$(newest_checkpoint)
    while :; do
        set -m # a separate process group, so that Ctrl-C reaches the command only through this script, once
        "$@" &
        child=$!
        set +m
        # shellcheck disable=SC2064 # expand the child's id now
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

# require_ringformer EXTRA: fail if no Python has ringformer, and say how to install it. A dry run needs none: it sets
# can_check if it has one, and else says that the config is not checked.
can_check=""
require_ringformer() {
    if [ -n "$dry_run" ]; then
        "${ringformer[0]}" -c 'import ringformer.cli; from importlib.util import find_spec as f; exit(not (f("jax") and f("flax")))' 2>/dev/null && can_check=1 ||
            echo "$(basename "$0"): ${ringformer[0]} has no ringformer with its extra train, so this dry run does not check" \
                "the config against the devices" >&2
        return 0
    fi
    local cure="RINGFORMER_PYTHON=/path/to/python names that of another environment"
    if [ -f "$repository/setup.py" ]; then
        cure="make it: bash $(printf %q "$repository")/scripts/setup_venv.sh $1 (or $cure)"
    else
        cure="activate the environment that ringformer is installed in, with its extras train and $1 (or $cure)"
    fi
    command -v "${ringformer[0]}" >/dev/null || fail "there is no ${ringformer[0]}; $cure"
    "${ringformer[0]}" -c 'import ringformer.cli' || fail "${ringformer[0]} has no ringformer; $cure"
}

# check_devices COUNT: in a dry run, fail if the config cannot train on this many devices; the run itself checks that, too.
check_devices() {
    [ -n "$can_check" ] || return 0
    "${ringformer[@]}" train "--config=$config" "${overrides[@]}" "--check_devices=$1" || exit 2
}

# estimate_first: compile every stage before hardware is reserved any longer, and fail if one does not fit. Adds the
# variables that the estimate recommends to the array environment, as NAME=VALUE. With --skip-estimate or in a dry run,
# the variables come from closed forms, if ringformer is installed. A dry run fails if the closed forms refuse the config,
# as the estimate would.
environment=()
estimate_first() {
    local command=("${ringformer[@]}" estimate "--config=$config" "--target=$target" "${overrides[@]}")
    local said needed verdict=0
    if [ -n "$dry_run" ]; then
        if [ -n "$target" ] && [ -n "$can_check" ]; then
            said=$("${command[@]}" --closed_form 2>&1) || verdict=$?
            # A run without an estimate may have GPUs that none knows; other targets name what can be reserved.
            [ "$verdict" -eq 0 ] || [[ -n "$skip_estimate" && "$target" = [0-9]* ]] || fail "$(tail -n 1 <<<"$said")"
        fi
        [ -n "$skip_estimate" ] || run "this host" "${command[@]}" --require_fit --quick
    elif [ -n "$skip_estimate" ]; then
        [ -n "$target" ] || return 0
        said=$("${command[@]}" --closed_form 2>/dev/null) || return 0 # the run itself reports errors
    else
        said=$("${command[@]}" --require_fit --quick) || verdict=$?
        printf '%s\n' "$said"
        [ "$verdict" -eq 0 ] ||
            fail "not every stage fits $target, or the estimate failed (above); --skip-estimate trains all the same"
    fi
    read -r -a needed <<<"$(sed -n 's/^environment: //p' <<<"${said:-}")" || true
    local variable
    for variable in "${needed[@]}"; do
        [[ " ${environment[*]} " = *" $variable "* ]] || environment+=("$variable")
    done
}
