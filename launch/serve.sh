#!/usr/bin/env bash
# Installs what is missing and serves the sample model on http://127.0.0.1:8080.
# Arguments go to `thermocline serve`:
#
#   bash launch/serve.sh --model /path/to/model --hot 8GiB
set -euo pipefail

# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/hardware.sh"

profile=cpu
case "$(uname -s) $(uname -m)" in
"Darwin arm64") profile=apple ;;
Darwin*) die "mlx needs Apple silicon; this Mac has an Intel processor" ;;
*)
    case $(gpu_names) in
    "") ;;
    *GB10*) profile=gb10 ;;
    *) profile=cuda ;;
    esac
    if [ "$profile" != cpu ] && [ ! -x "$root/.venv-vllm/bin/python" ]; then
        say "There is an NVIDIA GPU; to use it: bash launch/$profile.sh MODEL"
        profile=cpu
    fi
    [ "$profile" = cpu ] || drop_expandable_segments
    ;;
esac

bash "$root/launch/install.sh" serve
say_how_to_ask
exec "$venv/bin/thermocline" serve --profile "${THERMOCLINE_PROFILE:-$profile}" "$@"
