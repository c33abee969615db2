# Fits models and publishes them to /models. RUNTIME is cpu or gpu, an extra of pyproject.toml.
FROM python:3.11-slim AS requirements
ARG RUNTIME=cpu
WORKDIR /build
COPY pyproject.toml constraints.txt docker/requirements.py ./
# The slim image has no CUDA, so onnxruntime-gpu brings its own; it is pinned to onnxruntime's version.
RUN python requirements.py "$RUNTIME" training > requirements.txt \
 && sed -i 's/^onnxruntime-gpu/&[cuda,cudnn]/' requirements.txt \
 && sed 's/^onnxruntime==\(.*\)/&\nonnxruntime-gpu==\1/' constraints.txt > pins.txt

# A stage of its own: built again when the two lists change, not when other lines of pyproject.toml or the code do.
FROM python:3.11-slim AS dependencies
WORKDIR /build
COPY --from=requirements /build/requirements.txt /build/pins.txt ./
RUN python -m venv --without-pip /opt/venv
# A further index to take torch from, such as PyTorch's own of CPU builds, whose build is without CUDA's
# gigabytes. It is asked for torch and for nothing else.
ARG PIP_EXTRA_INDEX_URL=""
RUN --mount=type=cache,target=/var/cache/pip \
    pip --python /opt/venv --cache-dir /var/cache/pip install --only-binary=:all: --no-deps torch -c pins.txt
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_EXTRA_INDEX_URL="" pip --python /opt/venv --cache-dir /var/cache/pip install --only-binary=:all: -r requirements.txt -c pins.txt

FROM python:3.11-slim
RUN groupadd --gid 10001 dubito \
 && useradd --uid 10001 --gid dubito --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dubito \
 && install --directory --owner dubito --group dubito /models /runs /data
COPY --from=dependencies /opt/venv /opt/venv
RUN find /opt/venv -type d -path '*/nvidia/*/lib' > /etc/ld.so.conf.d/nvidia.conf && ldconfig
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DUBITO_STORE=/models \
    DUBITO_RUNS=/runs \
    DUBITO_DATA=/data
WORKDIR /app
COPY model_store model_store
COPY training training
COPY recipes recipes
RUN chmod -R a+rX . && python -m compileall -q .
USER 10001:10001
CMD ["python", "-m", "training", "fit", "recipes/digits.toml", "--quiet"]
