#!/usr/bin/env bash
# Serves a model on the CPUs of a Linux machine, with mlx_lm, or with vLLM if asked:
#
#   bash launch/cpu.sh MODEL [PORT] [more arguments of thermocline serve]
#   bash launch/cpu.sh MODEL --engine vllm
#
# Settings: launch/profiles/cpu.toml. docs/hardware.md explains them.
set -euo pipefail

# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

read_arguments "$@"
[ "$(uname -s)" = Linux ] || die "this script is for Linux; on a Mac: bash launch/apple.sh MODEL"
case " ${arguments[*]} " in
*" --engine vllm "* | *" --engine=vllm "*)
    [ -z "$(gpu_names)" ] || die "vLLM would use this machine's GPU: bash launch/cuda.sh MODEL"
    install_and_serve cpu serve vllm
    ;;
*) install_and_serve cpu serve ;;
esac
