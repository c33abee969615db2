#!/usr/bin/env bash
# Build the images, fit the digits model, serve it and check a response. Uses a temporary Compose project, so existing
# containers and volumes are not affected.
set -euo pipefail
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=dubito-check IMAGE_TAG=check DUBITO_HOST=127.0.0.1 DUBITO_PORT="${CHECK_PORT:-18000}"

docker compose --profile monitoring config --quiet
docker compose -f docker-compose.yml -f docker-compose.gpu.yml config --quiet
AWS_ACCESS_KEY_ID=check AWS_SECRET_ACCESS_KEY=check docker compose -f docker-compose.yml -f docker-compose.bucket.yml config --quiet
trap 'docker compose --profile train down --volumes' EXIT
docker compose --profile train build
docker compose run --rm training
docker compose up --detach --wait
docker compose exec -T service python - < docker/smoke.py
