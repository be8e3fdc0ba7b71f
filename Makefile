PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
# demo: MODE=pull, and any flag of `kvferry demo`, such as ARGS="--prefill-tp 1 --json demo.json"
MODE ?= pull
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix test-fast lint bench clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## Make .venv with everything pinned (once per change of pyproject.toml)
	@scripts/setup

demo: setup ## Prefill on one vLLM engine, decode on another, compare with one engine alone
	@.venv/bin/kvferry demo --mode $(MODE) $(ARGS)

test: setup ## Every test, real vLLM engines included (less than 25 minutes on 2 cores)
	@$(PYTEST) $(ARGS)

test-matrix: setup ## Every pair of engines, hybrids with their negative controls too (about 15 minutes)
	@KVFERRY_MATRIX=1 $(PYTEST) tests/host/vllm/test_pairs.py tests/host/vllm/test_engine_oracle.py $(ARGS)

test-fast: setup ## The tests without vLLM engines (less than 2 minutes)
	@$(PYTEST) -m "not vllm" tests/pure tests/local src $(ARGS)

lint: setup ## ruff and mypy --strict
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy

bench: setup ## The plan and transport benchmarks, against measured roofs
	@.venv/bin/kvferry bench plan
	@.venv/bin/kvferry bench transport

clean: ## Remove .venv and everything that was built
	@rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
