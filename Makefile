# Everything a person does often, as one word. `make setup` runs by itself when it is needed.

PYTHON ?= python3.11
TORCH_INDEX_ARGS ?=
CONFIG ?= examples/tiny_math/rlvr_config.yaml
BENCH_DIR ?= output/bench

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-compile

export RAY_USAGE_STATS_ENABLED = 0
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup demo demo-agentic test test-fast lint format bench docs plan clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## everything that is needed, in .venv

# PyTorch alone comes first, so that TORCH_INDEX_ARGS can choose its build; the lists after it are complete. Compiling comes
# last, on all cores: pip would do it on one. Some packages ship files that are no Python 3.11, which is not our concern.
$(READY): requirements/cpu.txt requirements/dev.txt setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11, or set PYTHON=PATH" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH_INDEX_ARGS) --constraint requirements/cpu.txt torch
	$(PIP) --no-deps --requirement requirements/cpu.txt --requirement requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: setup ## a small model gets better at math, in some minutes
	$(BIN)/python -m examples.tiny_math.demo --out output/demo

demo-agentic: setup ## a small model gets better at crossing frozen lakes, over many turns
	$(BIN)/python -m examples.tiny_frozen_lake.demo --out output/demo-agentic

test: lint test-fast ## lint, then every test
	$(BIN)/python -m pytest -m integration

test-fast: setup ## the tests that start no engine
	$(BIN)/python -m pytest -n 2 -m "not integration"

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## lay the code out as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## every benchmark, one table
	$(BIN)/python -m benchmarks --json-dir $(BENCH_DIR)

docs: setup ## the pages that are generated from the code
	$(BIN)/python -c 'from roll.trackers.metrics import markdown; print(markdown(), end="")' > docs/metrics.md
	$(BIN)/python -m roll.configs.reference

plan: setup ## what CONFIG would run where, without starting it
	$(BIN)/roll plan $(CONFIG)

clean: ## what runs and tools left, not .venv
	rm -rf output build dist roll.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
