VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest
BANDIT := .venv/bin/bandit --quiet --configfile pyproject.toml --recursive src scripts
# demo: MODE=sequential, MODE=concurrent or MODE=offload, HOSTS=2 for two virtual hosts (as root), and any flag of `kvferry demo`, such as ARGS="--prefill-tp 1 --json"
MODE ?= sequential
HOSTS ?= 1
ARGS ?=
MODELS := tests/host/vllm/test_families.py tests/adapter/test_models_against_vllm.py \
  tests/adapter/test_models_in_views.py tests/adapter/test_identities.py tests/adapter/test_small_models_packing.py
MATRIX := tests/host tests/adapter/test_refused_combinations.py $(filter tests/adapter/%,$(MODELS))

IN_THREE_PROCESSES := -n 3 --dist worksteal
# A noisy machine may starve a test of threads. CI runs such a test twice and names it; engines have no second chance.
SECOND_CHANCE := $(if $(CI),--reruns 1 -rR)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix test-models test-chaos test-hosts test-versions test-fast test-full test-gpu check-vllm package check-package check-image check-deploy picture docs lint bench clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## Make .venv with everything pinned (once per change of pyproject.toml)
	@scripts/setup

demo: setup ## Prefill on one vLLM engine, decode on another, compare with one engine alone
	@.venv/bin/kvferry demo --mode $(MODE) --hosts $(HOSTS) $(ARGS)

# Setup installs every package, so a test that is skipped hides a transport that is missing.
test test-chaos test-hosts: export KVFERRY_NO_SKIPS := 1

# Tests wait for a third of their time, so three processes run them on 2 cores. Engines compute: one process runs those.
test: setup ## The tests, real vLLM engines included (about 19 minutes on 2 cores)
	-@scripts/debian install chromium "the test of a timeline's page" chromium google-chrome
	@$(BANDIT)
	@$(PYTEST) $(IN_THREE_PROCESSES) $(SECOND_CHANCE) tests/pure tests/local tests/device_memory tests/adapter tests/small_models src $(ARGS)
	@$(PYTEST) tests/host $(ARGS)

test-matrix: setup ## Every pair of engines, every refusal, every published model; writes docs/matrix.md and docs/models.md (about two hours)
	@rm -rf build/matrix
	@KVFERRY_MATRIX=build/matrix $(PYTEST) $(MATRIX) $(ARGS); status=$$?; \
	$(VENV_PYTHON) -m tests.matrix_document build/matrix && $(VENV_PYTHON) -m tests.models_document build/matrix && exit $$status

test-models: setup ## The part of test-matrix about published models; writes docs/models.md
	@rm -rf build/models
	@KVFERRY_MATRIX=build/models $(PYTEST) $(MODELS) $(ARGS); status=$$?; \
	$(VENV_PYTHON) -m tests.models_document build/models && exit $$status

test-chaos: setup ## Engines killed, stopped and cut off under load, with every flow of a router, and a rolling restart (about 35 minutes on 2 cores)
	@KVFERRY_CHAOS=1 $(PYTEST) tests/host/vllm/chaos tests/local/test_chaos_relay.py $(ARGS)

test-versions: setup ## vLLM 0.30, 0.31 and 0.32, each in an environment of its own, and pairs of two of them (about 40 minutes, 8 GB)
	@$(VENV_PYTHON) scripts/test_versions.py $(ARGS)

# One process waits for links that fail, the other one for engines.
test-hosts: setup ## Transports and engines between two and three virtual hosts, and faults of their network (as root; about 20 minutes on 2 cores)
	@$(PYTEST) -n 2 --dist loadfile tests/two_hosts $(ARGS)

test-fast: setup ## The tests that need neither vLLM nor Mooncake and are quick (2 minutes on 2 cores)
	@$(PYTEST) -n 4 --dist worksteal tests/pure tests/local src -m "not vllm and not mooncake and not slow" \
	  --ignore=src/kvferry/integrations $(ARGS)

# Exit code 2 without a GPU: then it prints what would run. Set-up installs vLLM for a CPU.
test-gpu: $(if $(GPU_PYTHON),,setup) ## Everything that awaits a GPU; GPU_PYTHON=python of an environment for GPUs, JSON=FILE for the results
	@$(or $(GPU_PYTHON),$(VENV_PYTHON)) scripts/gpu_tests.py $(if $(JSON),--json $(JSON)) $(ARGS)

# Many runs, each with a seed of its own: one process would remember every drawn case.
test-full: setup ## 100,000 drawn cases through the planner (35 minutes on 2 idle cores)
	@seq 80 | xargs -P "$$(nproc)" -I{} env KVFERRY_CASES=1250 $(PYTEST) -p no:cacheprovider --hypothesis-seed={} \
	  tests/pure/test_plan_properties.py $(ARGS)

lint: setup ## ruff, bandit and mypy --strict, of tests/gpu and benchmarks too
	@$(BANDIT)
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy

# Takes the release's wheel from the package index, reads it and installs nothing.
check-vllm: setup ## What a vLLM release changes of the names that kvferry uses, and its file: VERSION=0.33.0 (or ARGS="--wheel FILE"); none: all known
	@$(VENV_PYTHON) scripts/check_vllm.py $(VERSION) $(ARGS)

# Needs git and Python 3.11 or newer, and makes no .venv.
package: ## The source distribution and the wheel in dist/, the same bytes each time (PYTHON=python3.12 for another Python than 3.11)
	@$(or $(PYTHON),python3.11) scripts/package.py $(ARGS)

check-package: setup ## The wheel in fresh environments: alone on Python 3.11 to 3.13; beside vLLM by the README's lines (4 GB, some minutes)
	@$(VENV_PYTHON) scripts/check_package.py
	@$(VENV_PYTHON) scripts/check_package.py --vllm

# Unpacked, Prometheus is no service that Debian would start.
check-deploy: PROMETHEUS := $(CURDIR)/build/prometheus
check-deploy: setup ## docs/deploy: by the schemas of Compose and Kubernetes, by systemd and by Prometheus (about a minute at first)
	@scripts/debian install systemd "its verdict on the units of docs/deploy" systemd-analyze
	@command -v promtool >/dev/null || [ -x $(PROMETHEUS)/usr/bin/promtool ] || scripts/debian unpack $(PROMETHEUS) prometheus
	@$(VENV_PYTHON) scripts/check_deploy.py
	@PATH="$$PATH:$(PROMETHEUS)/usr/bin" $(VENV_PYTHON) scripts/check_prometheus.py

picture: setup ## docs/pictures/timeline.png: a page of kvferry timeline in Chromium
	@$(VENV_PYTHON) -m tests.timeline_picture docs/pictures/timeline.png

docs: setup ## The site of README.md and docs/ in build/site, every link checked (170 MB in build/docs-environment at first)
	@$(VENV_PYTHON) scripts/build_docs.py

bench: setup ## The plan and transport benchmarks, against measured roofs
	@$(VENV_PYTHON) benchmarks/plan.py
	@$(VENV_PYTHON) benchmarks/transport.py

clean: ## Remove .venv and everything that was built
	@rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
