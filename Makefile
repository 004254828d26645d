# make demo   the demonstration, on a fresh machine        make demo-real the same with a real model, 1.7 GB
# make test   everything that must pass, few trials        make test-all the same with all trials, and the coverage
# make bench  the table of the bundled family, measured here
#
# Each first makes a virtual environment in .venv with the pinned versions of constraints.txt. To use an environment of
# your own as it is, nothing installed into it:  make test ENV=/path/to/env
PYTHON ?= python3
# How many trials the tests make, in Python (tests/trials.py) and in C++ (tests/native/check.hpp): ci or nightly.
export PIPESPEC_TESTS ?= ci

ifdef ENV
BIN := $(abspath $(ENV))/bin
else
BIN := $(CURDIR)/.venv/bin
RUNTIME := .venv/runtime.stamp
DEV := .venv/dev.stamp
endif
# Where the native modules and the C++ tests are built: one folder for both, so that each file is compiled once.
export PIPESPEC_BUILD_DIR ?= $(CURDIR)/build/native$(if $(ENV),-$(notdir $(BIN:/bin=)))
# ccache, where it is installed, knows a file that another clone has compiled.
export CCACHE_BASEDIR ?= $(CURDIR)
# Warnings are errors in an environment for development, and never in one for users.
export PIPESPEC_WERROR ?= $(if $(ENV)$(shell test -e .venv/dev.stamp && echo yes),on,off)
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
JOBS ?= $(shell nproc)
CPP_FILES = $(shell find csrc bench/native tests/native -name '*.?pp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help env demo demo-real test test-all lint format types native native-test native-test-arm pytest test-oldest bench check-results docs \
  test-real check-clean-build clean

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile
	@echo "also: env lint format types native native-test native-test-arm pytest test-oldest test-real check-results docs check-clean-build clean"

# --- the environment ---------------------------------------------------------------------------------------------
.venv/tools.stamp: constraints.txt
	@echo "making the environment .venv (once; downloads torch)"
	$(PYTHON) -c 'import sys; sys.exit("pipespec needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools pybind11 cmake ninja
	@touch $@

# The compiler does not wait for the dependencies, nor they for it. Python compiles what it imports, not all of torch.
DEPENDENCIES = $(shell $(PY) -c 'import tomllib; print(*map(repr, tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))')
.venv/runtime.stamp: .venv/tools.stamp pyproject.toml setup.py
	@echo "installing the dependencies, and building the native modules meanwhile (the first time takes a minute or two)"
	@$(PY) setup.py -q build_ext --inplace & build=$$!; \
	  $(PIP) -q --no-compile $(DEPENDENCIES); installed=$$?; \
	  wait $$build && exit $$installed
	$(PIP) -q --no-build-isolation --no-deps -e .
	@touch $@

.venv/dev.stamp: .venv/tools.stamp pyproject.toml setup.py
	@echo "installing the dependencies and the tools of development, and building the native modules"
	PIPESPEC_WERROR=on $(PIP) --no-build-isolation -e '.[bench,dev,docs]'
	@touch .venv/runtime.stamp $@

env: $(DEV)

# --- what users run ----------------------------------------------------------------------------------------------
# It runs on the CPU: a first build leaves the CUDA module out, and `make native` adds it.
demo: export PIPESPEC_CUDA ?= $(if $(wildcard pipespec_kernels/_cuda.*.so),auto,off)
demo: $(RUNTIME) native
	$(BIN)/pipespec demo

# Fetches the real family (1.7 GB, once) and shows a small version of the README's table.
demo-real: $(DEV) native
	$(PY) -m tools.real_models $(REAL)
	rm -rf build/bench/demo_real
	$(PY) -m bench.run --target $(REAL)/q15-hf --drafts $(REAL)/q05-hf --dtype bfloat16 --reference plain --tuning 0 --chat-template --new-tokens 32 \
	  --systems hf "HF assisted" default "GGUF, plain" "GGUF, default" \
	  --prompts code=bench/configs/demo_code.jsonl chat=bench/configs/demo_chat.jsonl --out build/bench/demo_real

# The steps in order, with the time of each; the first failure ends it.
STEPS = lint types native native-test pytest test-oldest
test: $(DEV)
	@summary=""; begin=$$(date +%s); \
	for step in $(STEPS); do \
	  echo "=== $$step"; start=$$(date +%s); \
	  if $(MAKE) --no-print-directory $$step; then state=passed; else state=FAILED; fi; \
	  line="=== $$step: $$state in $$(( $$(date +%s) - start )) s"; echo "$$line"; summary="$$summary$$line\n"; \
	  if [ $$state = FAILED ]; then break; fi; \
	done; \
	printf "\n=== summary (trials: $(PIPESPEC_TESTS))\n$$summary=== $$state in $$(( $$(date +%s) - begin )) s\n"; \
	[ $$state = passed ]

test-all:
	@$(MAKE) --no-print-directory test PIPESPEC_TESTS=nightly COVERAGE=1

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

# The C++ tests, in the folder of the native modules; then those with threads under ThreadSanitizer, and all of them under
# AddressSanitizer and UndefinedBehaviorSanitizer.
CMAKE = PATH="$(BIN):$$PATH" cmake -S . -G Ninja -DPIPESPEC_BUILD_TESTS=ON --log-level=WARNING
SANITIZED = $(CMAKE) -DPIPESPEC_WERROR=ON -DPIPESPEC_MODULES=OFF
define build_and_ctest
	PATH="$(BIN):$$PATH" cmake --build $(1) --target native_tests --parallel $(JOBS)
	PATH="$(BIN):$$PATH" ctest --test-dir $(1) --parallel $(JOBS) --output-on-failure --no-tests=error
endef
native-test: $(DEV) native
	$(CMAKE) -B $(PIPESPEC_BUILD_DIR)
	$(call build_and_ctest,$(PIPESPEC_BUILD_DIR))
	$(SANITIZED) -B build/native-thread -DPIPESPEC_SANITIZE=thread
	$(call build_and_ctest,build/native-thread)
	$(SANITIZED) -B build/native-address -DPIPESPEC_SANITIZE=address
	$(call build_and_ctest,build/native-address)

# The C++ tests of products, attention and row selection as a 64-bit ARM machine runs them, without and with its dot
# products of bytes. For a Debian machine of another kind with qemu-user and g++-aarch64-linux-gnu. Not part of `make test`.
# A process with threads cannot fork under qemu-user, which one test of test_select does.
ARM_TESTS = attention coupled decoder formats litmus ngram rejection
ARM_FLAGS = -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
native-test-arm: $(DEV)
	$(CMAKE) -B build/arm $(ARM_FLAGS) "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
	  -DPIPESPEC_WERROR=ON -DPIPESPEC_MODULES=OFF
	PATH="$(BIN):$$PATH" cmake --build build/arm --target $(ARM_TESTS:%=test_%) test_select --parallel $(JOBS)
	for cpu in cortex-a57 cortex-a76; do \
	  QEMU_CPU=$$cpu PATH="$(BIN):$$PATH" ctest --test-dir build/arm --parallel $(JOBS) --output-on-failure --no-tests=error \
	    -R '^test_($(shell echo $(ARM_TESTS) | tr ' ' '|'))$$' || exit 1; \
	  QEMU_CPU=$$cpu qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/tests/native/test_select argmax position verify callers || exit 1; \
	done

# Two tests at a time, in two processes: CI has two cores, and most tests use one.
AT_ONCE = -n 2 --dist worksteal --durations=40 --durations-min=1
ifdef COVERAGE
COVER = --cov --cov-report=term:skip-covered
endif
pytest: $(DEV)
	$(PY) -m pytest $(AT_ONCE) $(COVER)

# The oldest transformers that pyproject.toml allows, in an environment of its own. It has transformers and the packages
# that go with it; everything else (torch above all) comes from the main environment. The package is this tree.
OLDEST_TESTS = $(patsubst %,tests/pipespec/test_%.py,conformance inputs padding generate cache forward attention rope serve_requests families gguf_architectures recurrent)
OLDEST = $(shell sed -n 's/^transformers==//p' constraints-oldest.txt)
.venv-oldest/stamp: constraints-oldest.txt $(DEV)
	@echo "making the environment .venv-oldest"
	$(PY) -m venv --clear .venv-oldest
	$(PY) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' > \
	  $$(.venv-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main_environment.pth
	.venv-oldest/bin/python -m pip --disable-pip-version-check install -q -c constraints-oldest.txt transformers
	@touch $@

test-oldest: .venv-oldest/stamp native
	.venv-oldest/bin/python -c 'import transformers; assert transformers.__version__ == "$(OLDEST)", transformers'
	PYTHONPATH=$(CURDIR):$(CURDIR)/python .venv-oldest/bin/python -m pytest $(AT_ONCE) $(OLDEST_TESTS)

# Texts of small real models, which `python -m tools.real_models $(REAL)` makes. Not part of `make test`.
REAL ?= build/real
test-real: $(DEV) native
	PIPESPEC_REAL_MODELS=$(abspath $(REAL)) $(PY) -m pytest -m real --durations=0 --durations-min=1

bench: $(RUNTIME) native
	rm -rf build/bench/generate
	$(PY) -m bench.run --out build/bench/generate --repeats 3

# Fails where README or docs quote figures of bench/results that are older than the code that they measure. Needs the history.
check-results:
	$(PYTHON) -m bench.check_results

# The documentation site, in build/site. A broken link or a missing docstring reference is an error.
docs: $(DEV)
	$(PY) -m mkdocs build --strict

# What a user's `pip install .` does: build isolation, no torch in the environment, no CUDA. Not part of `make test`.
check-clean-build:
	rm -rf build/clean && mkdir -p build/clean
	git ls-files -coz --exclude-standard | xargs -0 cp --parents -t build/clean
	$(PYTHON) -m venv build/clean/env
	cd build/clean && start=$$(date +%s) && PIPESPEC_CUDA=off PIPESPEC_BUILD_DIR= PIPESPEC_WERROR=off env/bin/python -m pip install --no-deps . && \
	  echo "built and installed in $$(( $$(date +%s) - start )) s"
	cd / && $(CURDIR)/build/clean/env/bin/python -c "\
	import importlib.util, pipespec_kernels; from pipespec_kernels import _native; \
	assert importlib.util.find_spec('torch') is None; print(_native.build_info())"

clean:
	rm -rf build .venv .venv-oldest *.egg-info pipespec_kernels/*.so .pytest_cache .mypy_cache .ruff_cache
