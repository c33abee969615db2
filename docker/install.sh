#!/bin/sh
# Install what docker/locked/NAME.txt lists into a virtual environment, each file by its SHA-256: install.sh VENV NAME
set -eu
venv=$1 name=$2 locked=$(dirname "$0")/locked

install() { # LIST [OPTION]
    pip --python "$venv" install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes -r "$locked/$1.txt" ${2-}
}

case $name in
service-*) ;;
*-gpu) install torch --no-deps ;;
*-cpu) # the build without CUDA, where an index or folder that pip is told of has it
    install torch-cpu --no-deps || {
        echo "no CPU build of torch was found: installing that of PyPI, with CUDA"
        install torch --no-deps
        install cuda --no-deps
    }
    ;;
esac
install "$name"
