# make demo   the demonstration, on a fresh machine        make native   rebuild the native modules after a change
# make test   everything that must pass                    make bench    the demo's table as a benchmark
#
# Both first make a virtual environment in .venv with the pinned versions of constraints.txt. To use an environment of
# your own as it is, nothing installed into it:  make test ENV=/path/to/env
PYTHON ?= python3
# Builds for users never fail on a warning; `make native-test` compiles the same sources with warnings as errors.

ifdef ENV
BIN := $(abspath $(ENV))/bin
else
BIN := $(CURDIR)/.venv/bin
RUNTIME := .venv/runtime.stamp
DEV := .venv/dev.stamp
endif
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
JOBS ?= $(shell nproc)
CPP_FILES = $(shell find csrc tests/native -name '*.?pp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help env demo test lint format types native native-test pytest test-oldest bench check-clean-build clean

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile
	@echo "also: $(filter-out help demo test native bench,$(shell sed -n 's/^.PHONY: //p' Makefile))"

# --- the environment ---------------------------------------------------------------------------------------------
.venv/tools.stamp: constraints.txt
	@echo "making the environment .venv (once; downloads torch)"
	$(PYTHON) -c 'import sys; sys.exit("pipespec needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools pybind11 cmake ninja
	@touch $@

.venv/runtime.stamp: .venv/tools.stamp pyproject.toml setup.py
	@echo "installing the dependencies and building the native modules (the first time takes a minute or two)"
	$(PIP) --no-build-isolation -e .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

env: $(DEV)

# --- what users run ----------------------------------------------------------------------------------------------
demo: $(RUNTIME) native
	$(BIN)/pipespec demo

# The steps in order, each with its time; the first failure ends it.
test: $(DEV)
	@for step in lint types native native-test pytest test-oldest; do \
	  echo "=== $$step"; start=$$(date +%s); \
	  $(MAKE) --no-print-directory $$step || { echo "=== $$step: FAILED"; exit 1; }; \
	  echo "=== $$step: passed in $$(( $$(date +%s) - start )) s"; \
	done

# --- the steps ---------------------------------------------------------------------------------------------------
lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

types: $(DEV)
	$(BIN)/mypy

native: $(RUNTIME)
	@$(PY) setup.py -q build_ext --inplace

# The C++ tests: plain (with the Python modules, CUDA included where nvcc is found, and warnings as errors), then under
# ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer.
CMAKE = PATH="$(BIN):$$PATH" cmake -S . -G Ninja -DPIPESPEC_WERROR=ON -DPIPESPEC_TESTS=ON --log-level=WARNING
define build_and_ctest
	PATH="$(BIN):$$PATH" cmake --build $(1) --parallel $(JOBS)
	PATH="$(BIN):$$PATH" ctest --test-dir $(1) --output-on-failure --no-tests=error
endef
native-test: $(DEV)
	$(CMAKE) -B build/check -DPython_EXECUTABLE=$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
	  -DPIPESPEC_CUDA=$${PIPESPEC_CUDA:-auto}
	$(call build_and_ctest,build/check)
	$(CMAKE) -B build/check-thread -DPIPESPEC_MODULES=OFF -DPIPESPEC_SANITIZE=thread
	$(call build_and_ctest,build/check-thread)
	$(CMAKE) -B build/check-address -DPIPESPEC_MODULES=OFF -DPIPESPEC_SANITIZE=address
	$(call build_and_ctest,build/check-address)

# Two tests at a time, in two processes: CI has two cores, and most tests use one.
AT_ONCE = -n 2 --dist worksteal
pytest: $(DEV)
	$(PY) -m pytest $(AT_ONCE)

# The oldest transformers that pyproject.toml allows, in an environment of its own. The package is not installed there: it is
# this tree, with the native modules that are built in it.
OLDEST_TESTS = $(patsubst %,tests/pipespec/test_%.py,conformance inputs generate cache forward attention angles)
.venv-oldest/stamp: constraints-oldest.txt $(RUNTIME)
	@echo "making the environment .venv-oldest"
	$(PY) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip --disable-pip-version-check install -q -c constraints-oldest.txt \
	  torch transformers numpy safetensors rich pytest pytest-xdist hypothesis psutil
	@touch $@

test-oldest: .venv-oldest/stamp native
	PYTHONPATH=$(CURDIR):$(CURDIR)/python .venv-oldest/bin/python -m pytest $(AT_ONCE) -m 'not slow' $(OLDEST_TESTS)

bench: $(RUNTIME) native
	$(PY) -m bench.bench_cpu --json build/bench/cpu.json

# What a user's `pip install .` does: build isolation, no torch in the environment, no CUDA. Not part of `make test`.
check-clean-build:
	rm -rf build/clean && mkdir -p build/clean
	git ls-files -coz --exclude-standard | xargs -0 cp --parents -t build/clean
	$(PYTHON) -m venv build/clean/env
	cd build/clean && start=$$(date +%s) && PIPESPEC_CUDA=off env/bin/python -m pip install --no-deps . && \
	  echo "built and installed in $$(( $$(date +%s) - start )) s"
	cd / && $(CURDIR)/build/clean/env/bin/python -c "\
	import importlib.util, pipespec_kernels; from pipespec_kernels import _native; \
	assert importlib.util.find_spec('torch') is None; print(_native.build_info())"

clean:
	rm -rf build .venv .venv-oldest *.egg-info pipespec_kernels/*.so .pytest_cache .mypy_cache .ruff_cache
