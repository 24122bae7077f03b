# Every target makes its own virtual environment: nothing but python3, pip and make is assumed.
#
#   make demo      train examples/gpt on 8 virtual CPU devices with a plan that nobody wrote, and explain it; then as a pipeline
#   make test      the quick tests
#   make verify    all tests, the slow proofs included; the log is build/verify.log
#   make verify-gpu    predictions held against XLA's compiler for H100s, no GPU needed; own environment, 240 MB more;
#                  the log is build/verify_gpu.log
#   make lint      ruff, mypy, import contracts        make format    let ruff rewrite what it can
#   make bench     every script in benchmarks/         make docs      the manual, into build/site
#   make clean     remove all that these have made
#
# Another interpreter:  make test PYTHON=python3.12 VENV=.venv312 CONSTRAINTS=constraints-newest.txt

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
VERIFY_LOG ?= build/verify.log

.DELETE_ON_ERROR:
.PHONY: help demo test verify verify-gpu verify-gpu-here lint format bench docs clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# ------------------------------------------------------------------------------------------------------- environment

BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --no-input

# $(BIN)/python is a link to the interpreter and carries its date, so a stamp says when the environment was made.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "autopar needs Python 3.11 or later, $(PYTHON) is older or missing: make ... PYTHON=python3.11" >&2; exit 1; }
	@echo "set-up: $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) -m venv failed: on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }
	@touch $@

# One stamp per extra, so that `make demo` does not wait for mypy, nor `make lint` twice for anything. In a stamp's name `-` parts
# extras and `_` stands for the `-` of an extra's own name.
extras = $(subst _,-,$(subst -,$(comma),$*))
$(VENV)/.with-%: $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	@echo "set-up: autopar[$(extras)] with the versions of $(CONSTRAINTS) (once; one or two minutes if all must be fetched)"
	@started=$$(date +%s); $(BIN)/python -m pip install $(PIP_FLAGS) -e '.[$(extras)]' -c $(CONSTRAINTS) && \
	  echo "set-up: done in $$(($$(date +%s) - started)) s"
	@touch $@

comma := ,

# ----------------------------------------------------------------------------------------------------------- targets

demo: $(VENV)/.with-examples
	@$(BIN)/python -m examples.gpt.train
	@echo; echo "The same model, planned for two hosts with Ethernet of 1 Gb/s between them, becomes a pipeline:"
	@$(BIN)/python -m examples.gpt.train --hosts 2 --steps 40 --run-dir runs/gpt_pipeline --data-dir runs/gpt/data \
	  --validation-batches 0 --sample-tokens 0

test: $(VENV)/.with-test-examples
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

verify: $(VENV)/.with-test-examples
	@$(BIN)/python scripts/verify.py $(VERIFY_LOG) -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

# In an environment of its own: where the compiler is installed, JAX looks for GPUs and complains when there are none.
verify-gpu:
	@$(MAKE) --no-print-directory verify-gpu-here VENV=$(VENV)-gpu

verify-gpu-here: $(VENV)/.with-test-examples-gpu_compiler
	@$(BIN)/python scripts/verify.py build/verify_gpu.log -m gpu_compiler $(PYTEST_ARGS)

lint: $(VENV)/.with-lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --cache-dir build/import_linter

format: $(VENV)/.with-lint
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.with-examples
	@set -e; for script in $(filter-out %/__init__.py,$(sort $(wildcard benchmarks/*.py))); do \
	  module=benchmarks.$$(basename $$script .py); started=$$(date +%s); \
	  echo "== $$module"; $(BIN)/python -m $$module; \
	  echo "== $$module: $$(($$(date +%s) - started)) s"; \
	done

docs: $(VENV)/.with-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "docs: build/site/index.html"

clean:
	rm -rf .venv .venv-gpu .venv312 .venv312-gpu $(VENV) build dist runs autopar.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
