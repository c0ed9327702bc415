#!/usr/bin/env bash
# Serves a model with vLLM on a GB10 (DGX Spark), whose GPU shares the machine's memory:
#
#   bash launch/gb10.sh MODEL [PORT] [options of thermocline serve]
#
# The settings are launch/profiles/gb10.toml; docs/hardware.md says why. A machine of this kind that
# runs out of memory freezes instead of ending a process, so this script watches, and stops the
# server in good order before that.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

warn_below_gib=8
stop_below_gib=4
look_every_s=2

available_gib() { awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo; }
page_cache_gib() { awk '/^Cached:/ { print int($2 / 1048576) }' /proc/meminfo; }

# watch_memory PID: until that process ends. Two looks in a row count, not one.
watch_memory() {
    local low=0 warned=0 gib
    while sleep "$look_every_s" && kill -0 "$1" 2>/dev/null; do
        gib=$(available_gib)
        if [ "$gib" -ge "$warn_below_gib" ]; then
            low=0 warned=0
            continue
        fi
        [ "$warned" = 1 ] || say "warning: $gib GiB of memory left; lower --hot or --ram"
        warned=1
        [ "$gib" -lt "$stop_below_gib" ] && low=$((low + 1)) || low=0
        if [ "$low" -ge 2 ]; then
            say "error: $gib GiB of memory left; stopping before the machine freezes"
            kill -TERM "$1"
            return
        fi
    done
}

main() {
    read_arguments "$@"
    is_gb10 || die "nvidia-smi finds no GB10; for other NVIDIA GPUs: bash launch/cuda.sh MODEL"
    bash "$root/launch/install.sh" serve
    bash "$root/launch/install.sh" vllm

    # vLLM refuses this allocator setting together with any KV connector.
    case ${PYTORCH_CUDA_ALLOC_CONF:-} in *expandable_segments:True*) unset PYTORCH_CUDA_ALLOC_CONF ;; esac
    if [ "$(page_cache_gib)" -ge 8 ]; then
        say "The page cache holds $(page_cache_gib) GiB, which vLLM counts as used. If it does not start:"
        say "  sync && echo 1 | sudo tee /proc/sys/vm/drop_caches"
    fi

    serve --profile gb10 &
    local server=$!
    trap 'kill -TERM "$server" 2>/dev/null || true' INT TERM
    watch_memory "$server" &
    local watcher=$! code=0
    wait "$server" || code=$?
    # A signal ends the wait before the server has ended.
    while kill -0 "$server" 2>/dev/null; do wait "$server" || code=$?; done
    kill "$watcher" 2>/dev/null || true
    exit "$code"
}

# The test of the watch sources this file.
[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@"
