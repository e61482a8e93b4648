# TierKV: `make demo` and `make test` are complete on a fresh Debian/Ubuntu with Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DUCKDB15 := .venv-duckdb15
# Two workers halve the time of tests that keep to themselves; files stay whole, for their servers.
# Tests that start clusters or wait for machinery come after those that want all of the machine.
PARALLEL ?= -n 2 --dist loadfile
# Clusters mostly wait: for processes to start, for a lost node to be noticed.
CLUSTERS_PARALLEL ?= -n 4 --dist loadfile
APART := ai_functions connect dbapi pgwire_ pool_writes relay_ sql_simulate static_prefix
# What takes longest, of `make test-long`: folders of tests, and tests of clusters and of engines.
LONG_FOLDERS := tests/differential tests/sim
LONG_APART := engine_
LONG := answer_cache api_keys call_limits cascade cluster_tls conversations deployed dmp_upgrade docs door_floods \
  forget_and_pin front_workers installed logins memory namespace_limits overload owned_objects pool_alone \
  postgres_keepers queued_jobs split_cluster sql_shell start_when_needed statistics stress_reuse two_models
# Files of other folders that calculate for long.
LONG_FILES := $(addprefix tests/,numeric/test_blend_quality.py numeric/test_codec_quality.py numeric/test_demo_model.py \
  numeric/test_speculation.py unit/bench/test_router.py unit/policies/test_learned.py)
