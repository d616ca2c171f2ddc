# On a fresh machine with git, make and Python 3.11 every target sets itself up first.
# Variables: PYTHON (interpreter for the environment), VENV (its folder), JOBS (test workers).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
JOBS ?= 2
# Asked rather than looked up: a name on the path may be a shim for a version that is not there.
PYTHON ?= $(firstword $(foreach python,python3.11 python3 python,$(shell \
	$(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test oldest wheel soak fuzz bench format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## create the environment

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "acert needs Python 3.11 or newer; none found on the path" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@# It asks for torchvision, which it never imports and which may bring another torch.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchattacks
	touch $@

demo: $(READY) ## train, certify and plot on scikit-learn's digits (under two minutes)
	$(BIN)/python examples/digits.py

# One torch thread a worker: two workers with two threads each would fight over two cores.
test: export OMP_NUM_THREADS = 1
test: $(READY) ## everything that CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/pytest -n $(JOBS) --dist worksteal --cov --cov-report=term
	$(MAKE) wheel

# The registry's own build, for CUDA: its fake tensors have a device that need not be there. All else
# is borrowed from $(VENV).
oldest: export OMP_NUM_THREADS = 1
oldest: build/oldest/.ready ## the tests with the oldest PyTorch that is supported (downloads gigabytes)
	PYTHONPATH=src build/oldest/bin/python -m pytest -n $(JOBS) --dist worksteal

build/oldest/.ready: $(READY)
	rm -rf build/oldest
	$(PYTHON) -m venv build/oldest
	version="$$(sed -n 's/^dependencies = .*torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)"; \
	build/oldest/bin/python -m pip install --quiet "torch==$$version.*"
	site="$$(build/oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/borrowed.pth"
	touch $@

# The throw-away environment borrows the packages of $(VENV), torch among them, but not its
# editable acert: path files are not read in a folder that was itself added by a path file.
wheel: $(READY) ## build sdist and wheel, import the wheel in a throw-away environment
	rm -rf build/dist build/venv
	$(BIN)/python -m build --no-isolation --outdir build/dist >/dev/null
	$(BIN)/python -m venv --without-pip build/venv
	$(BIN)/python -m pip --python build/venv/bin/python install --quiet --no-deps --no-index build/dist/*.whl
	site="$$(build/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/borrowed.pth"; \
	cd build && venv/bin/python ../tests/wheel_import.py

soak: $(READY) ## soundness with millions of points; rewrites the committed record
	$(BIN)/python benchmarks/soak.py

# atheris guides the inputs; it is needed for nothing else.
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(READY) ## ten minutes of hostile files for every reader; rewrites the committed record
	$(BIN)/python -m pip install --quiet --constraint constraints.txt atheris
	$(BIN)/python benchmarks/fuzz.py

bench: $(READY) ## time and memory of bound passes and certification
	$(BIN)/python benchmarks/bounds.py

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove all that make has made, the environment included
	rm -rf .venv build dist demo .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
	rm -rf .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
