# Fits models and publishes them to /models. RUNTIME is the extra cpu or gpu of pyproject.toml.
# To pin the base image by digest, see docs/deployment.md.
ARG PYTHON=python:3.11-slim

# Rebuilt only if the package lists change
FROM ${PYTHON} AS dependencies
ARG RUNTIME=cpu
# An additional index for torch, such as PyTorch's index of smaller CPU builds.
# All packages are checked by SHA-256, so the index cannot replace them.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /build
COPY docker/install.sh docker/uv.txt docker/torch-cpu.txt docker/
COPY pyproject.toml uv.lock ./
RUN python -m venv --without-pip /opt/venv
RUN --mount=type=cache,target=/var/cache/uv \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 sh docker/install.sh /opt/venv training "$RUNTIME"

FROM ${PYTHON}
RUN groupadd --gid 10001 dubito \
 && useradd --uid 10001 --gid dubito --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dubito \
 && install --directory --owner dubito --group dubito /models /runs /data /state /cache
COPY --from=dependencies /opt/venv /opt/venv
RUN find /opt/venv -type d -path '*/nvidia/*/lib' > /etc/ld.so.conf.d/nvidia.conf && ldconfig
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DUBITO_STORE=/models \
    DUBITO_RUNS=/runs \
    DUBITO_DATA=/data \
    DUBITO_STATE=/state \
    DUBITO_CACHE=/cache
WORKDIR /app
COPY model_store model_store
COPY training training
COPY recipes recipes
RUN chmod -R a+rX . && python -m compileall -q .
USER 10001:10001
CMD ["python", "-m", "training", "fit", "recipes/digits.toml", "--quiet"]
