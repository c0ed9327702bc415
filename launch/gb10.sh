#!/usr/bin/env bash
# Serves a model with vLLM on a GB10 (DGX Spark and its like), whose GPU shares the CPU's memory:
#
#   bash launch/gb10.sh MODEL [PORT] [more arguments of thermocline serve]
#
# Settings: launch/profiles/gb10.toml. docs/hardware.md explains them; read it before you change
# sizes, since such a machine hangs when its memory is used up.
set -euo pipefail

# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

cache_worth_dropping_gib=8

# Only gives advice: dropping the cache needs root, and makes all other files slow to read.
advise_on_page_cache() {
    local gib
    gib=$(awk '/^Cached:/ { print int($2 / 1048576) }' "${1:-/proc/meminfo}" 2>/dev/null || true)
    [ "${gib:-0}" -ge "$cache_worth_dropping_gib" ] || return 0
    say "The page cache holds $gib GiB. The kernel gives them back when asked, but allocations of the"
    say "GPU's driver have failed before it did. Before a large model is loaded, drop them:"
    say "    sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"
}

main() {
    read_arguments "$@"
    local names
    names=$(gpu_names)
    [ -n "$names" ] || die "nvidia-smi finds no GPU here; without one: bash launch/cpu.sh MODEL"
    case $names in
    *GB10*) ;;
    *) say "warning: the GPU is ${names%%$'\n'*}, no GB10; if it has memory of its own," \
        "bash launch/cuda.sh fits better" ;;
    esac
    require_compiler
    drop_expandable_segments
    advise_on_page_cache
    install_and_serve gb10 serve vllm
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@" # tests source this file
