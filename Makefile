# Everything runs in .venv in this checkout, made on first use from requirements/cpu.lock.
# `make test-gpu` alone uses the python3 around it, where vLLM for the GPU is installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))

# They take about half of the time, and run beside all others.
ENGINE_TESTS := tests/engine tests/test_cli.py tests/test_corpus_engine.py

.PHONY: setup demo test test-gpu lint lock clean

setup: $(STAMP)

$(STAMP): requirements/cpu.lock pyproject.toml
	@$(PYTHON) -c '$(SUPPORTED)' || { \
	  echo "PYTHON=$(PYTHON) is not Python 3.11 or 3.12: run e.g. make PYTHON=python3.11 setup" >&2; \
	  exit 1; }
	@$(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "no virtual environment: install Python's venv module (Debian: python3-venv)" >&2; \
	  exit 1; }
	@rm -f $@
	@echo "Installing the CPU environment into $(VENV) (some minutes, 4 GB on disk)"
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu.lock || { \
	  echo "The CPU environment was not installed (pip's message is above). If it is torch that" >&2; \
	  echo "was not found: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a source of PyTorch's" >&2; \
	  echo "CPU wheels. Then run make setup again; it goes on where it stopped." >&2; \
	  exit 1; }
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	$(BIN)/mrv2-spec demo $(DEMO_ARGS)

# With PYTEST_ARGS, one run of what they choose.
test: lint
	$(BIN)/python $(if $(PYTEST_ARGS),-m pytest -m "not gpu" $(PYTEST_ARGS),\
	  tests/side_by_side.py $(ENGINE_TESTS))

test-gpu:
	python3 -m pytest -m gpu $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: setup
	$(BIN)/python requirements/lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
