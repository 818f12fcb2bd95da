# Two commands for a start, each making its own virtual environment:
#   make demo    install, then decode real problems with the bundled model
#   make test    install, then run the tests (about 10 minutes on two cores)
# `make test-full` adds what that leaves out; `make lint` checks style and types; `make clean` removes the environment.
#
# TORCH overrides what is installed first: a CPU-capable pin where no GPU is found, the newest release where one is.
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# pytest-benchmark is for `pytest benchmarks/` and warns where tests run in several processes.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) -p no:benchmark
UNIT := tests --ignore=tests/interpret --ignore=tests/aot
CPU := not slow and not gpu and not download

.PHONY: demo test test-full lint clean FORCE

# Holds what torch was asked for; rewritten, and so installed again, when TORCH changes.
$(VENV)/.torch: FORCE
	@if [ "$$(cat $@ 2>/dev/null)" != "$(TORCH)" ]; then \
	  $(PYTHON) -m venv $(VENV) && echo "installing $(TORCH) and leap_kernels into $(VENV) ..." && \
	  $(PIP) $(TORCH) && echo "$(TORCH)" > $@; fi

$(VENV)/.package: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.package
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[dev]"
	@touch $@

demo: $(VENV)/.package
	$(BIN)/leap-kernels demo

# Three tiers in processes of their own: Triton decides at import whether it interprets or compiles.
test: $(VENV)/.test
	$(PYTEST) $(UNIT) -m "$(CPU)" --min-passed 200
	TRITON_INTERPRET=1 $(PYTEST) tests/interpret -m "$(CPU)" --min-passed 50
	$(PYTEST) tests/aot -m "$(CPU)" --min-passed 10

test-full: $(VENV)/.test
	$(PYTEST) tests --ignore=tests/interpret -m "slow and not gpu and not download" --min-passed 3

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info leap_kernels/_C*
