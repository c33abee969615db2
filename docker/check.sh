#!/usr/bin/env bash
# Build the images, fit the digits model, serve it, and check an answer: as a project of its own, which leaves the
# containers and volumes of a deployment alone and is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=dubito-check IMAGE_TAG=check DUBITO_HOST=127.0.0.1 DUBITO_PORT="${CHECK_PORT:-18000}"

docker compose --profile monitoring config --quiet
docker compose -f docker-compose.yml -f docker-compose.gpu.yml config --quiet
trap 'docker compose --profile train down --volumes' EXIT
docker compose --profile train build
docker compose run --rm training
docker compose up --detach --wait
docker compose exec -T service python - < docker/smoke.py
