# `make demo` shows what autospec does, `make test` checks it. Both need python3 >= 3.11 (with venv and pip) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
TORCH := 2.13.0
COMPAT := .venv-compat
VLLM := .vllm
AXE := tests/axe
PROMPTS ?= $(AUTOSPEC_PROMPTS)

export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export CUSTOM_COMPILE_COMMAND := make lock

PIP := $(BIN)/python -m pip -qq
PYTHON_VERSION := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)

# Stamps: what is newer than its stamp is installed again, and another Python starts over.
PYTHON_READY := $(VENV)/.python-$(PYTHON_VERSION)
RUNTIME_READY := $(VENV)/.runtime
DEV_READY := $(VENV)/.dev
VLLM_READY := $(VLLM)/.ready
AXE_READY := $(AXE)/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: $(COMPAT)/%/.ready
.PHONY: help setup demo test test-compat test-vllm vllm vllm-suffix bench bench-peers bench-prompts bench-verification profile lint format types lock model postgres browser compiler axe clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV_READY) ## make .venv with autospec and the development tools

demo: model ## speed up a small model on this machine and show what was gained (without development tools)
	$(BIN)/autospec demo

test: $(DEV_READY) lint types model postgres browser compiler axe ## lint, format check, types, import contracts, all tests
	$(BIN)/python -m pytest

test-compat: compat-5.17 ## the decoder's tests on transformers 5.17 and on the newest 5.x
	@newest=$$($(PIP) install --dry-run --ignore-installed --no-deps --report - 'transformers<6' | $(BIN)/python -c \
	  'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null) \
	  || { echo "make test-compat: cannot ask the package index for the newest transformers 5.x"; exit 1; }; \
	if grep -q "^transformers==$$newest " requirements.lock; then \
	  echo "transformers $$newest is the newest 5.x and the locked one: make test covers it"; \
	else $(MAKE) --no-print-directory "compat-$$newest"; fi

vllm: $(VLLM_READY) ## make .vllm, an environment of its own with vLLM on the CPU (about 3 GB)

vllm-suffix: $(VLLM)/.suffix ## vLLM's own suffix decoding in .vllm, which experiments/26_vllm measures: builds a package

test-vllm: $(VLLM_READY) model postgres ## the tests with real vLLM on the CPU (make test has those without it)
	OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 $(VLLM)/bin/python -m pytest -W default tests/vllm

bench: bench-prompts bench-peers model ## autospec beside generate, transformers and two packages, with speed-ups and memory: PROMPTS=FILE, questions of Spec-Bench (idle machine; BENCH=--quick: a short look)
	$(BIN)/python experiments/23_benchmark/run.py --prompts "$(PROMPTS)" $(BENCH)

# Looked for first, as building the environments takes long.
bench-prompts:
	@test -f "$(PROMPTS)" || { echo "make bench: $(or $(PROMPTS),no prompts): say make bench PROMPTS=FILE, or set AUTOSPEC_PROMPTS: questions \
	of Spec-Bench, JSON lines with question_id, segment and turns (experiments/04_spec_bench)"; exit 1; }

bench-peers: $(DEV_READY) ## environments of the packages that make bench measures beside autospec, in .bench
	$(BIN)/python experiments/23_benchmark/run.py --build

bench-verification: $(DEV_READY) ## what verifying a block costs in microseconds, beside transformers' assisted decoding (idle machine)
	$(BIN)/python experiments/07_verification/run.py $(if $(OUT),--out $(OUT)) $(if $(DEVICE),--device $(DEVICE))

profile: $(DEV_READY) model ## where a block's time goes: forwards, drafts, choosing tokens, policy, the rest (idle machine)
	$(BIN)/python experiments/20_profile/run.py $(if $(OUT),--out $(OUT)) $(if $(SUBJECTS),--subjects $(SUBJECTS))

lint: $(DEV_READY) ## ruff, format check, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(DEV_READY) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_READY) ## mypy, strict
	$(BIN)/mypy

# torch stays at a release that has a CPU build; its local label (+cpu) exists on few indexes, so it is taken off.
lock: $(DEV_READY) ## resolve both lock files from pyproject.toml (UPGRADE=1: to the newest releases)
	$(BIN)/pip-compile $(LOCK_OPTIONS) --extra dashboard --output-file requirements.lock pyproject.toml
	sed -i "s/^\(torch==[0-9.]*\)+cpu/\1    /" requirements.lock
	$(BIN)/pip-compile $(LOCK_OPTIONS) --extra dashboard --extra metrics --extra otel --extra parquet --extra postgres --extra dev \
	  --constraint requirements.lock --output-file requirements-dev.lock pyproject.toml
	sed -i "s/^\(torch==[0-9.]*\)+cpu/\1    /" requirements-dev.lock
LOCK_OPTIONS = --quiet --strip-extras --allow-unsafe --annotation-style line --no-emit-options --no-emit-index-url \
  --no-emit-find-links --no-emit-trusted-host $(if $(UPGRADE),--upgrade) --upgrade-package torch==$(TORCH)

clean: ## remove environments, caches and build output (the fetched model stays in the user's cache)
	rm -rf $(VENV) $(COMPAT) $(VLLM) .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf $(AXE)/node_modules
	find autospec policies telemetry tests experiments -name __pycache__ -prune -exec rm -rf {} +

# The tests of the PostgreSQL store start a server of their own; where its binaries are missing they are installed.
postgres:
	@command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends postgresql >/dev/null; } \
	  || echo "make test: no PostgreSQL server here and it cannot be installed: its tests are skipped, which fails in CI"

