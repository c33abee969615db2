# Everything a person or CI does, each a line or two. `make serve` is the way in.
PYTHON ?= python3
RUNTIME ?= cpu
BIN := .venv/bin
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder  # tests of a file share what they need; long files first
SCHEMATHESIS := 4.32.5
LABEL_STUDIO := 1.23.2
CLIENTS := .venv-tritonclient .venv-kserve .venv-mlserver .venv-mlflow
AXE := 4.14.1
SBOM_TOOL := cyclonedx-bom==7.5.0
STORE := $(or $(DUBITO_STORE),models)
# the digits model, where nothing is published
PUBLISHED = @if [ -z "$$($(BIN)/python -m model_store --store '$(STORE)' list)" ]; then $(BIN)/python -m training fit recipes/digits.toml; fi

.PHONY: install serve test test-quick test-slow test-real screenshots check mutants examples cluster bench compose-check constraints sbom base-image

install: .venv/installed-$(RUNTIME)

.venv/installed-$(RUNTIME): pyproject.toml client/pyproject.toml docker/locked/dev-$(RUNTIME).txt docker/locked/torch-cpu.txt
	$(PYTHON) -m venv .venv
	PATH="$(BIN):$$PATH" sh docker/install.sh .venv dev-$(RUNTIME)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./client
	rm -f .venv/installed-*
	touch $@

serve: install
	$(PUBLISHED)
	exec $(BIN)/python -m service

test: install
	$(BIN)/python -m pytest $(IN_TWO)

test-quick: install
	$(BIN)/python -m pytest $(IN_TWO) -m "not slow and not fits and not serves"

test-slow: install
	$(BIN)/python -m pytest -m slow

test-real: install .venv-schemathesis .venv-label-studio .venv-examples/installed .venv-page/installed .venv-buckets/installed .venv-ray/installed $(CLIENTS)
	$(BIN)/python -m pytest -m real tests/real

screenshots: install .venv-page/installed
	$(BIN)/python -m tests.support.screenshots

.venv-label-studio: # likewise
	$(PYTHON) -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check label-studio==$(LABEL_STUDIO)

.venv-tritonclient: CLIENT = 'tritonclient[http]==2.73.0'
.venv-kserve: CLIENT = kserve==0.21.0
.venv-mlserver: CLIENT = mlserver==1.7.1 pandas==2.3.3 httpx==0.28.1
.venv-mlflow: CLIENT = mlflow-skinny==3.17.2 pandas==3.1.1 scipy==1.17.1
$(CLIENTS): # each in an environment of its own: their dependencies clash
	$(PYTHON) -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check $(CLIENT)

.venv-page/installed: tests/real/page-requirements.txt # selenium, and axe where there is npm
	$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	if command -v npm > /dev/null; then cd $(@D) && npm pack --silent axe-core@$(AXE) && tar xzf axe-core-$(AXE).tgz package/axe.min.js; fi
	touch $@

.venv-buckets/installed: tests/real/bucket-requirements.txt # servers of buckets
	$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

.venv-schemathesis: # an environment of its own: it brings much that nothing else here needs
	$(PYTHON) -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==$(SCHEMATHESIS)

check: install
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(BIN)/python -m pytest $(IN_TWO) --cov --cov-report=term

mutants: install .venv-mutants/installed
	nice -n 15 .venv-mutants/bin/python tests/support/mutants.py $(PART) $(MUTANTS)

.venv-mutants/installed:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

examples: install .venv-examples/installed

cluster: install .venv-ray/installed
	$(PUBLISHED)
	exec .venv-ray/bin/python -m service cluster

define BESIDE # an environment of others' packages, beside what .venv has
$(PYTHON) -m venv $(@D)
$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
touch $@
endef

.venv-examples/installed: examples/requirements.txt
	$(BESIDE)

.venv-ray/installed: docker/ray.txt
	$(BESIDE)

bench: install
	$(BIN)/python -m benchmarks

compose-check:
	bash docker/check.sh

constraints:
	{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//'; } > constraints.new && mv constraints.new constraints.txt
	$(BIN)/python docker/lock.py

sbom:
	mkdir -p build/sbom
	cd docker/locked && export PYTHONWARNINGS=ignore && for image in service-cpu service-gpu training-cpu training-gpu; do \
	    case $$image in service-*) parts= ;; *-cpu) parts=torch-cpu.txt ;; *) parts=torch.txt ;; esac; \
	    cat $$image.txt $$parts | $(CURDIR)/$(BIN)/uv tool run --quiet --from '$(SBOM_TOOL)' cyclonedx-py requirements \
	        --pyproject ../../pyproject.toml --output-file $(CURDIR)/build/sbom/$$image.cdx.json -; \
	done

base-image:  # of today, by digest; needs Docker
	digest=$$(docker buildx imagetools inspect python:3.11-slim --format '{{.Manifest.Digest}}') && \
	    sed -i "s|^ARG PYTHON=.*|ARG PYTHON=python:3.11-slim@$$digest|" docker/*.Dockerfile
