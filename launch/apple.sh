#!/usr/bin/env bash
# Serves a model with mlx_lm on a Mac with Apple silicon:
#
#   bash launch/apple.sh MODEL [PORT] [more arguments of thermocline serve]
#
# Settings: launch/profiles/apple.toml. docs/hardware.md explains them, and when to raise the GPU's
# memory limit.
set -euo pipefail

# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

read_arguments "$@"
case "$(uname -s) $(uname -m)" in
"Darwin arm64") ;;
"Darwin x86_64") die "mlx needs Apple silicon, and a terminal that does not run under Rosetta" ;;
*) die "this is no Mac; on Linux: bash launch/cpu.sh MODEL, or cuda.sh, or gb10.sh" ;;
esac
say "Metal lets the GPU hold about three quarters of the memory. For a model that needs more:"
say "    sudo sysctl iogpu.wired_limit_mb=MEGABYTES    (until the next restart; leave macOS 8 GB)"
install_and_serve apple serve
