#!/usr/bin/env bash
# Serves a model with mlx_lm on a Mac with Apple silicon:
#
#   bash launch/apple.sh MODEL [PORT] [options of thermocline serve]
#
# The settings are launch/profiles/apple.toml; docs/hardware.md says why.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"
read_arguments "$@"
[ "$(uname -s) $(uname -m)" = "Darwin arm64" ] || die "mlx's GPU engine needs Apple silicon"
bash "$root/launch/install.sh" serve
serve --profile apple --engine mlx
