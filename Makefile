# Common tasks. To get started, run `make serve`.
PYTHON ?= python3
RUNTIME ?= cpu
BIN := .venv/bin
# run tests of a file in one process, long files first, with a timeout
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
# cache bytecode: packages are installed without it, and tests start many processes
export PYTHONDONTWRITEBYTECODE =
STORE := $(or $(DUBITO_STORE),models)
# fit the digits model if the store is empty
PUBLISHED = @if [ ! -d '$(STORE)' ] || [ -z "$$($(BIN)/python -m model_store --store '$(STORE)' list)" ]; then $(BIN)/python -m training fit recipes/digits.toml; fi

.PHONY: install serve test test-quick test-slow test-real check bench reproduce docs lock cluster compose-check

install: .venv/installed-$(RUNTIME)

.venv/installed-$(RUNTIME): pyproject.toml uv.lock docker/install.sh docker/torch-cpu.txt
	$(PYTHON) -m venv .venv
	PATH="$(CURDIR)/$(BIN):$$PATH" sh docker/install.sh .venv dev $(RUNTIME)
	$(BIN)/uv pip install --quiet --python .venv --no-deps --no-build-isolation -e .
	rm -f .venv/installed-*
	touch $@

serve: install
	$(PUBLISHED)
	exec $(BIN)/python -m service

test: install
	$(BIN)/python -m pytest $(IN_TWO)

test-quick: install
	$(BIN)/python -m pytest $(IN_TWO) -m "not slow and not real and not fits and not serves"

test-slow: install
	$(BIN)/python -m pytest -m "slow and not real"

test-real: install # third-party programs
	bash tests/real/environments.sh all
	$(BIN)/python -m pytest -m real tests/real

check: install
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(BIN)/python -m pytest $(IN_TWO) --jaxtyping-packages=model_store,training,experiments,beartype.beartype --cov --cov-report=term

reproduce: install # missing tables and figures of the papers; DUBITO_DATA is the data folder
	$(BIN)/python -m training reproduce

bench: install # short benchmarks; `python -m benchmarks` lists all
	$(BIN)/python -m benchmarks.kernel --rounds 3
	$(BIN)/python -m benchmarks.predict --short
	$(BIN)/python -m benchmarks.request_cost --rounds 3

docs: # a site in build/site, with offline search
	bash tests/real/environments.sh docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

lock: install # after you change dependencies in pyproject.toml
	$(BIN)/uv lock

cluster: install
	bash tests/real/environments.sh ray
	$(PUBLISHED)
	exec .venv-ray/bin/python -m service cluster

compose-check:
	bash docker/check.sh
