PYTHON ?= python3
VENV ?= .venv
ARGS ?=
INSTALLED := $(VENV)/.installed

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## install into .venv, then SparDA at 80 % sparsity beside the full cache
	$(VENV)/bin/python run.py method=sparda sparsity=0.8

test: $(INSTALLED) ## run all tests; ARGS='tests/harness -x' goes to pytest
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(INSTALLED) ## ruff check and format check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: help demo test lint
