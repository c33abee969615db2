#!/bin/sh
# Install packages from uv.lock into a virtual environment, checked by SHA-256:
# install.sh VENV service|cluster|training|dev cpu|gpu
set -eu
venv=$1 purpose=$2 runtime=$3 docker=$(dirname "$0")
case $purpose in
service) extras="otel sign bucket text" ;;
cluster) extras="otel sign scale text" ;;
training) extras="training sign bucket text" ;;
dev) extras="otel sign bucket text training dev bench" ;;
esac
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT

install() {
    pip --python "$venv" install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes --no-deps -r "$1"
}

command -v uv > /dev/null || pip install --quiet --disable-pip-version-check --require-hashes -r "$docker/uv.txt"
# shellcheck disable=SC2046
uv export --project "$docker/.." --frozen --quiet --no-header --no-annotate --no-emit-project \
    --extra "$runtime" $(printf -- '--extra %s ' $extras) --output-file "$requirements" > /dev/null
case $purpose-$runtime in
training-cpu | dev-cpu)
    if install "$docker/torch-cpu.txt"; then # if a configured index or folder has it
        awk '/^[^ ]/ { of_torch = /^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)==/ } !of_torch' \
            "$requirements" > "$requirements.less" && mv "$requirements.less" "$requirements"
    else
        echo "no CPU build of torch was found: installing that of PyPI, with CUDA"
    fi
    ;;
esac
install "$requirements"
