#!/usr/bin/env bash
# Serves a model with vLLM on the CPU of a Linux machine:
#
#   bash launch/cpu.sh MODEL [PORT] [options of thermocline serve]
#
# The settings are launch/profiles/cpu.toml; docs/hardware.md says why. mlx_lm, the other engine that
# runs on CPUs, is smaller to install and several times slower: bash launch/serve.sh --model MODEL
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"
read_arguments "$@"
bash "$root/launch/install.sh" serve
bash "$root/launch/install.sh" vllm
serve --profile cpu --engine vllm
