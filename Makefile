# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first, once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
READY := .venv/.ready-$(KEY)
LINT = $(BIN)/ruff check .; $(BIN)/ruff format --check --quiet .; $(BIN)/mypy
# All tests on ranks go to one worker, with their pool (tests/conftest.py); the others are shared out by file.
WORKERS := -n 2 --dist loadgroup --no-loadscope-reorder
PEERS_READY := .venv-peers/.ready-$(KEY)
RAY_READY := .venv-ray/.ready

# Held for every pip call, also those made inside builds: nothing may bring another torch.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images often forbid byte code, and every process would compile the whole package again: seconds each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all slowest test-gpu test-nccl test-services peers test-hub lint sizes docs site setup clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(READY) ## the complete cycle: measure, plan, train, serve, load, diagnose, improve; a report
	@$(BIN)/armillary demo

# While types are checked on one core, the other compiles the tests, which both workers would do otherwise.
test: $(READY) ## lint, types and the tests that any machine can run
	@trap 'kill $$(jobs -p) 2>/dev/null || true' EXIT; \
	$(BIN)/pytest -q --collect-only > /dev/null 2>&1 & \
	$(LINT); wait; $(BIN)/pytest -q $(WORKERS)

test-all: $(READY) lint ## also the slow tests
	@$(BIN)/pytest -q $(WORKERS) -m 'not gpu and not peers and not services and not hub and not slow'
	@$(BIN)/pytest -q -m 'slow and not gpu and not peers and not services and not hub'  # one after the other: some judge the clock

slowest: $(READY) ## the tests of `make test` that take more than 5 s
	@$(BIN)/pytest -q $(WORKERS) --durations=100 --durations-min=5

test-gpu: $(READY) ## the tests that need an accelerator
	@$(BIN)/pytest -q -m gpu

test-nccl: $(READY) ## on a machine with two GPUs: the agreement rows over NCCL, as a table to paste into docs/parallel.md
	@$(BIN)/python -m tests.ranks_on_gpus --ranks 2

test-services: $(READY) $(RAY_READY) ## with real services: Redis, nginx, Slurm, Chromium and LibreOffice from Debian, Ray from PyPI
	@$(call install_services)
	@$(BIN)/pytest -q -m services

peers: $(PEERS_READY) ## against other people's programs, in a venv of their own
	@.venv-peers/bin/python -m pytest -q -m peers

test-hub: $(PEERS_READY) ## published quantized checkpoints against transformers, with internet access (about 4 GB)
	@.venv-peers/bin/python -m pytest -q -m hub

lint: $(READY)
	@$(LINT)

sizes: ## lines per file
	@find armillary -name '*.py' -size +0 -exec wc -l {} + | sort -n

docs: $(READY) ## regenerate the reference pages; EXERCISES=all (or names) also runs exercises and shows what has changed
	@$(BIN)/python docs/generate.py
	@test -z '$(EXERCISES)' || $(BIN)/python docs/run_exercises.py $(EXERCISES)

site: $(READY) docs ## the documentation as a site in build/site, by mkdocs-material
	@$(BIN)/python -m pip install --quiet 'mkdocs-material>=9.5,<10'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'open build/site/index.html, or: $(BIN)/mkdocs serve'

setup: $(READY) ## only set up .venv

clean: ## remove caches and build output (.venv stays)
	@rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find armillary tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@$(call check_python)
	@$(call install,.venv,'.[torch$(comma)data$(comma)http$(comma)dev]')
	@$(BIN)/python -m compileall -q armillary # commands outside make may be forbidden to keep byte code: 0.15 s of a plan
	@touch $@
	@echo 'ready: $(BIN)/armillary --help'

$(PEERS_READY):
	@$(call check_python)
	@$(call install,.venv-peers,'.[torch$(comma)data$(comma)http$(comma)dev]' bitsandbytes kubernetes kubernetes-validate peft mlflow wandb anthropic 'lm-eval[api$(comma)hf]' guidellm auto-round)
	@.venv-peers/bin/python -m pip install --quiet --no-deps autoawq # its dependencies are those of older releases of transformers
	@.venv-peers/bin/python -m pip install --quiet gptqmodel optimum || echo 'note: no gptqmodel, so its files are not tested, and GPTQ and AWQ of the Hub are skipped'
	@bash benchmarks/install_llama_cpp.sh .venv-peers
	@touch $@

$(RAY_READY): $(READY) # ray in front of what .venv has
	@$(call check_python)
	@$(PYTHON) -m venv .venv-ray && PIP_CONSTRAINT= .venv-ray/bin/pip install --quiet 'ray[serve]'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/armillary.pth"
	@touch $@

comma := ,

define check_python
fail() { echo "error: $$1" >&2; exit 2; }; \
command -v $(PYTHON) >/dev/null || fail '$(PYTHON) not found; install Python 3.11 or newer (Debian: apt install python3 python3-venv)'; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || fail "$$($(PYTHON) --version) is too old; install Python 3.11 or newer, or name it: make PYTHON=python3.12 …"; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
  || fail 'this Python cannot make virtual environments; install its venv module (Debian: apt install python3-venv)'; \
{ command -v c++ || command -v g++ || command -v clang++; } >/dev/null \
  || echo 'note: no C++ compiler, so compiled CPU code is off and its tests skip (Debian: apt install g++ python3-dev)'
endef

# Nothing is started: tests run each service themselves, on a free port and in a folder of their own.
define install_services
missing=''; \
for pair in redis-server:redis-server nginx:nginx-light slurmctld:slurm-wlm sshd:openssh-server tc:iproute2 chromium:chromium \
  soffice:'libreoffice-writer-nogui libreoffice-calc-nogui libreoffice-impress-nogui fonts-noto-cjk' pdftotext:poppler-utils; do \
  command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; \
done; \
test -z "$$missing" || { sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; }
endef

# torch first and aloud: it is by far the largest download, and pip shows how far it is.
define install
test -x $(1)/bin/pip || { echo 'making $(1)'; $(PYTHON) -m venv $(1); }; \
rm -f $(1)/.ready-*; \
echo 'installing torch and armillary into $(1) (once; a few minutes)'; \
$(1)/bin/python -m pip install torch; \
$(1)/bin/python -m pip install --quiet --editable $(2)
endef
