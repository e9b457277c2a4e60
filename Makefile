# make demo    train a small GPT beside torch's DDP, bitwise; stop a rank, and see who names it; send 8 bits
# make demo-elastic   three replicas under torchft, one of which is killed every few seconds
# make test    run the quick tests, in which every part is represented (four minutes on two cores)
# make test-slow   all the others that CI runs;  make test-nightly   those that take it too long;  make mutants   how sharp all are
# make test-in-place   torch's parity and the contract of exchanges again, with fastddp.replicate in place of the wrapper
# make test-frameworks   install Accelerate, Lightning and Transformers, and train with them (tests/frameworks)
# make test-sanitized   the tests of everything in C++ again, under AddressSanitizer and UBSan (twenty minutes)
# make test-threads   the tests of what has several threads, under ThreadSanitizer (an hour)
# make docs    build the site of docs/ in out/site, strictly: dead links are errors
# make lint    check Python (ruff, mypy) and C++ (clang-format);  make format  fixes what can be fixed
# make test-gpu, make bench-gpu   what takes a GPU: tests (tests/gpu), and everything in order of worth (bench.gpu.first_run)
# make gpu-carry TORCH=2.11.0 PYTHON=python3.12   a folder for a machine with a GPU that can fetch nothing: build/first-run
# make nsight-carry   Nsight Systems beside it, from Debian (bench/gpu/nsight.py)
# make wheels  build and try a wheel in dist/ with the C++ part for each torch of TORCHES;  make sdist  the same for the sources
# make build   only set up: .venv with pinned packages, and the extensions fastddp._C and fastddp._pages
# make clean   remove what was built;  make distclean  removes the environments too
#
# Every target sets up what it needs first, once: a second run starts at once.

# TORCH names another torch, for any target: `make test TORCH=2.15.0`. It has an environment of its own,
# .venv-torch-2.15.0, into which fastddp is installed: .venv and what was compiled in place for it stay as they are.
#
# TORCHES are the releases that a wheel has the C++ part for. `make wheels VENV=build/venv-3.12 PYTHON=python3.12` makes one for
# another Python.
#
# PYTHON creates .venv. Given to a GPU target, it is the interpreter that runs it, with the packages that it holds: nothing
# is fetched, fastddp is compiled for its torch, and it is left as it was. RANKS is for `make demo`; empty means one a GPU,
# or 2 where there is none. WORKERS run the tests. ARGS are passed on, as in `make demo ARGS="--steps 50"` and `make test ARGS="-k pack"`.
TORCH :=
TORCHES := 2.11.0 2.13.0 2.15.0
PYTHON ?= python3
RANKS ?=
ARGS ?=
WORKERS ?= 3

VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
# Tests wait more than they compute: three processes of pytest keep two cores busy.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
PIP = $(BIN)/python -m pip --disable-pip-version-check install --constraint $(CONSTRAINTS)
SOURCES := $(sort $(shell find csrc -name '*.cpp' -o -name '*.h'))
CPP := $(SOURCES) $(wildcard tests/support/*.cpp tests/fake_cuda/*.cpp tests/fake_cuda/*.h examples/codec/*.cpp bench/*.cpp)
# Tests take what torch declares as optional or as one of two types (a gradient, an attribute of a module) for what it is.
TESTS_MAY := arg-type assignment call-overload comparison-overlap dict-item index operator union-attr var-annotated

# For another torch than the pinned one, fastddp is copied as a wheel would be.
ifeq ($(TORCH),)
CONSTRAINTS := constraints.txt
INSTALL := --editable
INSTALLED := $(SOURCES)
else
CONSTRAINTS := $(VENV)/constraints.txt
INSTALL :=
INSTALLED := $(SOURCES) $(wildcard fastddp_command.py fastddp/*.py* fastddp/*/*.*) $(wildcard kernels/*.py)
endif

# Where the GPU targets find fastddp: in the environment, or, for an interpreter that was named, in a folder of its own.
ifneq ($(TORCH),)
GPU_READY = $(READY)
GPU_SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
GPU_PYTHON = PYTHONSAFEPATH=1 PYTHONPATH=$(GPU_SITE):$(CURDIR) $(CURDIR)/$(BIN)/python
else ifeq ($(origin PYTHON),file)
GPU_READY = $(READY)
GPU_PYTHON = $(CURDIR)/$(BIN)/python
else
GPU_READY = gpu-site
# Without importing torch, which takes seconds, and is asked for several times.
GPU_SITE = $(CURDIR)/build/site-$(shell $(PYTHON) -c 'import importlib.util, runpy, sys; \
    folder = importlib.util.find_spec("torch").submodule_search_locations[0]; \
    version = runpy.run_path(folder + "/version.py")["__version__"]; \
    print(f"{sys.implementation.cache_tag}-torch-{version}")')
GPU_PYTHON = PYTHONSAFEPATH=1 PYTHONPATH=$(GPU_SITE):$(CURDIR) $(PYTHON)
endif

# The stamps lie in the environment, so that they go where it goes.
TOOLCHAIN := $(VENV)/.toolchain
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
DOCS := $(VENV)/.docs

.DEFAULT_GOAL := help
.PHONY: help build demo demo-elastic test test-slow test-in-place test-nightly test-frameworks mutants test-sanitized test-threads test-gpu bench-gpu gpu-site gpu-carry nsight-carry wheels sdist docs lint format clean distclean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/s/^# //p' Makefile

build: $(READY)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fastddp needs Python 3.11 or newer, and \
	$(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# What a torch requires in versions of its own is left to it, if it was named.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/pyvenv.cfg
	@(echo 'torch==$(TORCH)'; sed -E '/^(torch|triton|setuptools)==/d' constraints.txt) > $@

# Everything that setup.py needs at the moment it is read. torch comes by its exact pin, never by a range.
$(TOOLCHAIN): $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	@echo "Installing torch and the build tools into $(VENV) ..."
	@$(PIP) torch ninja 'setuptools>=77' wheel
	@touch $@

# Everything else, and fastddp itself, for the pinned torch in place: Python files are used where they lie, C++ is compiled
# into fastddp/.
$(READY): $(TOOLCHAIN) $(INSTALLED) setup.py pyproject.toml
	@echo "Installing the rest and compiling fastddp._C ..."
	@$(PIP) --quiet --no-build-isolation $(INSTALL) '.[bench,demo,test,lint]'
	@touch $@

# What tests/frameworks needs beside everything else; large, and so only where it is asked for.
$(FRAMEWORKS): $(READY)
	@echo "Installing Accelerate, Lightning and Transformers ..."
	@$(PIP) --quiet --no-build-isolation $(INSTALL) '.[frameworks]'
	@touch $@

# What builds the site. Docstrings are read and not imported, so that neither torch nor fastddp is needed.
$(DOCS): $(CONSTRAINTS) pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "Installing MkDocs ..."
	@$(PIP) --quiet $$($(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# OMP_NUM_THREADS only spares torchrun's warning: the script sets its own number of threads.
demo: $(READY)
	@ranks="$(RANKS)"; \
	ranks=$${ranks:-$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')}; \
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$$ranks \
	    examples/train_gpt.py $(ARGS)

demo-elastic: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python examples/elastic.py $(ARGS)

# The command and not `python -m pytest`: that would put this folder on sys.path, where kernels/ shadows another package.
test: $(READY)
	@$(PYTEST) $(ARGS)

test-slow: $(READY)
	@$(PYTEST) --tier slow $(ARGS)

# With fastddp.replicate as the wrapper.
test-in-place: $(READY)
	@$(PYTEST) --in-place tests/contract $(addprefix tests/torch_compat/test_,torch_parity.py drop_in.py torch_issues.py composability.py) $(ARGS)

test-nightly: $(READY)
	@$(PYTEST) --tier nightly $(ARGS)

test-frameworks: $(FRAMEWORKS)
	@OMP_NUM_THREADS=1 $(BIN)/pytest --tier all tests/frameworks $(ARGS)

# Works on a copy of what is committed.
mutants: $(READY)
	@$(BIN)/python tests/mutants/run.py $(ARGS)

# The extension in place is left alone: what the sanitizers need is compiled into build/.
test-sanitized: $(READY)
	@$(BIN)/python tests/support/sanitized.py memory $(ARGS)

test-threads: $(READY)
	@$(BIN)/python tests/support/sanitized.py threads $(ARGS)

# Compiles what has changed for the torch of PYTHON.
gpu-site:
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-build-isolation --upgrade \
	    --target $(GPU_SITE) .

test-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m pytest --tier all tests/gpu $(ARGS)

bench-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m bench.gpu.first_run --out out/gpu $(ARGS)

# An environment of its own, since another Python may have made that of TORCH. The cache of Triton lies where it will be used, without what
# earlier calls have left there.
gpu-carry:
	@test -n "$(TORCH)" || { echo "Name the torch of the machine with the GPU: make gpu-carry TORCH=2.11.0 PYTHON=python3.12"; exit 1; }
	@$(MAKE) --no-print-directory build VENV=build/carry-torch-$(TORCH)
	@rm -rf /tmp/fastddp-first-run/triton
	@cd build/carry-torch-$(TORCH) && TRITON_CACHE_DIR=/tmp/fastddp-first-run/triton PYTHONSAFEPATH=1 \
	    PYTHONPATH=$$(echo $$PWD/lib/python3*/site-packages):$(CURDIR) bin/python -m bench.gpu.carry $(ARGS)

nsight-carry:
	@$(PYTHON) bench/gpu/nsight.py carry

# Without the rest of the environment: what is tried is what was built, with torch alone.
wheels: $(TOOLCHAIN)
	@$(BIN)/python tests/support/packaging_check.py wheel $(TORCHES)

sdist: $(TOOLCHAIN)
	@$(BIN)/python tests/support/packaging_check.py sdist

# The variable spares a notice of the theme's that MkDocs has a successor.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Built out/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fastddp fastddp_command.py kernels bench examples
	$(BIN)/mypy --cache-dir .mypy_cache/tests $(TESTS_MAY:%=--disable-error-code=%) tests
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist out fastddp.egg-info fastddp/extension/torch-* .venv/.ready .venv-torch-*/.ready
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-torch-*
