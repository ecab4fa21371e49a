# zero2all for machines with an NVIDIA GPU. How to build and run it: docs/docker.md.
#
# The torch wheel brings its own CUDA 13.0 libraries; the base image adds what the NVIDIA container toolkit needs to hand
# the driver in. Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# gcc, the C library's headers and Python's headers: Triton compiles a launcher for each kernel at run time. g++: so does
# torch.compile (ops.compile) on a CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# A virtual environment, because pip may not change the system's Python.
RUN python3 -m venv /opt/zero2all
ENV PATH=/opt/zero2all/bin:$PATH

# The wheel is what `pip wheel .` makes anywhere. requirements.lock is used as constraints, so only what is needed gets
# installed. It does not pin the fused packages, fa4 and liger: FlashAttention 4, QuACK and Liger's kernels.
WORKDIR /build
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY configs configs
COPY zero2all zero2all
RUN pip wheel --no-cache-dir --no-deps --wheel-dir dist . \
    && pip install --no-cache-dir --constraint requirements.lock "$(ls dist/zero2all-*.whl)[fa4,liger]" \
    && rm -rf /build/*

# Nothing in the container needs root. /workspace is where a folder of yours is mounted.
RUN useradd --create-home --shell /bin/bash z2a \
    && mkdir /workspace \
    && chown z2a /workspace
USER z2a
WORKDIR /workspace

# With `docker run --user` the home folder may not be writable; matplotlib keeps its font list, Triton
# and numba their compiled code here.
ENV MPLCONFIGDIR=/tmp/matplotlib TRITON_CACHE_DIR=/tmp/triton NUMBA_CACHE_DIR=/tmp/numba

ENTRYPOINT ["z2a"]
CMD ["--help"]
