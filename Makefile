# Everything needs nothing but python3 (3.11 or newer): each target first makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check format bench
.DEFAULT_GOAL := demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[test]' --constraint constraints.txt
	@touch $@

demo: $(READY)  ## train real digits on two processes
	$(BIN)/lockstep train digits --strategy ddp --devices 2 --accelerator cpu

test: $(READY)  ## the whole suite
	$(BIN)/python -m pytest

check: $(READY)  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layers.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## the tables in benchmarks/results
	$(BIN)/python -m benchmarks
