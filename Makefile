# The commands of the project; `make` lists them. ARGS passes options on: make run ARGS="--out_dir other"

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/requirements.installed
DEV_STAMP := $(VENV)/requirements-dev.installed
CONFIG := config/shakespeare_library_cpu.py
ARGS :=
EXAMPLES := 5000

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run test campaign-short campaign tree test-interop test-notebook bench-generation bench-grpo lint format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv and install requirements.txt (again only when that file has changed)
# The stamp, a copy of what was installed, comes last: a set-up that was interrupted begins anew from nothing (--clear).
	@cmp -s requirements.txt $(STAMP) || { set -ex; \
		python3 -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: " + sys.version'; \
		python3 -m venv --clear $(VENV); \
		$(PYTHON) -m pip install --disable-pip-version-check -r requirements.txt; \
		cp requirements.txt $(STAMP); }

setup-dev: setup ## install requirements-dev.txt too: what tests, linter and type checker need
	@cmp -s requirements-dev.txt $(DEV_STAMP) || { set -ex; \
		$(PYTHON) -m pip install --disable-pip-version-check -r requirements-dev.txt; \
		cp requirements-dev.txt $(DEV_STAMP); }

run: setup ## train a generator of one play of Shakespeare, improve it by GRPO, then its controls (13 minutes)
	$(PYTHON) run_cycles.py --config $(CONFIG) $(ARGS)

test: setup-dev ## run the tests, in as many processes as there are cores
	$(PYTHON) -m pytest -n auto --dist worksteal $(ARGS)

campaign-short: EXAMPLES := 60
campaign-short: campaign ## try for a minute to break what the project promises, each commit in other ways

campaign: setup-dev ## the same with EXAMPLES examples of each kind (5,000: some hours)
	CROSSOVER_EXAMPLES=$(EXAMPLES) $(PYTHON) -m pytest tests/test_campaign.py tests/test_interruptions.py \
		--hypothesis-seed=$$((0x$$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0))) $(ARGS)

tree: setup-dev ## print sizes and options beside their budgets
	$(PYTHON) tests/test_architecture.py

test-interop: setup-dev ## run the tests that need requirements-bench.txt (installs it)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	$(PYTHON) -m pytest -m interop -n auto --dist worksteal $(ARGS)
	$(PYTHON) -m pytest tests/test_docs.py -k "commands_and_code_run_of_README"

test-notebook: setup-dev ## run examples/crossover.ipynb from its first cell to its last (5 minutes)
	$(PYTHON) -m pytest -m notebook $(ARGS)

bench-generation: setup ## time text generation against no cache and Hugging Face (installs requirements-bench.txt)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	$(PYTHON) benchmarks/generation.py $(ARGS)

bench-grpo: setup ## time a GRPO step against TRL's (installs requirements-bench.txt)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	$(PYTHON) benchmarks/grpo.py $(ARGS)

lint: setup-dev ## check style, formatting and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup-dev ## apply the linter's fixes and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove .venv (the next target installs again) and caches; results and data stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
