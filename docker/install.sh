#!/bin/sh
# Install what docker/locked/NAME.txt lists into a virtual environment, each file by its SHA-256: install.sh VENV NAME
set -eu
venv=$1 name=$2 locked=$(dirname "$0")/locked

install() { # LIST, which is whole: what a package names beside it is not wanted
    pip --python "$venv" install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes --no-deps -r "$locked/$1.txt"
}

case $name in
service-* | cluster-*) ;;
*-gpu) install torch ;;
*-cpu) # the build without CUDA, where an index or folder that pip is told of has it
    install torch-cpu || {
        echo "no CPU build of torch was found: installing that of PyPI, with CUDA"
        install torch
        install cuda
    }
    ;;
esac
install "$name"
