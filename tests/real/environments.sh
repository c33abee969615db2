#!/usr/bin/env bash
# Make the environments of other people's programs, each its own since their dependencies clash:
# environments.sh all | NAME...
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
names=("$@")
[ "${names[*]}" = all ] && names=(schemathesis label-studio generated examples page buckets ray tritonclient kserve mlserver mlflow notebooks)

make_venv() { # NAME PIP-ARGUMENTS...
    "$PYTHON" -m venv ".venv-$1"
    ".venv-$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

share_packages() { # NAME: with what .venv has
    "$PYTHON" -m venv ".venv-$1"
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        > "$(".venv-$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
}

make_environment() {
    case $1 in
    schemathesis) make_venv "$1" schemathesis==4.32.5 ;;
    label-studio) make_venv "$1" label-studio==1.23.2 ;;
    tritonclient) make_venv "$1" 'tritonclient[http]==2.73.0' ;;
    kserve) make_venv "$1" kserve==0.21.0 ;;
    mlserver) make_venv "$1" mlserver==1.7.1 pandas==2.3.3 httpx==0.28.1 ;;
    mlflow) # and what models that are written for it need
        read -ra needs < <(.venv/bin/python -c 'from integrations.mlflow.pyfunc import requirements; print(*requirements())')
        make_venv "$1" mlflow-skinny==3.17.2 pandas==3.1.1 scipy==1.17.1 "${needs[@]}"
        ;;
    buckets) make_venv "$1" -r tests/real/bucket-requirements.txt ;;
    page) # selenium, and axe where there is npm
        make_venv "$1" -r tests/real/page-requirements.txt
        if command -v npm > /dev/null; then
            (cd .venv-page && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz package/axe.min.js)
        fi
        ;;
    generated) # generators of clients: of Python, and where there is npm of TypeScript
        make_venv "$1" openapi-python-client==0.29.1
        if command -v npm > /dev/null; then
            npm install --silent --no-fund --prefix .venv-generated openapi-typescript@7.13.0 openapi-fetch@0.17.0 typescript@5.9.3
        fi
        ;;
    docs) make_venv "$1" mkdocs==1.6.1 mkdocs-material==9.8.1 ;;
    examples)
        share_packages "$1"
        .venv-examples/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r examples/requirements.txt
        ;;
    notebooks) # also the two that a fit reports to (docs/python.md)
        share_packages "$1"
        .venv-notebooks/bin/python -m pip install --quiet --disable-pip-version-check \
            nbclient==0.11.0 ipykernel==7.4.0 tensorboard==2.21.0 mlflow-skinny==3.17.2
        ;;
    ray)
        share_packages "$1"
        PATH="$PWD/.venv/bin:$PATH" sh docker/install.sh .venv-ray cluster cpu
        ;;
    *) echo "$1: expected the name of an environment in $0" >&2 && exit 2 ;;
    esac
}

for name in "${names[@]}"; do
    made=.venv-$name/installed
    if [ "$made" -ot uv.lock ] || [ "$made" -ot "$0" ] || [ ! -e "$made" ]; then
        make_environment "$name"
        touch "$made"
    fi
done
