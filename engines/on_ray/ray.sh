#!/usr/bin/env bash
# Serves a model with several replicas of vLLM on Ray Serve, on this machine, and a gateway before them:
#
#   bash engines/on_ray/ray.sh MODEL [PORT] [--replicas 2] [--hot BYTES] [--context N] [--redis URL]
#                                    [more arguments of thermocline serve]
#
# --hot and --context are limits of each replica. Sessions move from one replica to another by Redis;
# without it a session that has to move is computed again. docs/scale.md says how to use a cluster.
set -euo pipefail

folder=engines/on_ray # for what hardware.sh says
# shellcheck source=launch/hardware.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../launch/hardware.sh"

read_arguments "$@"
[ "$(uname -s)" = Linux ] || die "vLLM runs on Linux only; on a Mac: bash launch/apple.sh MODEL"
model=${arguments[1]}
replicas=2 of_replicas=() of_gateway=()
set -- "${arguments[@]:2}"
while [ $# -gt 0 ]; do
    case $1 in
    --replicas | --hot | --context | --redis)
        [ $# -gt 1 ] || wrong "$1 needs a value"
        case $1 in
        --replicas) replicas=$2 ;;
        --hot) of_replicas+=(--hot-bytes "$2") ;;
        --context) of_replicas+=(--max-context "$2") ;;
        --redis) of_replicas+=(--redis-url "$2") of_gateway+=(--redis "$2") ;;
        esac
        shift
        ;;
    *) of_gateway+=("$1") ;;
    esac
    shift
done
case $replicas in "" | *[!0-9]* | 0) wrong "--replicas $replicas is not a number" ;; esac

bash "$root/launch/install.sh" serve
bash "$root/launch/install.sh" ray
ray=$root/.venv-ray/bin/python
name=$(basename "$model")

# The secret that gateway and replicas share, in the gateway's data folder as ever.
secret=$("$venv/bin/python" - <<'END'
import os
from launch.machine.folders import folders
from launch.serve.secret import secret_path, server_secret

data = folders(os.environ.get("THERMOCLINE_DATA_DIR", ""), "", os.environ).data
server_secret(data)  # made, if there is none
print(secret_path(data))
END
)
list_port=$("$ray" -c 'from engines.on_ray.own_settings import free_port; print(free_port("127.0.0.1"))')

export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
"$ray" -m engines.on_ray "$model" --name "$name" --replicas "$replicas" --secret-file "$secret" \
    --port "$list_port" "${of_replicas[@]}" &
ray_process=$!
end() {
    kill -TERM "$ray_process" 2>/dev/null || true
    wait "$ray_process" || true
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

say_how_to_ask
export THERMOCLINE_ENGINE__REPLICA_LIST="http://127.0.0.1:$list_port/"
export THERMOCLINE_ENGINE__REPLICAS=$replicas THERMOCLINE_STORE__SECRET_FILE=$secret
"$venv/bin/thermocline" serve --served-model-name "$name" "${of_gateway[@]}" &
gateway=$!
# If one of them ends, the other is ended as well.
wait -n "$ray_process" "$gateway" || true
kill -TERM "$gateway" 2>/dev/null || true
wait "$gateway"
