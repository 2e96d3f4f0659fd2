# SPDX-License-Identifier: Apache-2.0
#
# `make quickstart` and `make test` are all that is needed on a fresh machine with Python >= 3.12: both make the
# virtual environment and install what they need. VENV=... uses another environment, PYTHON=... another interpreter.

VENV ?= .venv
OUT ?= quickstart_out
BIN := $(VENV)/bin
# Test processes side by side; 0 runs the tests in pytest itself, as --pdb needs it.
WORKERS ?= 2
# Format of the dumps of the functional tests: 2, 3, or mixed, where each dump has its own.
FORMAT ?= mixed
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Several processes share few cores here; more threads than cores make an iteration many times slower.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test env env-dev lint format types spell unit unit-all functional clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: env  ## dump a teacher, distil a student, draw the comparison (into OUT, default quickstart_out)
	$(BIN)/python -m examples.offline_distillation.quickstart --out $(OUT) $(ARGS)

test: lint types spell unit-all functional  ## every check, in this order

env:  ## the virtual environment with what the quickstart needs
	@tools/setup_venv.sh $(VENV) quickstart

env-dev:  ## the same with the tools for development
	@tools/setup_venv.sh $(VENV) quickstart dev

lint: env-dev  ## lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: env-dev  ## reformat and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: env-dev  ## type check
	$(BIN)/mypy

spell: env-dev  ## spelling of code and prose
	$(BIN)/codespell

unit: env-dev  ## unit tests without the slow ones
	$(PYTEST) tests/unit_tests -m "not slow" $(ARGS)

unit-all: env-dev  ## all unit tests
	$(PYTEST) tests/unit_tests $(ARGS)

functional: env-dev  ## real training runs through torchrun, on the CPU
	$(PYTEST) tests/functional_tests --logits-save-format $(FORMAT) $(ARGS)

clean:  ## remove caches and the quickstart's output; the environment stays
	rm -rf $(OUT) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
