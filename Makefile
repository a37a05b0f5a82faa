# The ritual: make format lint types test. `make quickstart` shows the whole loop at work.
#
# Every target makes what it needs. Stamps in $(VENV) make a second run quick; they are made anew
# when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-dev

.PHONY: help quickstart vllm test lint format types clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a small model to be a shop assistant, and see it learn"
	@echo "make vllm         install vLLM into an environment of its own (once; 3.5 GB on a CPU)"
	@echo "make test         run the tests that need neither a GPU nor much time"
	@echo "make lint         ruff, formatting, import layers, types"
	@echo "make format       let ruff rewrite the files"
	@echo "make types        the type checker alone"
	@echo "make clean        remove caches and what was built, keep $(VENV)"

quickstart: $(TRAIN)
	$(BIN)/art-langgraph quickstart

vllm: $(TRAIN)
	$(BIN)/art-langgraph setup vllm

test: $(DEV)
	$(BIN)/python -m pytest -m "not slow and not gpu"

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	! test -x $(BIN)/hadolint || $(BIN)/hadolint docs/Dockerfile
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(DEV)
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find art_core art_langgraph tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "art-langgraph needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	  echo "Say which Python to use: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

$(TRAIN): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing art-langgraph[train] into $(VENV) (once; PyTorch is large)"
	$(PIP) --editable '.[train]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing art-langgraph[train,dev] into $(VENV) (once; PyTorch is large)"
	$(PIP) --editable '.[train,server,dev]'
	@touch $@ $(TRAIN)
