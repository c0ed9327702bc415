# The targets that CI and developers share. `make check` is all of them but bench; `make quick` is most of it.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install lint type imports test quick check bench

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
	$(BIN)/pytest

quick:
	bash launch/test.sh --quick

check: lint type imports test

bench: install
	$(BIN)/python benchmarks/restore_ttft.py
	$(BIN)/python benchmarks/capacity.py
	$(BIN)/python benchmarks/overhead.py
