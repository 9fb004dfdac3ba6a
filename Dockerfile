# Two images: `docker build --target cpu .` and `docker build --target cuda .`, the default. See docs/launch/container.md.
# Builders make an environment that is copied whole, so that the images hold neither sources nor pip's cache.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS source
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY armillary ./armillary
RUN python -m venv /opt/armillary

FROM source AS build-cpu
# PyTorch's own index of CPU builds: the usual index has builds with CUDA only, which are larger by gigabytes.
ARG TORCH_INDEX=
RUN /opt/armillary/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch
RUN /opt/armillary/bin/pip install --no-cache-dir --constraint constraints.txt '.[torch,data,http,registry]'

FROM source AS build-cuda
ARG TORCH_INDEX=
RUN /opt/armillary/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch
RUN /opt/armillary/bin/pip install --no-cache-dir --constraint constraints.txt '.[torch,data,http,registry,nvidia]'

FROM python:${PYTHON}-slim AS base
# libgomp1: threads of compiled CPU code. tini: reaps the processes that a rank leaves behind.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home armillary \
 && install --directory --owner 1000 /shared
ENV PATH=/opt/armillary/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /shared
EXPOSE 8000 8080
# Ranks of a node answer on 8080, servers on 8000; other verbs, like train, are healthy while they run. Kubernetes has probes of its own and ignores this.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
  CMD ["python", "-m", "armillary.cluster.node_health", "http://127.0.0.1:8080/livez", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--", "armillary"]
CMD ["--help"]

FROM base AS cpu
COPY --from=build-cpu /opt/armillary /opt/armillary

FROM base AS cuda
# Triton compiles a launcher for its kernels with the C compiler of the image.
USER 0
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER 1000
COPY --from=build-cuda /opt/armillary /opt/armillary
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
