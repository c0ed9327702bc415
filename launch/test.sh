#!/usr/bin/env bash
# Installs what is missing and runs every check. Arguments are passed to pytest in the gateway's
# environment; after --vllm they are passed to pytest in vLLM's environment:
#
#   bash launch/test.sh                           all that CI runs
#   bash launch/test.sh --thorough                before a release, hours: more model families, ranks and
#                                                 kernels' shapes, soaks, ten times the examples of properties
#   bash launch/test.sh --quick                   while you work: two to three minutes
#   bash launch/test.sh --quick -k budget         some of that
#   bash launch/test.sh -m "not slow"             some of everything, without vLLM
#   bash launch/test.sh --vllm -k restore         some of the tests with a real vLLM
#
# --quick runs the tests of tests/architecture, unit, contract and the store's part of faults that are
# not marked slow, then lint, types and import rules. It starts no whole engines and servers.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}
cd "$root"
# vLLM imports thousands of modules in each of three processes: without bytecode that is slow.
unset PYTHONDONTWRITEBYTECODE

in_vllms_environment() {
    .venv-vllm/bin/python -m pytest -o addopts=--import-mode=importlib --timeout 900 "$@"
}

# Runs nothing if the environment is not installed (bash launch/install.sh ray).
run_ray_tests() {
    [ ! -x .venv-ray/bin/python ] ||
        .venv-ray/bin/python -m pytest -o addopts=--import-mode=importlib --timeout 900 \
            -o testpaths=tests/ray
}

run_vllm_tests() {
    bash launch/install.sh vllm
    # They need the sample model, which the gateway's environment makes.
    SAMPLE_MODEL=$("$venv/bin/python" -m launch.model)
    export SAMPLE_MODEL
    if [ $# -gt 0 ]; then
        in_vllms_environment -o testpaths=tests/vllm "$@"
        return
    fi
    # In a separate process: Triton's interpreter is chosen when triton is imported.
    triton_log=$(mktemp)
    OMP_NUM_THREADS=1 in_vllms_environment tests/triton >"$triton_log" 2>&1 &
    in_vllms_environment -o testpaths=tests/vllm -n 2 --dist loadgroup
    triton_status=0
    wait $! || triton_status=$?
    cat "$triton_log"
    rm "$triton_log"
    return "$triton_status"
}

# All tests of a file run in one process, since its fixtures start engines and servers (tests/conftest.py).
# Files run in the order of collection, which has the slow ones first.
side_by_side() {
    pytest -n auto --dist loadgroup --no-loadscope-reorder "$@"
}

quick_tests="tests/architecture tests/unit tests/contract
    tests/faults/test_cold_store.py tests/faults/test_disk_tier.py"

# Prints the files that contain a word of the expression after -k. To collect only these takes seconds, to
# collect all half a minute. Fails if the expression has more than words and "or".
files_with() {
    case " $1 " in *" and "* | *" not "* | *"("*) return 1 ;; esac
    # shellcheck disable=SC2086
    grep -rliE --include="test_*.py" -e "${1// or /|}" $quick_tests
}

# Finds calls that do not exist on macOS. Without the types of other packages this takes a quarter of the
# time; errors that need these types are disabled here and found by the other run.
find_calls_that_macs_lack() {
    mypy --config-file= --platform darwin --cache-dir .mypy_cache/darwin \
        --follow-imports skip --ignore-missing-imports \
        --disable-error-code var-annotated --disable-error-code import-untyped \
        --disable-error-code operator --disable-error-code arg-type --disable-error-code has-type \
        -p thermocline -p gateway -p engines -p kvstore -p scheduler -p launch -p benchmarks
}

run_static_checks() {
    ruff check .
    ruff format --check .
    lint-imports
    find_calls_that_macs_lack &
    mypy
    wait $!
}

bash launch/install.sh test
if [ "${1:-}" = --vllm ]; then
    shift
    run_vllm_tests "$@"
    exit
fi

export PATH="$venv/bin:$PATH"
trap wait EXIT # a failed check leaves no installation running
if [ "${1:-}" = --thorough ]; then
    shift
    export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --thorough"
fi
if [ "${1:-}" = --quick ]; then
    shift
    if [ "${1:-}" = -k ] && files=$(files_with "${2:-}"); then
        # shellcheck disable=SC2086  # names without spaces, one a word
        pytest -m "not slow" $files "$@"
    else
        # shellcheck disable=SC2086
        side_by_side -m "not slow" $quick_tests "$@"
    fi
    run_static_checks
    exit
fi
if [ $# -gt 0 ] || [ "$(uname -s)" != Linux ]; then
    run_static_checks
    exec pytest "$@"
fi
bash launch/install.sh vllm & # before pytest: one test starts gateway and vLLM together
installation=$!
run_static_checks
wait $installation
side_by_side
run_vllm_tests
run_ray_tests
