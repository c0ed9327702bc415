# The targets that CI and developers share. `make check` is all of them but bench; `make quick` is most of it.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install lint type imports test quick check contract-vllm033 bench reference site lock audit

install:
	bash launch/install.sh test

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

test: install
	$(BIN)/pytest -n auto --dist loadgroup

quick:
	bash launch/test.sh --quick

check: lint type imports test

# What of tests/vllm runs no model, on a release of vLLM that has no build for CPUs yet: its CUDA build,
# without a device. 9 GB.
contract-vllm033:
	bash launch/install.sh vllm033
	.venv-vllm033/bin/python -m pytest -o addopts=--import-mode=importlib tests/vllm

bench: install
	$(BIN)/python -m benchmarks.restore_ttft
	$(BIN)/python -m benchmarks.capacity
	$(BIN)/python -m benchmarks.overhead

# Writes the pages of docs/reference from the code; a test fails while they are stale.
reference: install
	$(BIN)/python -m docs.generators

# The documentation as pages to browse, in site/; links to nowhere are errors.
site: reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Lists what serving needs, with hashes, outside of the checkout, and on Linux vLLM's environment; and looks
# both up among known weaknesses.
LISTS := lock $(if $(filter Linux,$(shell uname -s)),lock-vllm)

lock:
	for list in $(LISTS); do bash launch/install.sh $$list || exit 1; done

audit: lock
	for list in $(LISTS:lock%=audit%); do bash launch/install.sh $$list || exit 1; done
