#!/bin/sh
# Install packages from uv.lock into a virtual environment, checked by SHA-256:
# install.sh VENV service|cluster|training|dev cpu|gpu
set -eu
venv=$1 purpose=$2 runtime=$3 docker=$(dirname "$0")
case $purpose in
service) extras="otel sign bucket text" ;;
cluster) extras="otel sign scale text" ;;
training) extras="training sign bucket text" ;;
dev) extras="otel sign bucket text training dev" ;;
esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

install() {
    uv pip sync --quiet --python "$venv/bin/python" --no-build --require-hashes "$@"
}

command -v uv > /dev/null || pip install -qq --disable-pip-version-check --require-hashes -r "$docker/uv.txt"
# uv does not read pip's configuration.
if pip config list > "$folder/pip" 2> /dev/null; then
    for option in index-url=UV_DEFAULT_INDEX extra-index-url=UV_INDEX find-links=UV_FIND_LINKS cert=SSL_CERT_FILE; do
        value=$(sed -n "/^.*\.${option%=*}='\(.*\)'\$/{ s//\1/; s/\\\\n/ /g; p; q; }" "$folder/pip")
        [ -z "$value" ] || export "${option#*=}=$value"
    done
    export UV_INDEX_STRATEGY=unsafe-best-match # pip's strategy; hashes decide what is installed
fi
# shellcheck disable=SC2046
uv export --project "$docker/.." --frozen --quiet --no-header --no-annotate --no-emit-project \
    --extra "$runtime" $(printf -- '--extra %s ' $extras) --output-file "$folder/all.txt" > /dev/null
case $purpose-$runtime in
training-cpu | dev-cpu)
    awk '/^[^ ]/ { of_torch = /^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)==/ } !of_torch' \
        "$folder/all.txt" > "$folder/less.txt"
    install "$docker/torch-cpu.txt" "$folder/less.txt" && exit # if a configured index or folder has torch
    echo "no CPU build of torch was found: installing that of PyPI, with CUDA"
    ;;
esac
install "$folder/all.txt"
