# Everything stands on .venv, which each target makes by itself: with uv where it is there, else with pip from the
# hash-locked export of uv.lock.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tether-stamp
SOURCES := contracts services tools tests examples

.PHONY: help demo test check lint types layers schemas generate requirements bench bench-compare chaos fuzz load agents images k8s sbom audit lock clean venv

help: ## what each target does
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## the environment in .venv

$(STAMP): pyproject.toml uv.lock requirements.lock tools/dev/bootstrap.sh
	@bash tools/dev/bootstrap.sh $(VENV)
	@touch $@

demo: $(STAMP) ## starts everything, sends prompts, breaks a reader off, prints what the oracle found
	@$(BIN)/python -m tether_demo

# Most tests wait for processes: more of them at once than there are cores.
TEST_WORKERS ?= 3

test: $(STAMP) ## the tests; TEST_WORKERS=0 runs one after the other
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile -m "not k8s and not compose"

k8s: $(STAMP) ## AgentTasks on a real Kubernetes API, the operator killed at each step; see tools/k8s/README.md
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist load -m k8s tests/kube $(K8S_ARGS)

docker-scenarios: $(STAMP) ## drain, resume and takeover over sandboxes in containers, and the compose file; needs an engine
	@TETHER_TEST_PROVIDERS=docker $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile \
	  tests/scenarios/test_over_providers.py tests/scenarios/test_drain_resume.py tests/scenarios/test_resume_history.py \
	  tests/scenarios/test_takeover.py tests/deploy/test_compose.py

check: lint types layers schemas requirements test ## what CI runs

lint: $(STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

types: $(STAMP)
	@$(BIN)/mypy $(SOURCES)

layers: $(STAMP)
	@$(BIN)/lint-imports

schemas: $(STAMP) ## fails where schemas, OpenAPI, AsyncAPI or reference in docs/ differ from the code
	@$(BIN)/python -m tether_schemas --check docs
	@$(BIN)/python -m tether_metrics --check docs/metrics.md

generate: $(STAMP) ## writes schemas, OpenAPI, AsyncAPI and reference in docs/ anew
	@$(BIN)/python -m tether_schemas docs
	@$(BIN)/python -m tether_metrics docs/metrics.md

requirements: $(STAMP) ## every requirement is covered by a test that exists, or named as open
	@$(BIN)/python -m tether_requirements tests/requirements.toml

bench: $(STAMP) ## measures, prints a table, writes reports/bench.json
	@$(BIN)/python -m tether_bench $(BENCH_ARGS)

bench-compare: $(STAMP) ## Tether beside what else one would pick (once before: python -m tether_bench.compare install)
	@$(BIN)/python -m tether_bench.compare run $(COMPARE_ARGS)

chaos: $(STAMP) ## kills and freezes every service under load, judged by the oracle; CHAOS_ARGS="--seed N --rounds K --seconds S"
	@$(BIN)/python -m tether_chaos $(CHAOS_ARGS)

fuzz: $(STAMP) ## fuzzes whatever reads what others wrote: 60 s for each of three groups; FUZZ_ARGS="frame http --seconds 600 --seed 7"
	@$(BIN)/python -m tether_fuzz $(FUZZ_ARGS)

load: $(STAMP) ## 1,000 prompts of 200 tenants, 1,000 readers in a storm, one noisy tenant; LOAD_ARGS="prompts --short"
	@$(BIN)/python -m tether_load $(LOAD_ARGS)

agents: $(STAMP) ## installs the pinned agent CLIs from npm into a cache outside the clone; AGENTS="claude codex"
	@$(BIN)/python -m tether_agents install $(AGENTS)

images: $(STAMP) ## builds the images of deploy/Dockerfile, offline, on a base of this machine's Python; IMAGES_ARGS="--base python:3.13-slim"
	@$(BIN)/python -m tether_images $(or $(IMAGES_ARGS),--offline)

sbom: $(STAMP) ## bills of materials, CycloneDX JSON, in build/sbom
	@$(BIN)/python -m tether_supply sbom

audit: $(STAMP) ## known vulnerabilities of what is locked; AUDIT_ARGS="--database all.zip" without a network; 3: not audited
	@$(BIN)/python -m tether_supply audit $(AUDIT_ARGS)

EXPORT := uv export --quiet --frozen --no-dev --no-emit-project --no-annotate --no-header
lock: ## after a change of dependencies
	uv lock
	uv export --quiet --frozen --all-extras --all-groups --no-emit-project --no-annotate --no-header > requirements.lock
	$(EXPORT) --extra collector --extra otel > deploy/requirements/collector.txt
	$(EXPORT) --extra router --extra otel > deploy/requirements/router.txt
	$(EXPORT) --extra agent --extra docker --extra kubernetes --extra otel > deploy/requirements/agent.txt
	$(EXPORT) --extra backend --extra postgres --extra otel > deploy/requirements/backend.txt
	$(EXPORT) --extra operator --extra otel > deploy/requirements/operator.txt

clean:
	rm -rf $(VENV) build reports .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
