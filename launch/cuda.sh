#!/usr/bin/env bash
# Serves a model with vLLM on NVIDIA GPUs that have memory of their own:
#
#   bash launch/cuda.sh MODEL [PORT] [options of thermocline serve]
#   bash launch/cuda.sh Qwen/Qwen3-8B 8080 --set engine.vllm.tensor_parallel=2
#
# The settings are launch/profiles/cuda.toml; docs/hardware.md says why.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"
read_arguments "$@"
has_nvidia || die "nvidia-smi finds no GPU; on a machine without one: bash launch/cpu.sh MODEL"
is_gb10 && die "this GPU shares the machine's memory: bash launch/gb10.sh MODEL"
bash "$root/launch/install.sh" serve
bash "$root/launch/install.sh" vllm

# vLLM refuses this allocator setting together with any KV connector.
case ${PYTORCH_CUDA_ALLOC_CONF:-} in *expandable_segments:True*) unset PYTORCH_CUDA_ALLOC_CONF ;; esac
serve --profile cuda