SIDE_BY_SIDE := $(filter-out $(LONG_FOLDERS:%=%/) tests/house/ tests/integration/ tests/clients/ tests/engines/ tests/__pycache__/,$(wildcard tests/*/)) \
  $(wildcard $(APART:%=tests/integration/test_%*.py))
BENCHES ?= bench
USUAL := not slow and not bench and not ray and not faults
# Environments that hold another engine; what they share is with .venv (tests/engines/make-venvs).
CLIENTS_VENV := .venv-clients
ENGINE_VENVS := .venv-interfaces .venv-sglang .venv-vllm
ROOMS := compute costing dbfront dmp integrations kvcore kvwire metaserver policies scheduler simulator sql storage tierkv
CLUSTERS := tests/integration $(patsubst %,--ignore-glob='*/test_%*',$(APART) $(LONG_APART)) \
  $(patsubst %,--ignore-glob='*/integration/test_%.py',$(LONG))

.PHONY: help setup environments demo test test-long test-duckdb15 test-clients test-engine-interfaces test-engines test-faults test-bench test-gpu test-ray test-rdma test-slow check fuzz sql-fuzz sim bench journey quality proto format clean model

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(STAMP) ## Make the virtual environment and install everything

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q $(ROOMS)
	touch $(STAMP)

environments: $(DUCKDB15)/.installed $(CLIENTS_VENV)/.installed .venv-sglang/.installed .venv-interfaces/.installed ## Make those that CI's tests need

demo: setup ## Run the main job and print what happened
	$(BIN)/tierkv demo

test: setup ## Run the tests
	deploy/install-test-packages.sh
	$(BIN)/pytest -m '$(USUAL)' $(PARALLEL) $(LONG_FILES:%=--ignore=%) $(SIDE_BY_SIDE)
	$(BIN)/pytest -m '$(USUAL)' $(CLUSTERS_PARALLEL) $(CLUSTERS)

test-long: setup ## Run what takes longest: more clusters, engines, differential and simulated ones
	deploy/install-test-packages.sh
	$(BIN)/pytest -m '$(USUAL)' $(PARALLEL) $(LONG_FOLDERS) $(LONG_FILES) $(wildcard $(LONG_APART:%=tests/integration/test_%*.py))
	$(BIN)/pytest -m '$(USUAL)' $(CLUSTERS_PARALLEL) $(LONG:%=tests/integration/test_%.py)

test-duckdb15: $(DUCKDB15)/.installed ## Run the tests that face the SQL engine on DuckDB 1.5
	deploy/install-test-packages.sh
	$(DUCKDB15)/bin/python -m pytest -m 'not slow and not bench' $(PARALLEL) tests/unit/dbfront tests/sql \
	  tests/integration/test_pgwire_*.py tests/integration/test_dbapi.py \
	  tests/integration/test_jobs.py tests/integration/test_ai_tables.py tests/integration/test_kv_indexes.py \
	  tests/property/test_sql_*.py tests/property/test_pgwire_fuzz.py

# Everything but DuckDB is shared with the first environment, which comes later on its path.
$(DUCKDB15)/.installed: $(STAMP)
	$(PYTHON) -m venv $(DUCKDB15)
	$(DUCKDB15)/bin/pip install --quiet --no-deps 'duckdb==1.5.*'
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$($(DUCKDB15)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	touch $@

test-clients: $(CLIENTS_VENV)/.installed ## Run clients of other people on both SQL doors and compare with PostgreSQL
	deploy/install-test-packages.sh
	$(BIN)/pytest -m clients tests/clients

$(CLIENTS_VENV)/.installed: $(STAMP) $(wildcard tests/clients/*.txt tests/clients/*.json tests/clients/make-environment tests/clients/programs/go/*)
	tests/clients/make-environment
	touch $@

test-engine-interfaces: .venv-interfaces/.installed ## Compare our classes with vLLM's and SGLang's own
	.venv-interfaces/bin/python -m pytest $(filter-out %/test_sglang.py,$(wildcard tests/engines/conformance/test_*.py))
	.venv-interfaces/bin/python -m pytest tests/engines/conformance/test_sglang.py

test-engines: test-engine-interfaces .venv-sglang/.installed .venv-vllm/.installed ## Run the tests inside vLLM and SGLang: 5 GB, many minutes
	.venv-sglang/bin/python -m pytest tests/engines/sglang
	.venv-vllm/bin/python -m pytest tests/engines/vllm
	$(BIN)/pytest tests/engines/remote

.venv-interfaces/.installed: tests/engines/conformance/requirements.txt .venv-sglang/.installed
.venv-sglang/.installed: tests/engines/sglang/requirements.txt
.venv-vllm/.installed: tests/engines/vllm/constraints.txt
$(ENGINE_VENVS:%=%/.installed): $(STAMP) tests/engines/make-venvs
	tests/engines/make-venvs $(@:.venv-%/.installed=%)
	touch $@

test-bench: setup ## Run every benchmark briefly and check what it prints
	deploy/install-test-packages.sh
	$(BIN)/pytest -m '$(BENCHES)' $(PARALLEL)

test-gpu: setup ## Run the tests that need a GPU, and the numeric tests on CUDA
	$(BIN)/pytest tests/gpu tests/hardware/test_codec_gpu.py tests/integration/test_direct_reads.py
	KV_TEST_DEVICE=cuda $(BIN)/pytest tests/numeric

test-ray: setup ## Run a cluster on a real Ray of several local nodes: some minutes
	$(BIN)/pytest -p no:randomly -m ray tests/integration/test_ray_cluster.py tests/integration/test_ray_jobs.py

test-faults: setup ## Kill, freeze and cut off processes of whole clusters, and damage disks: some minutes
	deploy/install-test-packages.sh
	$(BIN)/pytest -m faults $(CLUSTERS_PARALLEL) tests/integration

test-rdma: setup ## Run the RDMA tests, in a guest with Soft-RoCE devices
	PYTEST_ADDOPTS= tests/hardware/run-rdma

test-slow: setup ## Run the slow tests too
	$(BIN)/pytest

check: setup ## Lint, types, import contracts, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tierkv tools tests bench
	$(BIN)/lint-imports
	$(BIN)/pytest tests/house

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup ## Generate code from kvwire/v1/*.proto
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. \
	  --mypy_out=. --mypy_grpc_out=. tierkv/kvwire/v1/common.proto tierkv/kvwire/v1/meta.proto tierkv/kvwire/v1/compute.proto

fuzz: setup ## Throw random frames at the data plane for a minute
	$(BIN)/python tests/fuzz/fuzz_frame.py 60

sql-fuzz: setup ## Compare random SQL through every door for long: make sql-fuzz MINUTES=60 SEED=1000
	deploy/install-test-packages.sh
	$(BIN)/python -m tests.differential.run --seed $(or $(SEED),1000) --minutes $(or $(MINUTES),60)

sim: setup ## Tell the story of one seed of the simulated cluster: make sim SEED=7
	$(BIN)/python -m tests.sim.run $(SEED)

bench: setup ## Run the benchmarks and print their numbers
	$(BIN)/python -m bench

journey: setup ## Trace one AI statement: the files and functions that it touches, room by room
	$(BIN)/python -m bench.journey

quality: setup ## Measure what lossy options cost in answers; writes docs/quality.md
	$(BIN)/python -m bench.quality --write-docs

model: setup ## Train the demo model again
	$(BIN)/python -m tools.demo_model.train

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) $(DUCKDB15) $(CLIENTS_VENV) $(ENGINE_VENVS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
