# syntax=docker/dockerfile:1
# For NVIDIA GPUs:     docker build -t stopmim .
# For any other host:  docker build -t stopmim:cpu --build-arg DEVICE=cpu .
# docs/install.md says how to run it.
ARG DEVICE=cuda

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/stopmim
COPY constraints.txt ./

# The wheels on PyPI bring CUDA along; torch.compile needs a C compiler beside them.
FROM base AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install -c constraints.txt torch torchvision

FROM base AS cpu
RUN pip install -c constraints.txt torch torchvision --index-url https://download.pytorch.org/whl/cpu

FROM ${DEVICE} AS final
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt ".[all]" \
    && useradd --uid 1000 stopmim \
    && mkdir /data \
    && chown stopmim /data
# Caches lie where any user may write, for `docker run --user`; torch asks for a name too.
ENV HOME=/tmp USER=stopmim
USER stopmim
WORKDIR /data
ENTRYPOINT ["stopmim"]
CMD ["--help"]