# The dashboard's tests look at its pages in Chromium, headless.
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
	      chromium chromium-driver fonts-dejavu-core >/dev/null; } \
	  || echo "make test: no Chromium with its driver here and it cannot be installed: its tests are skipped, which fails in CI"

# torch.compile calls a C++ compiler on a CPU.
compiler:
	@command -v $${CXX:-g++} >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends g++ >/dev/null; } \
	  || echo "make test: no C++ compiler here and it cannot be installed: tests of compiled forwards are skipped, which fails in CI"

# axe-core checks that everyone can use these pages. Version and hash stand in tests/axe/package-lock.json.
axe: $(AXE_READY)

$(AXE_READY): $(AXE)/package-lock.json
	@{ command -v npm >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends npm >/dev/null; }; } \
	  && npm ci --prefix $(AXE) --ignore-scripts --no-audit --no-fund --no-update-notifier --silent \
	  || echo "make test: axe-core cannot be had by npm: tests of accessibility are skipped, which fails in CI"

model: $(RUNTIME_READY)
	$(BIN)/autospec models fetch $(MODEL)

$(PYTHON_READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "autospec needs Python 3.11 or \
	newer, and $(PYTHON) is $(or $(PYTHON_VERSION),not there): say make PYTHON=/path/to/python3.11"; exit 1; }
	@test "$$($(BIN)/python -c 'import pip, platform; print(platform.python_version())' 2>/dev/null)" = "$(PYTHON_VERSION)" \
	  || $(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUNTIME_READY): requirements.lock pyproject.toml $(PYTHON_READY)
	$(PIP) install --requirement requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV_READY): requirements-dev.lock $(RUNTIME_READY)
	$(PIP) install --requirement requirements-dev.lock
	@touch $@

# A small environment in front of the main one: pip installs what that transformers needs otherwise, and nothing else.
$(COMPAT)/%/.ready: $(DEV_READY)
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	path='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  printf '%s\n' "$$($(BIN)/python -c "$$path")" "$(CURDIR)" > "$$($(@D)/bin/python -c "$$path")/main.pth"
	$(@D)/bin/python -m pip -qq install 'transformers==$*.*'
	@touch $@

compat-%: $(COMPAT)/%/.ready model
	@$(COMPAT)/$*/bin/python -c 'import transformers; print("decoder tests on transformers", transformers.__version__)'
	$(COMPAT)/$*/bin/python -m pytest tests -m compat

# The three that vLLM asks for and text needs none of: their builds fit another torch, and importing them fails.
$(VLLM_READY): requirements-vllm.txt pyproject.toml
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	nice $(VLLM)/bin/python -m pip -qq install --requirement requirements-vllm.txt
	$(VLLM)/bin/python -m pip -qq uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip -qq install --no-deps --no-build-isolation --editable .
	@touch $@

# There is no wheel of it. Its build asks for a torch of its own, which it does not link, and so has the one that is here; what
# it is built with stays out of the environment.
$(VLLM)/.suffix: $(VLLM_READY) | compiler
	$(VLLM)/bin/python -m pip -qq install --no-warn-conflicts --upgrade --target $(VLLM)/build cmake nanobind==2.9.2 grpcio-tools
	PATH="$(abspath $(VLLM))/build/bin:$$PATH" PYTHONPATH="$(abspath $(VLLM))/build" \
	  $(VLLM)/bin/python -m pip -qq install --no-deps --no-build-isolation arctic-inference==0.1.1
	rm -rf $(VLLM)/build
	@touch $@
