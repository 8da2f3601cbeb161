# Everything needs nothing but python3 (3.11 or newer): each target first makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo test test-all mutants check format bench docs trackers
.DEFAULT_GOAL := demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[test]' --constraint constraints.txt
	@touch $@

demo: $(READY)  ## train real digits on two processes
	$(BIN)/lockstep train digits --strategy ddp --devices 2 --accelerator cpu

test: $(READY)  ## what holds before a change lands, in minutes
	$(PYTEST) -m "not long and not slow" tests/real tests/faults tests/ranks tests/unit

test-all: $(READY)  ## the whole suite
	$(PYTEST)

test-ci: $(READY)  ## with one of 32 parts of the slow ones: SLICE=3/32
	$(PYTEST) --durations 20 --slice $(SLICE) tests/real tests/faults tests/slow tests/ranks tests/unit

mutants: $(READY)  ## over a hundred defects, one after the other: whether a test notices each
	$(BIN)/python -m tests.mutants

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

trackers: $(READY)  ## the trackers' libraries, over .venv: older pillow (Trackio), protobuf (SwanLab), pyarrow (MLflow)
	$(BIN)/python -m venv .venv-trackers
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  >"$$(echo .venv-trackers/lib/python3*/site-packages)/over.pth"
	grep -vE '^(pillow|protobuf|pyarrow)==' constraints.txt >.venv-trackers/constraints.txt
	.venv-trackers/bin/python -m pip install --quiet wandb mlflow trackio swanlab \
	  --constraint .venv-trackers/constraints.txt

docs: $(READY)  ## the documentation's site, in site/
	$(BIN)/pip install --quiet --editable '.[docs]' --constraint constraints.txt
	$(BIN)/python docs/build.py
