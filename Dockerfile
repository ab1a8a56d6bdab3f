# One file for every container of the stack. Targets: `control` (router, kvstore, ledger; no torch), `compute` (prefill,
# decode, attention_pool), `etcd` and `postgres`. compose.yaml and compose.database.yaml say which service takes which.
ARG BASE_IMAGE=python:3.11-slim
# An image with /usr/local/bin/etcd and etcdctl, or the stage that takes them from Debian's packages.
ARG ETCD_IMAGE=etcd-packaged

FROM ${BASE_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONPATH=/app PATH=/opt/venv/bin:$PATH
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp kvcommons \
    && install -d -o kvcommons -g kvcommons /data /models \
    && install -d -o kvcommons -g kvcommons -m 700 /certificates /certificates/authority /certificates/router \
       /certificates/ledger /certificates/kvstore /certificates/prefill /certificates/decode \
       /certificates/attention_pool /certificates/etcd
WORKDIR /app

FROM base AS control-packages
# Where pip finds packages, when not where it looks by itself.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python3 -m venv /opt/venv \
    && python requirements.py router kvstore postgres ledger otlp >requirements.txt \
    && pip install --no-cache-dir --disable-pip-version-check -c constraints.txt -r requirements.txt

FROM control-packages AS compute-packages
ARG TORCH=2.13.0
# The build of torch: "+cpu" from the index below, or "" for the default one, which brings CUDA.
ARG TORCH_BUILD=+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN if [ -z "$TORCH_BUILD" ]; then pip install --no-cache-dir -c constraints.txt "torch==$TORCH"; else \
      pip install --no-cache-dir --no-deps "torch==$TORCH$TORCH_BUILD" 2>/dev/null \
      || pip install --no-cache-dir --no-deps "torch==$TORCH$TORCH_BUILD" --index-url "$TORCH_INDEX"; fi \
    && python requirements.py model >requirements.txt \
    && pip install --no-cache-dir --disable-pip-version-check -c constraints.txt -r requirements.txt

# The attention kernel, by the base image's compiler or Debian's. Where neither can be had, attention is torch's.
FROM base AS kernel
COPY --chmod=755 kvcommons/attention/native native
RUN { command -v c++ || { apt-get -qq update && apt-get -qq install -y --no-install-recommends g++; }; } >/dev/null \
    || echo "no C++ compiler"; \
    python3 native/build.py && rm -rf native/__pycache__ native/.kernel.lock

FROM base AS etcd-packaged
RUN apt-get -qq update \
    && apt-get -qq install -y --no-install-recommends etcd-server etcd-client \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /usr/bin/etcd /usr/bin/etcdctl /usr/local/bin/

FROM ${ETCD_IMAGE} AS etcd-source

FROM base AS etcd
COPY --from=etcd-source /usr/local/bin/etcd /usr/local/bin/etcdctl /usr/local/bin/
USER kvcommons
VOLUME /data
CMD ["etcd", "--data-dir=/data/etcd", "--listen-client-urls=https://0.0.0.0:2379", "--advertise-client-urls=https://etcd:2379", \
     "--client-cert-auth", "--client-cert-allowed-hostname=etcd-client.kvcommons", "--enable-grpc-gateway=false", \
     "--trusted-ca-file=/certificates/ca.crt", "--cert-file=/certificates/tls.crt", "--key-file=/certificates/tls.key", \
     "--auto-compaction-mode=revision", "--auto-compaction-retention=1000", "--quota-backend-bytes=268435456"]

FROM base AS postgres
# Without the cluster that Debian makes for a machine.
RUN mkdir /etc/postgresql-common && echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf \
    && apt-get -qq update \
    && apt-get -qq install -y --no-install-recommends postgresql \
    && rm -rf /var/lib/apt/lists/* \
    && ln -sf /usr/lib/postgresql/*/bin/* /usr/local/bin/
COPY --chmod=755 deploy/start-postgres /usr/local/bin/
USER kvcommons
VOLUME /data
CMD ["start-postgres"]

FROM base AS control
COPY --from=control-packages /opt/venv /opt/venv
# Whoever checked this out with whatever umask: the services' user has to read it.
COPY --chmod=755 kvcommons kvcommons
COPY --chmod=755 services services
COPY --chmod=755 demo/model demo/model
COPY --chmod=755 deploy deploy
USER kvcommons
ENTRYPOINT ["sh", "deploy/start"]

FROM base AS compute
# With CUDA: Triton compiles how its kernels are called with the C compiler that it finds.
ARG TORCH_BUILD=+cpu
RUN [ -n "$TORCH_BUILD" ] || { apt-get -qq update && apt-get -qq install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=compute-packages /opt/venv /opt/venv
# Whoever checked this out with whatever umask: the services' user has to read it.
COPY --chmod=755 kvcommons kvcommons
COPY --from=kernel --chmod=755 /app/native kvcommons/attention/native
COPY --chmod=755 services services
COPY --chmod=755 demo/model demo/model
COPY --chmod=755 deploy deploy
USER kvcommons
ENTRYPOINT ["sh", "deploy/start"]
