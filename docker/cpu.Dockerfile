# `rapid serve` on CPUs. From the root of the repository:
#   docker build -f docker/cpu.Dockerfile -t rapid:cpu .
# PYTHON is pinned by its full version, not by its digest: there was no network to read that from when this was written.
# Pin it yourself with --build-arg PYTHON=python:3.11.14-slim-bookworm@sha256:... (`docker buildx imagetools inspect` tells).
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip and setuptools stay in /opt/tools, out of what is served
ARG PIP=26.3
RUN python -m venv /opt/tools && /opt/tools/bin/python -m pip install "pip==${PIP}" \
    && python -m venv --without-pip /opt/rapid
WORKDIR /source
COPY pyproject.toml constraints.txt docker/requirements.py ./
# torch from its index of CPU builds, without dependencies, for that index has old versions of them; then all the rest
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/tools/bin/pip --python /opt/rapid install --no-deps --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
RUN python requirements.py pyproject.toml cpu,serve > requirements.txt \
    && /opt/tools/bin/pip --python /opt/rapid install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY rapid rapid
COPY index index
COPY server server
RUN /opt/tools/bin/pip install "$(grep '^setuptools==' constraints.txt)" \
    && /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/tools/bin/pip --python /opt/rapid install --no-deps /wheels/*.whl

FROM ${PYTHON}
RUN groupadd --gid 10001 rapid && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rapid
COPY --from=build /opt/rapid /opt/rapid
# MALLOC_: with glibc's defaults fresh memory costs more than the arithmetic. HOME: libraries cache there if they must;
# /tmp is all that needs to be writable. HF_HUB_OFFLINE: nothing is ever fetched.
ENV PATH=/opt/rapid/bin:$PATH \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    MALLOC_MMAP_MAX_=0 \
    MALLOC_TRIM_THRESHOLD_=100000000000 \
    MALLOC_TOP_PAD_=1000000000 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('RAPID_SERVE_PORT', '8000') + '/readyz', timeout=4)"]
ENTRYPOINT ["rapid"]
CMD ["serve", "--model", "/model", "--host", "0.0.0.0"]
