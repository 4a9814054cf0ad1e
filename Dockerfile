# Two targets of one file:
#   docker build --target gpu -t prefixonce .        docker run --gpus all --rm -v "$PWD/out:/out" prefixonce reproduce
#   docker build --target cpu -t prefixonce:cpu .    docker run --rm -v "$PWD/out:/out" prefixonce:cpu reproduce
# Runs and reports are written to /out, which must be writable by user 1000. Started again it measures what is missing.

# ---- gpu: SGLang's own image brings torch, triton, FlashInfer and CUDA at the versions this project pins ----
FROM lmsysorg/sglang:v0.5.16 AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/prefixonce
COPY pyproject.toml requirements.lock README.md ./
COPY kernels kernels
COPY harness harness
COPY conf conf
# The image already holds SGLang and torch; the lock is a constraint, so nothing of theirs moves.
RUN sed -e 's/ \\$//' -e '/^ *--hash/d' requirements.lock > /tmp/constraints.txt \
    && python3 -m pip install --constraint /tmp/constraints.txt -e ".[bench]" -e kernels/platform-cpu \
    && python3 -c "import sglang, prefixonce, prefixbench; assert sglang.__version__ == '0.5.16', sglang.__version__" \
    && useradd --uid 1000 --create-home bench \
    && mkdir -p /out && chown bench /out
COPY runs runs
USER bench
WORKDIR /out
ENTRYPOINT ["prefixbench"]
CMD ["doctor"]

# ---- cpu: the same pins from the lock; torch computes attention, everything else is the real SGLang ----
FROM python:3.11-slim-bookworm AS cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# gcc: triton and torch compile small host stubs when SGLang imports them. The base image fixes Debian's release; a
# pinned package would vanish with its next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/prefixonce
COPY requirements.lock ./
RUN python3 -m pip install "uv==0.13.9" && uv pip install --system --no-cache --require-hashes -r requirements.lock
COPY pyproject.toml README.md ./
COPY kernels kernels
COPY harness harness
COPY conf conf
COPY runs runs
RUN uv pip install --system --no-cache --no-deps -e . -e kernels/platform-cpu \
    && useradd --uid 1000 --create-home bench \
    && mkdir -p /out && chown bench /out
USER bench
WORKDIR /out
ENTRYPOINT ["prefixbench"]
CMD ["doctor"]
