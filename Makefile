# make demo: set up and run the main job. make test: set up and run every check that CI runs.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help setup demo test test-slow mutants profile gpu-check format

help:
	@echo "make demo       set up .venv and run the main job: litce pretrain"
	@echo "make test       set up .venv and run every check that CI runs"
	@echo "make test-slow  the tests that take minutes"
	@echo "make mutants    break the loss in many ways and see the tests notice each"
	@echo "make profile    measure what the loss holds and write docs/profiling; takes about an hour"
	@echo "make gpu-check  on a CUDA device: its tests, and docs/gpu_check.md with time, memory and errors"
	@echo "make setup      set up .venv alone"
	@echo "make format     format the code and fix what the linter can"

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# A second time it goes on where it was interrupted, or says that it is finished.
demo: setup
	$(BIN)/litce pretrain --resume auto

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

mutants: setup
	$(BIN)/python -m tests.mutants

profile: setup
	$(BIN)/litce profile_memory --runs [loss,step,budget] --out_dir docs/profiling
	$(BIN)/litce profile_memory --runs [compile] --shapes [2048x512x50257] --out_dir docs/profiling/compile

gpu-check: setup
	$(BIN)/python -m litce.tools.gpu_check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
