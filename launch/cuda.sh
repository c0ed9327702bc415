#!/usr/bin/env bash
# Serves a model with vLLM on NVIDIA GPUs that have memory of their own:
#
#   bash launch/cuda.sh MODEL [PORT] [more arguments of thermocline serve]
#   bash launch/cuda.sh Qwen/Qwen3-32B 8080 --set engine.vllm.tensor_parallel=2
#
# Settings: launch/profiles/cuda.toml. docs/hardware.md explains them.
set -euo pipefail

# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

read_arguments "$@"
case $(gpu_names) in
"") die "nvidia-smi finds no NVIDIA GPU here; without one: bash launch/cpu.sh MODEL" ;;
*GB10*) die "this GPU shares the CPU's memory; its settings are in: bash launch/gb10.sh MODEL" ;;
esac
require_compiler
drop_expandable_segments
install_and_serve cuda serve vllm
