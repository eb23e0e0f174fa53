# `make test` and `make demo` set up everything on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TIMM := $(VENV)/timm
EMPTY := build/empty
LOWEST := build/lowest
TORCH := torch==2.13.0
# Two processes with one thread each: the models are so small that threads mostly wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
# The Triton kernels on the CPU, through Triton's interpreter.
TRITON := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
ALL := -m 'slow or not slow'
# Some CPUs crash in oneDNN's bf16 matrix products; AVX512_CORE is the widest instruction set that does not use them.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE
# Test processes and the commands they start share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test test-all test-timm test-lowest test-gpu test-sanitizer test-interpreted fuzz soak coverage lint style types docs demo dist clean

install: $(READY)

# torch first and pinned, so that no other package installs another build of it.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: style types

# ruff, the import contracts of pyproject.toml, and codespell with its own dictionary and ours.
style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/codespell --dictionary=- --dictionary=.codespell/mrconv.txt src tests docs benchmarks examples *.md Makefile

types: $(READY)
	$(BIN)/mypy

# The documentation site in build/site; needs no network, and any warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The quick tests: every behaviour once. `make test T=tests/kernels` runs a part of them, without the linters.
# mypy uses one core: it runs beside the interpreted kernels.
ifdef T
test: $(READY)
	$(if $(findstring tests/triton,$(T)),TRITON_INTERPRET=1) $(PYTEST) $(T)
else
test: style
	@$(MAKE) --no-print-directory --jobs=2 types test-interpreted
	$(PYTEST)
endif

test-interpreted: $(READY)
	$(TRITON) tests/triton

# All tests: whole grids of parameters, every preset, the kernels compiled for every kind of GPU, timm, docs.
test-all: lint docs test-timm
	$(TRITON) $(ALL) tests/triton tests/test_triton_compiles.py
	$(PYTEST) $(ALL) --ignore tests/test_triton_compiles.py

# The quick tests in an environment with the lowest version of every dependency but torch.
test-lowest: $(READY)
	mkdir -p $(LOWEST)
	$(BIN)/python tests/lowest_versions.py > $(LOWEST)/constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet $(TORCH)
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[test]'
	$(subst $(BIN),$(LOWEST)/bin,$(PYTEST))

# What needs a GPU: devices, CUDA graphs, and the Triton kernels on hardware.
test-gpu: $(READY)
	$(BIN)/python -m pytest -n 6 $(ALL) tests/test_gpu.py tests/training/test_graphs.py tests/triton

# NVIDIA's compute-sanitizer over the quick tests of every Triton kernel; without a cache, torch's allocator shows it the
# bounds of each tensor. TOOL=racecheck reports what docs/reliability.md explains.
TOOL ?= memcheck
test-sanitizer: $(READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --target-processes all --error-exitcode 1 \
	  $(BIN)/python -m pytest -n 5 tests/triton

# N mutated files through all readers: each is read or rejected in one line, within limits of memory and time. S is the
# seed of the first one; without it, that is a number that no run has had.
N ?= 5000
S ?= $(shell date +%s)
fuzz: $(READY)
	MRCONV_FUZZ_CASES=$(N) MRCONV_FUZZ_SEED=$(S) $(PYTEST) -m slow tests/fuzz

# The share of the core's lines that the quick tests run; fails below 90 %.
coverage: $(READY)
	$(PYTEST) --cov --cov-report=term

# Kills during training, 10,000 requests and 200 streams, counted; takes about ten minutes.
soak: $(READY)
	$(BIN)/python benchmarks/soak.py

# timm imports torchvision, which must stay out of the main environment: install both in a separate folder.
$(TIMM)/.ready: Makefile $(READY)
	rm -rf $(TIMM)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TIMM) timm==1.0.30 torchvision==0.28.0 pillow
	touch $@

test-timm: $(TIMM)/.ready
	PYTHONPATH=$(TIMM) $(BIN)/python -m pytest tests/with_timm

demo: $(READY)
	$(BIN)/python examples/demo.py

# sdist and wheel in dist/. The wheel must work in an empty environment, without extras and then with them.
dist: $(READY)
	rm -rf dist build/lib $(EMPTY)
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet $(TORCH) dist/*.whl
	$(EMPTY)/bin/python tests/installed_package.py
	$(EMPTY)/bin/python -m pip install --quiet "$$(ls dist/*.whl)[train,serve]"
	$(EMPTY)/bin/python tests/installed_package.py train

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
