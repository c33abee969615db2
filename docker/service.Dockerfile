# The service alone: what fits models stays out. RUNTIME is cpu or gpu, an extra of pyproject.toml.
FROM python:3.11-slim AS requirements
ARG RUNTIME=cpu
WORKDIR /build
COPY pyproject.toml constraints.txt docker/requirements.py ./
# The slim image has no CUDA, so onnxruntime-gpu brings its own; it is pinned to onnxruntime's version.
RUN python requirements.py "$RUNTIME" otel > requirements.txt \
 && sed -i 's/^onnxruntime-gpu/&[cuda,cudnn]/' requirements.txt \
 && sed 's/^onnxruntime==\(.*\)/&\nonnxruntime-gpu==\1/' constraints.txt > pins.txt

# A stage of its own: built again when the two lists change, not when other lines of pyproject.toml or the code do.
FROM python:3.11-slim AS dependencies
WORKDIR /build
COPY --from=requirements /build/requirements.txt /build/pins.txt ./
RUN python -m venv --without-pip /opt/venv
RUN --mount=type=cache,target=/var/cache/pip \
    pip --python /opt/venv --cache-dir /var/cache/pip install --only-binary=:all: -r requirements.txt -c pins.txt

FROM python:3.11-slim
RUN groupadd --gid 10001 dubito \
 && useradd --uid 10001 --gid dubito --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dubito \
 && install --directory --owner dubito --group dubito /models
COPY --from=dependencies /opt/venv /opt/venv
RUN find /opt/venv -type d -path '*/nvidia/*/lib' > /etc/ld.so.conf.d/nvidia.conf && ldconfig
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DUBITO_STORE=/models \
    DUBITO_HOST=0.0.0.0 \
    DUBITO_PORT=8000
WORKDIR /app
COPY model_store model_store
COPY service service
RUN chmod -R a+rX . && python -m compileall -q .
USER 10001:10001
EXPOSE 8000
# Live, not ready: an empty store is no reason to start the container again, and /health/ready says what is missing.
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, sys; from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', int(os.environ['DUBITO_PORT']), timeout=2); c.request('GET', '/health/live'); sys.exit(c.getresponse().status != 200)"]
CMD ["python", "-m", "service"]
