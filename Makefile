# Needs Python 3.11 or newer, make, and a network to install packages. Nothing else has to be there.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip would compile every file that it unpacks, most of which nothing ever imports. What the stack imports is
# compiled by importing it once, before processes that start together would each do so.
INSTALL := $(PIP) install --quiet --no-compile
IMPORTED := devstack.up, services.router.__main__, services.kvstore.__main__, services.ledger.__main__, \
	services.prefill.service, services.decode.service, services.attention_pool.service
# Tests share two cores with the stacks that they start.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
ARGS ?=
# A file's tests are one worker's, so that the stacks they share are started once (tests/conftest.py, for a stack
# that files share). Files begin in the order of `testpaths`: what takes longest first, so that no worker is left
# with it at the end; those that mostly wait among them.
WORKERS ?= 3
# Hundreds of processes are started, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install up test test-slow simulate check bench bench-gpu protos docs compose-test clean

# What a target does stands behind it, for this list.
help: ## lists the targets; so does plain `make`
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '  make %-13s %s\n' "$$target" "$$text"; done

install: $(STAMP) ## makes .venv with all that is needed; the other targets do so by themselves

# torch comes first: a machine without an NVIDIA GPU gets the CPU build. The local version +cpu can only be met
# by such a build, so where pip finds none by itself nothing large is fetched before the CPU index is asked.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvcommons needs Python 3.11 or newer; none found (set PYTHON=...)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@if $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(not m.version("torch").startswith("$(TORCH)"))' 2>/dev/null; \
	then :; \
	elif [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then \
		echo "Installing torch $(TORCH)"; $(INSTALL) "torch==$(TORCH)" -c constraints.txt; \
	else \
		echo "Installing torch $(TORCH) for the CPU"; \
		$(INSTALL) --no-deps "torch==$(TORCH)+cpu" 2>/dev/null || \
		$(INSTALL) --no-deps "torch==$(TORCH)+cpu" --index-url $(TORCH_CPU_INDEX); \
	fi
	@echo "Installing kvcommons"
	@$(INSTALL) -c constraints.txt -e ".[all,dev]"
	@$(BIN)/python -c "import $(IMPORTED)"
	@$(BIN)/python -m kvcommons.attention.native.build >/dev/null
	@touch $@

up: $(STAMP) ## starts the whole stack on this machine; ARGS="--decode 2" (kvcommons up --help)
	@exec $(BIN)/kvcommons up $(ARGS)

# A worker that dies is not replaced: xdist 3.8 waits for ever for the tests that it gives its successor.
test: $(STAMP) ## the default tests; ARGS=tests/unit/rblock for some of them
	$(ONE_THREAD) $(BIN)/python -m pytest -m "not slow and not compose" -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0 $(ARGS)

# What drives a Chromium is installed here; the Chromium has to be there, else tests of the page are skipped. So is
# the compiler of the kernels for GPUs, which needs no GPU. Two processes at once, a file in one of them: WORKERS=0
# runs one test after another.
test-slow: WORKERS = 2
test-slow: $(STAMP) ## those that take longer, clients of other people, and the page in a Chromium
	@$(INSTALL) -c constraints.txt -e ".[browser,cuda]"
	$(ONE_THREAD) $(BIN)/python -m pytest -m "slow and not compose" -n $(WORKERS) --dist loadfile -rs \
	  --max-worker-restart 0 $(ARGS)

# Thousands of seeded crash schedules; SEED=n replays one, SCHEDULES=n says how many, KIND=commons which.
simulate: $(STAMP) ## seeded schedules with faults; SEED=n, SCHEDULES=n, KIND=commons
	@$(ONE_THREAD) $(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(KIND),--kind $(KIND))

compose-test: $(STAMP) ## builds the images and drives compose.yaml
	$(BIN)/python -m pytest -m compose --timeout 1800 tests/compose $(ARGS)

check: $(STAMP) ## lint, format, types, import contracts, generated files, dead links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest -q tests/unit/test_repository.py

bench: $(STAMP) ## kvcommons bench sessions; ARGS=first-token for another one
	$(BIN)/kvcommons bench $(or $(ARGS),sessions)

# Each of them by itself: one that fails leaves the others. vLLM is asked, too, where it is installed.
GPU_MODEL ?= 8b
# GPU_RUN="python3 -m devstack": a machine that has all but a network has no use for .venv.
bench-gpu: $(if $(GPU_RUN),,$(STAMP)) ## what is measured on an NVIDIA GPU, into build/gpu; GPU_MODEL=34m for a small one
	@mkdir -p build/gpu
	@failed=; for one in gpu "mixed-iterations --device cuda --random-model $(GPU_MODEL)" \
	  "peers --device cuda --random-model $(GPU_MODEL) --with transformers $(shell command -v vllm >/dev/null && echo vllm) --cells 3 6 8 --rounds 4 --answer 64" \
	  "overlap --device cuda --random-model $(GPU_MODEL) --load-share 0 --save-share 0 --history 4096 --new 512 --prompts 4096"; do \
	  name=build/gpu/$${one%% *}; echo "kvcommons bench $$one: $$name.json"; \
	  $(or $(GPU_RUN),$(BIN)/kvcommons) bench $$one --json $$name.json > $$name.log 2>&1 || { tail -n 3 $$name.log; failed=1; }; \
	done; test -z "$$failed"

protos: $(STAMP) ## makes kvcommons/pb anew after a change in protos
	$(BIN)/python protos/generate.py

# The site of the pages in docs, made anew.
docs: $(STAMP) ## makes the site of the pages in docs, in build/site
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -q --fail-on-warning -b html docs build/site
	@echo "The site begins at build/site/index.html"

clean: ## removes .venv, build and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
