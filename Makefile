# Two commands matter: `make demo` runs the main job, `make test` passes the tests. Everything else is a part of those.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo serve test check test-fast test-engine bench-cpu clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 16

install:  ## Create the environment: vLLM for CPU, this project and its development tools
	@$(PYTHON) scripts/install_cpu_env.py $(VENV)

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

test-fast: install  ## Tests without engines
	@$(BIN)/python -m pytest -q -m "not engine"

test-engine: install  ## Tests against real vLLM servers on the CPU
	@$(BIN)/python -m pytest -q -m engine

bench-cpu: install  ## The benchmarks that need no GPU; results go to benchmarks/results
	@$(BIN)/python benchmarks/bench_planner_cpu.py

clean:  ## Remove the environment and everything the commands above wrote
	@rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
