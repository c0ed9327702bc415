# Sourced by the scripts for one kind of machine each: cpu.sh, cuda.sh, gb10.sh, apple.sh.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

has_nvidia() { nvidia-smi -L >/dev/null 2>&1; }

is_gb10() { nvidia-smi -L 2>/dev/null | grep -q GB10; }

# read_arguments MODEL [PORT] [OPTION...]: sets model, port and options.
read_arguments() {
    [ $# -gt 0 ] || die "usage: bash launch/$(basename "$0") MODEL [PORT] [options of thermocline serve]"
    model=$1 port=8080
    shift
    case ${1:-} in
    [0-9]*)
        port=$1
        shift
        ;;
    esac
    options=("$@")
}

# serve OPTION...: with what read_arguments found. Takes this shell's place.
serve() {
    exec "$venv/bin/thermocline" serve --model "$model" --port "$port" "$@" ${options[@]+"${options[@]}"}
}
