# Every target works alone on a machine that has Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
# Tests start many processes: where this is set, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help demo check test test-all test-gpu test-lowest campaign bench docs tables tutorial dist clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/base
	$(INSTALL) -e ".[dev]"
	@touch $@

demo: .venv/base ## pretrain, evaluate and report on embedded data: five minutes on two CPU cores
	$(BIN)/stopmim demo

check: .venv/dev ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/dev ## the fast tests: about five minutes on two CPU cores
	@.ci/browser
	$(BIN)/pytest -q -n 3 # on two cores: many wait for processes of their own

test-all: .venv/dev ## every test, the slow ones included
	@.ci/browser
	$(BIN)/pytest -q -n 2 -m "not gpu"

test-gpu: .venv/dev ## the tests that need an NVIDIA GPU
	$(BIN)/pytest -q -m gpu

.venv-lowest/done: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c constraints-lowest.txt torch==2.13.0 -e ".[test]"
	@touch $@

test-lowest: .venv-lowest/done ## the fast tests with the lowest versions that pyproject.toml admits
	.venv-lowest/bin/pytest -q -n 2 -W default # old libraries warn of newer ones

campaign: .venv/dev ## kills, damage, hostile files and races: ten minutes on two CPU cores; hours with LONG=1
	$(BIN)/python -m campaign $(if $(LONG),--long)

bench: .venv/base ## time one training step on this machine
	$(BIN)/stopmim bench step

.venv/docs: .venv/base
	$(INSTALL) -e ".[docs]"
	@touch $@

docs: .venv/docs ## build the pages of docs/ and the reference as site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tables: .venv/dev ## compute tables and figures of the pages anew, from config, benchmarks/ and results/
	$(BIN)/python tests/tables.py

tutorial: .venv/dev ## run docs/photos.md from top to bottom and write down what it prints: ten minutes on two CPU cores
	@.ci/browser
	$(BIN)/python tests/tutorial.py

dist: .venv/dev ## wheel and source archive in dist/, and a short demo with the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	PYTHON=$(PYTHON) .ci/dist

clean: ## remove the virtual environment and caches
	rm -rf .venv .venv-lowest build dist site .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
