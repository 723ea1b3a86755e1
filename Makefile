# Every target that needs the virtual environment makes it first; `make setup` is skipped when
# pyproject.toml and constraints.txt have not changed.
VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export VENV PYTHON TORCH_INDEX
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint check fmt proto proto-check e2e e2e-leftovers e2e-compose wheelhouse \
  sim-faults kill-matrix publication-faults mutants planted attacks power-cut soak learn bench freeze clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make the virtual environment (once)
	@scripts/setup.sh

demo: setup ## Two batches from real agents, two training steps, two publications, a report
	@$(BIN)/muster demo

test: setup ## All tests but the slow ones with the real engine
	$(PYTEST) tests --ignore=tests/e2e -m "not engine" --durations=25

lint: setup proto-check ## Format, lint, types, import rules, proto drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

check: lint ## The same, and the fast tests
	$(PYTEST) tests/unit tests/property -q -m "not engine and not root"

fmt: setup ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## Generate muster/v1 from protos/
	@BIN=$(BIN) scripts/proto.sh

proto-check: setup ## Fail when muster/v1 is not what protos/ generates
	@BIN=$(BIN) scripts/proto_check.sh

E2E ?= tests
e2e: setup ## The whole on real parts: engine, boxes, training (30 min): E2E=tests/e2e/test_demo.py
	$(PYTEST) $(E2E) -m engine --timeout=1800 -v --durations=10

e2e-leftovers: setup ## Nothing is left after exit, Ctrl-C and SIGKILL (minutes)
	$(BIN)/python tests/e2e/leftovers.py

e2e-compose: setup ## The whole in containers: run, scaled, wounded, restarted, taken down (needs a Docker Engine; minutes)
	$(BIN)/python tests/e2e/compose.py --build

wheelhouse: setup ## Wheels for building images without internet, into deploy/wheelhouse
	@VENV=$(VENV) deploy/wheelhouse.sh

SEEDS ?= 300
JOBS ?= 2
sim-faults: setup ## Seeded faults in the simulated world, and what met what: SEEDS=300 JOBS=2
	$(BIN)/python -m sim --rough --seeds $(SEEDS) --jobs $(JOBS)

kill-matrix: setup ## A fault at every failpoint: simulated, then real processes with fakes (20 min)
	$(BIN)/python -m sim --rough --seeds 200
	$(BIN)/python -m tests.faults.kill_matrix

publication-faults: setup ## Engines and trainers killed in publications, wrong versions, late joiners; a canary (half an hour)
	$(BIN)/python -m tests.faults.publication

mutants: setup ## Planted bugs, each caught by a test or a fault seed (minutes)
	$(BIN)/python -m tests.faults.mutants

planted: setup ## Planted bugs that fault seeds alone must catch, within 200 each (minutes)
	$(BIN)/python -m tests.faults.planted --seeds 200 --jobs $(JOBS)

attacks: setup ## Every attack on a box, with its defence and without; what is UNPROVEN is told (needs root)
	$(PYTEST) -m root tests/integration -k "attack or canar" -rs -s

power-cut: setup ## The server of the streams loses power, 20 times per policy (needs root)
	$(BIN)/python -m tests.faults.power_cut

soak: setup ## 1,000 batches through fakes: memory, descriptors, keys stay flat (minutes)
	$(BIN)/python -m bench.soak

ARM ?= main
SEED ?= 1
learn: setup ## Does it learn? One run in the background, goes on where it was: ARM=main SEED=1
	@mkdir -p .muster/learn
	@nohup setsid $(BIN)/python -m bench.learn --arm $(ARM) --seed $(SEED) \
	  --json docs/results/learning/$(ARM)-$(SEED).json >> .muster/learn/$(ARM)-$(SEED).log 2>&1 &
	@echo "follow it: tail -f .muster/learn/$(ARM)-$(SEED).log; stop it: pkill -INT -f 'bench.learn --arm $(ARM) --seed $(SEED)'"

bench: setup ## Run every benchmark but the learning run
	@for file in bench/[!_]*.py; do name=$$(basename $$file .py); case $$name in check|learn) continue;; esac; echo "== bench.$$name"; $(BIN)/python -m bench.$$name || exit 1; done

freeze: ## Write constraints.txt from what is installed
	$(BIN)/python scripts/freeze.py > constraints.new && mv constraints.new constraints.txt

clean: ## Remove caches, builds and the state folder (not the virtual environment)
	rm -rf .muster dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
