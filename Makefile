# Two commands for a newcomer: `make demo` runs the whole loop on the mini world, `make test` passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet -c requirements/constraints.txt

.PHONY: demo test lint slow campaign scorers venv dev clean

demo: venv
	PATH="$(BIN):$$PATH" $(BIN)/dvc repro

test: dev
	$(BIN)/python -m pytest

slow: dev
	$(BIN)/python -m pytest -m slow

campaign: dev
	$(BIN)/python -m pytest -m campaign

scorers: dev
	$(BIN)/python -m pytest -m scorers

lint: dev
	$(BIN)/ruff check .
	$(BIN)/mypy

venv: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
