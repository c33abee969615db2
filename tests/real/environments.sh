#!/usr/bin/env bash
# Create an environment for each external program, because their dependencies conflict:
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

share_packages() { # NAME: also sees the packages of .venv
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
    mlflow) # with the requirements of exported models
        read -ra needs < <(.venv/bin/python -c 'from integrations.mlflow.pyfunc import requirements; print(*requirements())')
        make_venv "$1" mlflow-skinny==3.17.2 pandas==3.1.1 scipy==1.17.1 "${needs[@]}"
        ;;
    buckets) make_venv "$1" -r tests/real/bucket-requirements.txt ;;
    page) # selenium, and axe if npm is installed
        make_venv "$1" -r tests/real/page-requirements.txt
        if command -v npm > /dev/null; then
            (cd .venv-page && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz package/axe.min.js)
        fi
        ;;
    generated) # client generators for Python, and for TypeScript if npm is installed
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
    notebooks) # with TensorBoard and MLflow (docs/python.md)
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
    marker=.venv-$name/installed
    if [ "$marker" -ot uv.lock ] || [ "$marker" -ot "$0" ] || [ ! -e "$marker" ]; then
        make_environment "$name"
        touch "$marker"
    fi
done
