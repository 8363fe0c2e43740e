# Everything runs in .venv, which `make venv` creates and fills. Needs python3 (3.10 or newer), g++ and make.

PYTHON ?= python3
# installed before the package, so that another build of torch can be chosen: make venv TORCH="torch==2.14.1"
TORCH ?= torch==2.13.0
# handed on to the demo, the tests or the benchmarks: make test ARGS="-k layout"
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test bench gpu-check static-report lint clean

help: ## show this list
	@echo "usage: make TARGET [PYTHON=python3] [TORCH=$(TORCH)] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY) ## create .venv with the package and its development tools; again only when pyproject.toml changes

demo: $(READY) ## run examples/demo.py, which writes to demo_output/
	$(PY) examples/demo.py $(ARGS)

test: $(READY) ## run the tests
	@echo "[1/2] tests, a process a core"
	@$(PY) -m pytest -q -rs --durations=10 -n auto --maxprocesses 4 --dist worksteal -m "not timing" $(ARGS); \
	a=$$?; [ $$a = 0 ] || [ $$a = 5 ] || exit $$a; \
	echo "[2/2] tests that measure time, alone"; \
	$(PY) -m pytest -q -rs -m timing $(ARGS); \
	b=$$?; [ $$b = 0 ] || [ $$b$$a = 50 ] || exit $$b

bench: $(READY) ## measure against other implementations, in one run
	$(PY) -m benchmarks.run $(ARGS)

# not in .venv: the machine has torch with CUDA and numpy, and needs neither tilelang nor a compiler
gpu-check: ## check and time everything on an NVIDIA GPU, with PYTHON's torch; writes docs/measured/
	$(PYTHON) -m benchmarks.gpu_check --save docs/measured $(ARGS)

static-report: $(READY) ## registers, spills, traffic and bank conflicts of the CUDA kernels, host cost of a call; no GPU
	$(PY) -m benchmarks.static_report $(ARGS)
	$(PY) -m benchmarks.host_cost

lint: $(READY) ## check style and types; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath $(PY)

clean: ## remove caches, builds and demo_output; .venv stays
	rm -rf build dist *.egg-info demo_output .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; this is " + sys.version.split()[0] + ". Name another one with PYTHON=...")'
	@command -v g++ >/dev/null || { echo "g++ not found: it compiles the CPU kernels"; exit 1; }
	@echo "[1/4] creating .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv .venv
	@echo "[2/4] installing $(TORCH) (the longest step: hundreds of megabytes, more with CUDA)"
	@$(PIP) install $(TORCH)
	@echo "[3/4] installing linattn-tl with its development tools"
	@$(PIP) install -e '.[dev]'
	@echo "[4/4] checking the imports"
	@$(PY) -c 'import torch, tilelang, linattn_tl; print(f"ready: torch {torch.__version__}, tilelang {tilelang.__version__}")'
	@touch $@
