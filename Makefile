# What a contributor types: every target installs what it needs first. It knows no machine but one with python3 and gcc.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test e2e sim check format bench bench-plan bench-simulate bench-diagnose \
	bench-checkpoint bench-checkpoint-kills bench-checkpoint-peers bench-storage-hang

help:  ## list these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 26

demo: $(STAMP)  ## watch a real job lose a worker and recover
	@$(BIN)/everstep demo

test: $(STAMP)  ## run all tests but those in tests/e2e
	@$(BIN)/python -m pytest tests --ignore=tests/e2e

e2e: $(STAMP)  ## run real jobs with real kills and freezes
	@$(BIN)/python -m pytest tests/e2e

sim: $(STAMP)  ## run the simulated clusters over 1,000 seeds
	@EVERSTEP_SIM_SEEDS=1000 $(BIN)/python -m pytest tests/sim

check: $(STAMP)  ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy src

format: $(STAMP)  ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## measure overheads; results go to bench/results
	@$(BIN)/python bench/run.py

bench-diagnose: $(STAMP)  ## measure verdicts on hangs of up to 16,384 ranks, with torchfrtrace beside
	@$(BIN)/python bench/diagnose.py

bench-plan: $(STAMP)  ## measure how long plans take
	@$(BIN)/python bench/plan.py

bench-simulate: $(STAMP)  ## measure the simulated cluster against what was published
	@$(BIN)/python bench/simulate.py

bench-checkpoint: $(STAMP)  ## measure saves, restores and restarts beside PyTorch's own
	@$(BIN)/python bench/checkpoint.py

bench-checkpoint-kills: $(STAMP)  ## kill workers, saver, uploader and agent 500 times amid saves (some 15 minutes)
	@$(BIN)/python bench/checkpoint_kills.py

bench-checkpoint-peers: $(STAMP)  ## measure copies between hosts, and what training pays for them
	@$(BIN)/python bench/checkpoint_peers.py

bench-storage-hang: $(STAMP)  ## hang a job's checkpoint disk for a minute; needs gcc
	@$(BIN)/python bench/storage_hang.py

# Installed once, and again only after pyproject.toml or constraints.txt changed.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing everstep and its tools into $(VENV): a minute or more the first time, since PyTorch is large ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Installed."
