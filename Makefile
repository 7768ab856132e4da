# Two commands matter: `make demo` runs the main job, `make test` passes the tests. Everything else is a part of those.

PYTHON ?= python3
VENV ?= .venv
VLLM ?= 0.32.0
SGLANG ?= 0.5.17
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install prometheus demo serve test check test-fast test-engine test-vllm test-sglang bench-cpu bench-ep8 clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 16

install:  ## Create the environment: vLLM for CPU, this project and its development tools
	@$(PYTHON) scripts/install_cpu_env.py $(VENV)

prometheus: install  ## Fetch Debian's Prometheus for the tests, where apt has it; no root, nothing is installed
	@$(BIN)/python scripts/fetch_prometheus.py $(VENV)/prometheus

demo: install  ## Serve the tiny model on two engine processes, compare with stock vLLM, show what replication did
	@$(BIN)/python examples/serve_demo.py

serve: install  ## The same server, left running
	@$(BIN)/python examples/serve_demo.py --serve

test: install  ## Everything: checks, unit tests, compile checks of the kernels, real engine processes
	@$(MAKE) --no-print-directory check test-fast test-engine

check: install  ## Formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

test-fast: prometheus  ## Tests without engines
	@$(BIN)/python -m pytest -q -m "not engine"

test-engine: prometheus  ## Tests against real vLLM servers on the CPU
	@$(BIN)/python -m pytest -q -m engine

test-vllm: install  ## The engine tests against another release: make test-vllm VLLM=0.32.0
	@$(PYTHON) scripts/install_cpu_env.py .venv-vllm-$(VLLM) --vllm $(VLLM)
	@MEGAFLUX_VLLM_PYTHON=$(CURDIR)/.venv-vllm-$(VLLM)/bin/python $(BIN)/python -m pytest -q -m engine

test-sglang: install  ## The tests against real SGLang servers, in an environment of 9 GB: make test-sglang SGLANG=0.5.17
	@$(PYTHON) scripts/install_sglang_env.py .venv-sglang-$(SGLANG) --sglang $(SGLANG)
	@SGLANG_PLATFORM=plain_cpu .venv-sglang-$(SGLANG)/bin/python -m pytest -q -W ignore tests/plugins/test_sglang_adapters.py tests/plugins/test_sglang_recorder.py
	@MEGAFLUX_SGLANG_PYTHON=$(CURDIR)/.venv-sglang-$(SGLANG)/bin/python $(BIN)/python -m pytest -q -k sglang tests/plugins

bench-cpu: install  ## The benchmarks that need no GPU; results go to benchmarks/results
	@for name in planner_cpu routepack_placement routepack_schedule routepack_optimum routepack_beyond capture engine_routes metrics_host; do \
	  $(BIN)/python -m benchmarks.bench_$$name || exit 1; done

bench-ep8:  ## Eight ranks on one to eight Hopper GPUs, in parts; those asked for: make bench-ep8 PARTS="compile quick"
	@benchmarks/gpu_ep8.sh $(PARTS)

clean:  ## Remove the environment and everything the commands above wrote
	@rm -rf $(VENV) .venv-vllm-* .venv-sglang-* out .pytest_cache .mypy_cache .ruff_cache .hypothesis
