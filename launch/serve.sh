#!/usr/bin/env bash
# Installs what is missing and serves the sample model on http://127.0.0.1:8080.
# Arguments go to `thermocline serve`:
#
#   bash launch/serve.sh --model /path/to/model --hot 8GiB
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}

bash "$root/launch/install.sh" serve

case "$(uname -s) $(uname -m)" in
"Darwin arm64") profile=apple ;;
Darwin*)
    printf 'error: mlx needs Apple silicon; this Mac has an Intel processor\n' >&2
    exit 1
    ;;
*)
    profile=cpu
    if nvidia-smi -L >/dev/null 2>&1; then
        if [ ! -x "$root/.venv-vllm/bin/python" ]; then
            printf 'There is an NVIDIA GPU; to use it: bash launch/cuda.sh MODEL (or gb10.sh)\n' >&2
        elif nvidia-smi -L | grep -q GB10; then
            profile=gb10
        else
            profile=cuda
        fi
    fi
    ;;
esac

exec "$venv/bin/thermocline" serve --profile "${THERMOCLINE_PROFILE:-$profile}" "$@"
