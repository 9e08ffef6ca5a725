# Everything a developer types. The environment is made once and again only when its requirements change: what
# serving needs by `make serve`, the rest by everything else.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
SERVING := $(VENV)/.serving
STAMP   := $(VENV)/.installed

# Builds for the CPU are a tenth of those for CUDA, and only in an index of their own.
TORCH       ?= torch==2.13.0
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
UV          := $(shell command -v uv)
INSTALL     := $(if $(UV),$(UV) pip install --quiet --python $(PY),$(PY) -m pip install --quiet --disable-pip-version-check)
NO_WAITING  := PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=10 UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10
REQUIRED    := pyproject.toml client/pyproject.toml constraints.txt

PYTEST := $(PY) -m pytest
JOBS   ?= 2
LINTED := backend kernels ensemble common client demo tests benchmarks

.PHONY: setup serve test test-slow lint format bench bench-peers rows status constraints clean help
.DEFAULT_GOAL := help

help:
	@echo "make serve      install into $(VENV) where needed, then serve model_repository/ on 127.0.0.1"
	@echo "           other ports: make serve ARGS=\"--http-port 8080 --openai-port 0\" (quire serve --help names all)"
	@echo "make test       all tests but the long ones     make test-slow  the long ones"
	@echo "make lint       ruff, mypy, docstrings         make format     let ruff rewrite"
	@echo "make bench-peers  the same work for Quire and other engines, installed on first use (hours)"
	@echo "make bench      measure the served demo         make rows       rows of the features table that have tests"
	@echo "make constraints  take new versions of all requirements"
	@echo "make rows ROWS=\"A1 A2\"  run their tests         make status     the status tables: marks, slow tests on record"

setup: $(STAMP)

$(SERVING): $(REQUIRED)
	@$(PYTHON) .ci/check_python.py
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): $(TORCH), then the engine, the server and the client"
	@test -z "$(TORCH_INDEX)" || $(NO_WAITING) $(INSTALL) --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)" 2>/dev/null \
		|| echo "no build of $(TORCH) for the CPU at $(TORCH_INDEX): one for CUDA is taken, of several gigabytes"
	$(INSTALL) -c constraints.txt "$(TORCH)" -e ".[server]" -e "./client[openai]"
	@$(PY) -m pip list --disable-pip-version-check --format freeze > $@

$(STAMP): $(SERVING)
	$(INSTALL) -c constraints.txt -e ".[server,dev]" -e "./client[openai]"
	@touch $@

serve: $(SERVING)
	$(VENV)/bin/quire serve --model-repository model_repository --openai-port 9000 $(ARGS)

# The tests of the real server in one process, all others in the rest. Bytecode is kept, whatever the
# environment says: each of some hundred processes would compile the same modules.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	$(PYTEST) -m "not slow" -n $(JOBS) --failures .cache/failures.txt

# Outcomes are kept: commit the report, and what `make status` makes of it. TESTS: files, for a part of them.
test-slow: $(STAMP)
	$(PYTEST) -m slow --report tests/reports/slow.json $(TESTS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) .ci/check_docstrings.py

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	$(PY) -m benchmarks.run

bench-peers: $(STAMP)
	$(PY) -m benchmarks.peers

rows: $(STAMP)
	@$(PY) -m tests.rows $(ROWS)

# The versions of constraints.txt, resolved anew for every Python; commit what changes.
constraints: $(STAMP)
	echo "$(TORCH)" | $(PY) -m uv pip compile --quiet --universal --python-version 3.10 --no-annotate --upgrade \
		--extra client --extra server --extra gpu --extra otel --extra dev --extra openai \
		--output-file constraints.txt --custom-compile-command "make constraints" \
		- pyproject.toml client/pyproject.toml

status: $(STAMP)
	@$(PY) -m tests.keys_page > docs/keys.md
	@$(PY) -m tests.parameters_page > docs/parameters.md
	@$(PY) -m tests.rows --status

clean:
	rm -rf $(VENV) build dist .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
