# The service without training. RUNTIME is the extra cpu or gpu of pyproject.toml. KIND is service, or cluster, which adds Ray.
# To pin the base image by digest, see docs/deployment.md.
ARG PYTHON=python:3.11-slim

# Rebuilt only if the package lists change
FROM ${PYTHON} AS dependencies
ARG RUNTIME=cpu
ARG KIND=service
WORKDIR /build
COPY docker/install.sh docker/uv.txt docker/
COPY pyproject.toml uv.lock ./
RUN python -m venv --without-pip /opt/venv
RUN --mount=type=cache,target=/var/cache/uv \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 sh docker/install.sh /opt/venv "$KIND" "$RUNTIME"
# Project metadata: the entry points of the integrations
COPY model_store/version.py model_store/
RUN touch README.md && mkdir client \
 && pip install --quiet --no-deps --no-build-isolation --prefix /opt/venv . \
 && rm -r /opt/venv/lib/python*/site-packages/model_store

FROM ${PYTHON}
RUN groupadd --gid 10001 dubito \
 && useradd --uid 10001 --gid dubito --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dubito \
 && install --directory --owner dubito --group dubito /models /state /pools /cache
COPY --from=dependencies /opt/venv /opt/venv
RUN find /opt/venv -type d -path '*/nvidia/*/lib' > /etc/ld.so.conf.d/nvidia.conf && ldconfig
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DUBITO_STORE=/models \
    DUBITO_STATE=/state \
    DUBITO_CACHE=/cache \
    DUBITO_POOLS=/pools \
    DUBITO_HOST=0.0.0.0 \
    DUBITO_PORT=8000
WORKDIR /app
COPY client/dubito dubito
COPY integrations integrations
COPY model_store model_store
COPY service service
RUN chmod -R a+rX . && python -m compileall -q .
USER 10001:10001
EXPOSE 8000
# Check /health/live, because an empty store (/health/ready) should not restart the container
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, sys; from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', int(os.environ['DUBITO_PORT']), timeout=2); c.request('GET', '/health/live'); sys.exit(c.getresponse().status != 200)"]
CMD ["python", "-m", "service"]
