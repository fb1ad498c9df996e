# Each target sets up .venv first where that has not been done. `make` alone lists the targets.
#   ARGS="…"      passed on:  make train ARGS="model=mlp accumulation.factor=8"
#   PYTHON=…      the interpreter that .venv is made with, 3.11 to 3.13

PYTHON ?= python3
ARGS   ?=
# TensorFlow's CUDA libraries too, where an NVIDIA driver answers: that lock begins with the other one.
LOCK   := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements-gpu.lock || echo requirements.lock)
LOCKS  := $(sort requirements.lock $(LOCK))
STAMP  := .venv/$(LOCK).installed
PEERS  := .venv-peers/requirements-peers.lock.installed
RUN    := .venv/bin/python -m
# Tests that share something go to one worker, see tests/conftest.py; all others to the first that is free. Tests wait
# for processes of theirs, so there are more workers than cores, and more still where tests wait for more processes.
PYTEST := $(RUN) pytest -n $(shell $(PYTHON) -c 'import os; print(3 * os.cpu_count() // 2)') --maxprocesses 4 \
	--dist loadscope --durations 10
SLOWLY := -n 4 --no-loadscope-reorder # but in the order of tests/conftest.py
COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links
# PyTorch for Linux on PyPI links CUDA's libraries and is not imported without them; it runs on a CPU without these.
UNUSED := $(addprefix --no-emit-package=,triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cuda-cccl nvidia-nvtx)
# What requirements.lock pins already, as it stands when the recipe comes to it.
IN_BASE = $$(sed -n 's/^\([A-Za-z0-9._-]*\).*==.*/--no-emit-package=\1/p' requirements.lock)

# Containers often set it, and then each of the processes compiles this package, and pytest rewrites its tests, anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-gpu soak check bench peers docs dist ui screenshot lock clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## .venv from the lock, and this project in it

train: $(STAMP) ## train: digits, a small CNN, effective batch 128, factor 4; ARGS="overrides"
	$(RUN) pipeline train $(ARGS)

test: $(STAMP) ## what is guaranteed, each at its cheapest place: ten minutes on two cores
	$(PYTEST) -m "not slow and not soak" $(ARGS)

test-all: $(STAMP) ## with what takes long: a browser, Slurm, benchmarks, whole experiments
	$(PYTEST) $(SLOWLY) -m "not soak" $(ARGS)

test-gpu: $(STAMP) ## what has to be right on a GPU, in about five minutes
	PIPELINE_TEST_DEVICE=gpu $(RUN) pytest tests/gpu $(ARGS)

soak: $(STAMP) ## hundreds of kills and outages, and the rest of long tables
	$(PYTEST) -m soak $(ARGS)

check: $(STAMP) ## formatter, linter and type checker, changing nothing
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy

bench: $(STAMP) ## the benchmarks, as ratios
	$(RUN) benchmarks $(ARGS)

peers: $(PEERS) ## .venv-peers: what `make bench` and docs/conformance.md compare with: PyTorch, optax and others; 6 GB

docs: $(STAMP) ## the documentation site, in docs/_build; warnings and dead links are errors
	$(RUN) sphinx --fail-on-warning --keep-going --nitpicky --quiet $(ARGS) docs docs/_build

dist: $(STAMP) ## a wheel of this project, in dist/
	$(RUN) pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

ui: $(STAMP) ## MLflow's UI on the default store, on 127.0.0.1
	$(RUN) pipeline ui $(ARGS)

screenshot: $(STAMP) ## the README's picture of a run, in a real browser; ARGS=sweep, ARGS=trajectories the others
	$(RUN) docs.screenshot $(ARGS)

lock: ## requirements*.lock again from pyproject.toml; ARGS=--upgrade for newer versions
	$(COMPILE) --group dev pyproject.toml -o requirements.lock $(ARGS)
	$(COMPILE) --group dev --extra gpu $(IN_BASE) pyproject.toml -c requirements.lock -o requirements-gpu.lock $(ARGS)
	sed -i '1i -r requirements.lock' requirements-gpu.lock
	$(COMPILE) --group pyproject.toml:peers $(UNUSED) -c requirements.lock -o requirements-peers.lock $(ARGS)

clean: ## removes .venv, .venv-peers, caches and build outputs; keeps runs and stores
	rm -rf .venv .venv-peers dist docs/_build .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip of the outer interpreter installs into .venv, so that a Python without ensurepip will do. The lock brings
# .venv a pip of its own. The project is installed in place: what is edited is what runs. A copy of what was installed
# stays in .venv: a run records which lock that is.
$(STAMP): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 to 3.13 is needed, for which TensorFlow has wheels, this is %d.%d: make PYTHON=…" % sys.version_info[:2] if not (3, 11) <= sys.version_info < (3, 14) else 0)'
	@echo "Setting up .venv from $(LOCK): a few minutes the first time."
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python .venv/bin/python install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@cat $(LOCKS) > $@

# Without what is left out of the lock, which pip would ask for.
$(PEERS): requirements-peers.lock
	@echo "Setting up .venv-peers from $<: some minutes and 6 GB."
	$(PYTHON) -m venv --without-pip .venv-peers
	$(PYTHON) -m pip --python .venv-peers/bin/python install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@
