# shellcheck shell=bash
# Options of scripts, as they may be typed: with their value after a space or an equals sign. Scripts source this file.

# join_values TEXT WORD...: set the array joined to the words, with `--NAME VALUE` written as `--NAME=VALUE`. An option
# takes a value if TEXT, which describes the options, has `--NAME=`; keys of a config always do. The next word is its value,
# unless that is an option too. Fails if there is no value.
# shellcheck disable=SC2034 # the caller reads joined
join_values() {
    local text=$1 word
    joined=()
    shift
    while [ $# -gt 0 ]; do
        word=$1
        shift
        if [[ "$word" =~ ^--config\.[^=]+$ || ("$word" = --* && "$word" != *=* && "$text" = *"$word="*) ]]; then
            if [ $# -eq 0 ] || [[ "$1" =~ ^--?[A-Za-z] ]]; then
                echo "$(basename "$0"): $word needs a value; one that begins with a dash follows an equals sign:" \
                    "$word=${1:-VALUE}" >&2
                exit 2
            fi
            word+="=$1"
            shift
        fi
        joined+=("$word")
    done
}

# nearest_option TEXT WORD: print the option of TEXT that begins most like the word, by at least four letters, or nothing.
# Dashes and underscores count as equal.
nearest_option() {
    local typed=${2%%=*} option length nearest="" longest=3
    typed=${typed#--} typed=${typed//-/_}
    while read -r option; do
        length=${#typed}
        while [[ "$(tr - _ <<<"${option#--}")" != "${typed:0:length}"* ]]; do length=$((length - 1)); done
        [ "$length" -le "$longest" ] || nearest=$option longest=$length
    done < <(grep -oE -- '--[a-z][a-z_-]+' <<<"$1")
    echo "$nearest"
}
