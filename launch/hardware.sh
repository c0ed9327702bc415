# Functions for the scripts that serve on one kind of machine: gb10.sh, cuda.sh, cpu.sh, apple.sh.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}
script=$(basename "$0")

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

wrong() {
    say "error: $*"
    exit 2
}

usage() {
    say "usage: bash ${folder:-launch}/$script MODEL [PORT] [more arguments of thermocline serve]"
    say "  MODEL  a folder in Hugging Face's layout, or a hub id such as Qwen/Qwen3-8B"
    say "  PORT   where to listen, 1 to 65535; 0 = any free one; default 8080"
}

# read_arguments MODEL [PORT] [ARGUMENT...]: sets `arguments`, the arguments of `thermocline serve`.
read_arguments() {
    case ${1:-} in
    -h | --help) usage && exit 0 ;;
    "" | -*) usage && exit 2 ;;
    esac
    check_model "$1"
    arguments=(--model "$1")
    shift
    case ${1--} in
    -*) ;;
    *)
        check_port "$1"
        arguments+=(--port "$1")
        shift
        ;;
    esac
    arguments+=("$@")
}

# Checks the name before gigabytes are installed. `thermocline serve` checks the folder's content.
check_model() {
    [ -d "$1" ] && return 0
    case $1 in
    [!A-Za-z0-9]* | */*/* | *[!A-Za-z0-9._/-]*) ;;
    ?*/?*) return 0 ;;
    esac
    wrong "$1 is neither a folder nor a hub id such as Qwen/Qwen3-8B"
}

check_port() {
    case $1 in
    "" | *[!0-9]* | ??????*) ;;
    *) [ "$1" -gt 65535 ] || return 0 ;;
    esac
    wrong "$1 is not a port; give 1 to 65535, or 0 for any free one"
}

# Prints the names of the NVIDIA GPUs, one per line; nothing if there is no GPU or no driver.
# nvidia-smi writes errors to standard output, so its output counts only if its exit code is 0.
gpu_names() {
    local names
    names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || return 0
    case $names in
    "" | "No devices"*) ;;
    *) printf '%s\n' "$names" ;;
    esac
}

# Triton, which vLLM uses on a GPU, compiles the launchers of its kernels at their first use.
require_compiler() {
    [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null ||
        die "Triton needs a C compiler; on Debian, Ubuntu and DGX OS: sudo apt install build-essential"
}

# vLLM refuses to start with this allocator setting and any KV connector (vllm/config/vllm.py).
drop_expandable_segments() {
    local name
    for name in PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF; do
        case ${!name:-} in
        *expandable_segments*)
            say "$name=${!name} is not used: vLLM refuses expandable segments with a KV connector"
            unset "$name"
            ;;
        esac
    done
}

# The command is not on the PATH: it is in the environment's folder.
say_how_to_ask() {
    say "For the command thermocline (top, chat, sessions, connect ...), in another terminal:"
    say "    . $venv/bin/activate"
}

# install_and_serve PROFILE PURPOSE...: installs and becomes the server. Later arguments win over
# earlier ones, so a --profile of the user replaces ours.
install_and_serve() {
    local profile=${THERMOCLINE_PROFILE:-$1} purpose
    shift
    for purpose in "$@"; do
        bash "$root/launch/install.sh" "$purpose"
    done
    say_how_to_ask
    exec "$venv/bin/thermocline" serve --profile "$profile" "${arguments[@]}"
}
