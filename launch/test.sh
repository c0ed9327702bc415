#!/usr/bin/env bash
# Installs what is missing and runs every check. Arguments go to pytest:
#
#   bash launch/test.sh -m "not slow"
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}

bash "$root/launch/install.sh" test
export PATH="$venv/bin:$PATH"
cd "$root"

ruff check .
ruff format --check .
mypy
lint-imports
exec pytest "$@"
