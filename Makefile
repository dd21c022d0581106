# Everything a person or the CI runs. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Of `make serve`: a checkpoint folder or hub id (empty: the demo model), the HTTP port, further flags of `baton serve`.
MODEL ?=
PORT ?= 8000
ARGS ?=
# Of `make install`: index to take torch from, for example one with CPU-only builds. Empty: the one pip is set up with.
# PIP_EXTRA_INDEX_URL and pip's other variables work as always.
TORCH_INDEX ?=
TORCH = torch>=2.11,<2.14

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DOCS = $(VENV)/docs

.DEFAULT_GOAL := help
.PHONY: help install serve chat test lint docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## make .venv with Baton and everything its tests need

# torch first and by itself: a machine without a GPU can take a small CPU build from TORCH_INDEX, and the step after it
# finds the requirement satisfied.
$(STAMP): pyproject.toml $(wildcard baton/engine/native/src/* baton/engine/native/src/levels/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

# The demo shows the relay; for a model that was named, baton serve chooses.
serve: install ## start a router and nodes; without a model the demo, split in two: MODEL=, PORT=, ARGS=
	exec $(BIN)/baton serve $(or $(MODEL),--prefill 1) --port $(PORT) $(ARGS)

chat: install ## talk to what `make serve` started
	exec $(BIN)/baton chat --url http://127.0.0.1:$(PORT) $(ARGS)

# The tests start hundreds of Python processes. They take a tenth less time when the modules stay compiled, so this holds
# also where the environment asks Python not to write compiled modules (they are in .gitignore; `make clean` removes them).
# A test process that dies ends the run with an error; with a new one in its place the run would wait for ever.
test: install ## run all tests on all cores, without network: ARGS=
	env -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --max-worker-restart 0 $(ARGS)

lint: install ## ruff (rules and format), and mypy in strict mode
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy baton tests

docs: $(DOCS)/.installed ## build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# A small environment of its own, with neither torch nor Baton: the pages are made from files alone. With `--quiet` mkdocs
# would count no warning, and `--strict` find none.
$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(DOCS)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -r /dev/stdin
	touch $@

clean: ## remove .venv and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
