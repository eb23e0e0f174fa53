# `make test` and `make demo` do everything on a machine that has Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TIMM := $(VENV)/timm
# Two processes of one thread each: with models this small, threads wait for each other most of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
# Some CPUs stop on oneDNN's bf16 matrix products; this asks for the widest set that does not.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: install test test-all test-timm test-triton lint demo clean

install: $(READY)

# torch first and pinned, so that no other package brings another build of it.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint test-timm test-triton
	$(PYTEST)

test-all: lint test-timm test-triton
	$(PYTEST) -m 'slow or not slow'

# timm imports torchvision, which must stay out of the main environment: both live in a folder of their own.
$(TIMM)/.ready: Makefile $(READY)
	rm -rf $(TIMM)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TIMM) timm==1.0.30 torchvision==0.28.0 pillow
	touch $@

test-timm: $(TIMM)/.ready
	PYTHONPATH=$(TIMM) $(BIN)/python -m pytest tests/with_timm

# Triton's kernels on the CPU, through its interpreter.
test-triton: $(READY)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/triton

demo: $(READY)
	$(BIN)/python examples/demo.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
