# One file, one image per kind of machine:
#
#   base   router, ready bank, sandbox, client and command line; no torch, no engine
#   cpu    inference and trainer on processors
#   gpu    inference and trainer on NVIDIA GPUs (not yet run on hardware)
#
#   docker build --target base -t muster:base .
#
# It needs no BuildKit (no `RUN --mount`), and builders without it make every stage that stands
# before the wanted one: so the small ones come first.
# Without internet: `make wheelhouse` where there is some, then build anywhere (docs/deploy.md).
# Layers change from seldom to often: system, dependencies, Muster itself. A change of code alone
# builds and ships the last one.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- what installs; nothing of it is shipped -----------------------------------------------------
FROM ${BASE_IMAGE} AS build
# pip's own names, for machines that have an index of their own.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/pip
COPY deploy/wheelhouse/ /wheelhouse/
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/install.sh deploy/

FROM build AS app
COPY README.md ./
COPY muster/ muster/
COPY services/ services/
COPY sim/ sim/
RUN deploy/install.sh --project /opt/muster/app

# --- what every service runs in ------------------------------------------------------------------
FROM ${BASE_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Muster" \
      org.opencontainers.image.description="Collects complete, trustworthy batches of agent rollouts" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Boxes see /usr of their host, and Python there; some base images have it in /usr/local only.
RUN echo 'muster:x:10001:' >> /etc/group \
 && echo 'muster:x:10001:10001:Muster:/var/lib/muster:/usr/sbin/nologin' >> /etc/passwd \
 && mkdir -p /var/lib/muster /models /tasks /run/muster \
 && chown 10001:10001 /var/lib/muster /models /run/muster \
 && { [ -e /usr/bin/python3 ] || ln -s "$(command -v python3)" /usr/bin/python3; }
ENV PATH=/opt/muster/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /
# First process of the container: reaps, and hands signals to the service alone.
ENTRYPOINT ["dumb-init", "--single-child", "--"]
CMD ["muster", "--help"]
STOPSIGNAL SIGTERM

# --- base ----------------------------------------------------------------------------------------
FROM build AS base-env
RUN deploy/install.sh server
# What no service imports: downloads from a hub (models are folders here), backends for other Pythons.
RUN /opt/pip/bin/pip --python /opt/muster/bin/python uninstall -q -y huggingface-hub hf-xet \
 && rm -f /opt/muster/lib/python3*/site-packages/zstandard/_cffi*.so

FROM runtime AS base
COPY --from=base-env /opt/muster/ /opt/muster/
COPY --from=app /opt/muster/app/ /opt/muster/app/
USER 10001:10001

# --- cpu -----------------------------------------------------------------------------------------
FROM build AS cpu-env
RUN deploy/install.sh cpu

FROM runtime AS cpu
# libnuma: where the engine's memory lies.
COPY deploy/packages/ /tmp/packages/
RUN sh /tmp/packages/install.sh libnuma1
COPY --from=cpu-env /opt/muster/ /opt/muster/
COPY --from=app /opt/muster/app/ /opt/muster/app/
USER 10001:10001

# --- gpu -----------------------------------------------------------------------------------------
FROM build AS gpu-env
RUN deploy/install.sh gpu

FROM runtime AS gpu
# The engine compiles kernels when it starts.
COPY deploy/packages/ /tmp/packages/
RUN sh /tmp/packages/install.sh gcc libc6-dev libnuma1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-env /opt/muster/ /opt/muster/
COPY --from=app /opt/muster/app/ /opt/muster/app/
USER 10001:10001
