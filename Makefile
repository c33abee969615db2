# Everything a person or CI does, each a line or two. `make serve` is the way in.
PYTHON ?= python3
RUNTIME ?= cpu
BIN := .venv/bin
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder  # tests of a file share what they need; long files first
STORE := $(or $(DUBITO_STORE),models)

.PHONY: install serve test test-quick test-slow test-real check mutants bench compose-check constraints

install: .venv/installed-$(RUNTIME)

.venv/installed-$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(RUNTIME),otel,training,dev,bench]'
	rm -f .venv/installed-*
	touch $@

serve: install
	@if [ -z "$$($(BIN)/python -m model_store --store '$(STORE)' list)" ]; then $(BIN)/python -m training fit recipes/digits.toml; fi
	exec $(BIN)/python -m service

test: install
	$(BIN)/python -m pytest $(IN_TWO)

test-quick: install
	$(BIN)/python -m pytest $(IN_TWO) -m "not slow and not fits and not serves"

test-slow: install
	$(BIN)/python -m pytest -m slow

test-real: install
	$(BIN)/python -m pytest -m real tests/real

check: install
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(BIN)/python -m pytest $(IN_TWO) --cov --cov-report=term

mutants: install .venv-mutants/installed
	nice -n 15 .venv-mutants/bin/python tests/support/mutants.py $(PART) $(MUTANTS)

.venv-mutants/installed:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

bench: install
	$(BIN)/python -m benchmarks

compose-check:
	bash docker/check.sh

constraints:
	{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//'; } > constraints.new && mv constraints.new constraints.txt
