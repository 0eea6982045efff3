# One target for each common task. `make setup` runs automatically when it is needed.

PYTHON ?= python3.11
TORCH_INDEX_ARGS ?=
CONFIG ?= examples/tiny_math/rlvr_config.yaml
SEED ?= 42
BENCH_DIR ?= output/bench
RECIPES ?= $(filter-out examples/algorithms/%,$(wildcard examples/*/*.yaml)) examples/algorithms/ppo_critic.yaml tests/data/recipes/*_async.yaml

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-compile

export RAY_USAGE_STATS_ENABLED = 0
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-real demo-agentic test test-fast lint format bench docs site plan rehearse clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## install everything into .venv

# PyTorch is installed first, so that TORCH_INDEX_ARGS can choose its build, and with the libraries that this build needs. The
# requirement files are complete; triton there is another version than the one of PyTorch's build for CUDA.
# Byte-compilation runs last, on all cores (pip would use one); files of packages that are not valid Python 3.11 are skipped.
# An earlier installation named roll is removed: SGLang would load the plug-ins of both.
$(READY): requirements/cpu.txt requirements/dev.txt setup.py $(wildcard requirements/site-packages/*)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or 3.12, or set PYTHON=PATH" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH_INDEX_ARGS) "$$(grep ^torch== requirements/cpu.txt)"
	$(PIP) --no-deps --requirement requirements/cpu.txt --requirement requirements/dev.txt
	$(BIN)/python -m pip uninstall -qq --yes roll
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: setup ## train a small model on arithmetic, in about ten minutes
	$(BIN)/python -m examples.tiny_math.demo --out output/demo --seed $(SEED)

demo-real: export HF_HUB_OFFLINE = 0
demo-real: setup ## train SmolLM2-135M on questions of reasoning-gym; fetches its weights
	$(BIN)/python -m examples.smollm2_135m.demo --out output/demo-real --seed $(SEED)

demo-agentic: setup ## train an agent on FrozenLake, over many turns
	$(BIN)/python -m examples.tiny_frozen_lake.demo --out output/demo-agentic --seed $(SEED)

test: lint test-fast ## run lint and every test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "integration or slow"

test-fast: setup ## run the tests that start no engine and are not marked slow
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not integration and not slow" --ignore tests/integration

lint: setup ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run every benchmark and print one table
	$(BIN)/python -m benchmarks --json-dir $(BENCH_DIR)

docs: setup ## regenerate the pages made from the code
	$(BIN)/python -c 'from roll.trackers.metrics import markdown; print(markdown(), end="")' > docs/metrics.md
	$(BIN)/python -m roll.loading.reference
	$(BIN)/python -m examples.algorithms.pages
	$(BIN)/python -m scripts.chinese_pages

site: setup ## build the site in English and Chinese into output/site; a broken link is an error
	$(BIN)/python -m scripts.build_site

plan: setup ## show what CONFIG would run where
	$(BIN)/roll plan $(CONFIG) --elsewhere

rehearse: setup ## run every recipe of RECIPES in miniature, three to four minutes each
	@failed=; for recipe in $(RECIPES); do $(BIN)/roll rehearse $$recipe || failed="$$failed $$recipe"; done; \
	test -z "$$failed" || { echo "not every part was exercised of:$$failed" >&2; exit 1; }

clean: ## remove the output of runs and tools, but not .venv
	rm -rf output build dist roll_posttraining.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
