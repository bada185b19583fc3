# ringformer on NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t ringformer .
# Versions and hashes are those of requirements/cuda.txt. Its wheels bring CUDA, cuDNN and NCCL at the versions that JAX was
# built with, so the base needs no CUDA: an nvidia/cuda image would only add a second copy that JAX does not load. The host
# provides the driver (580 or newer) through the NVIDIA container toolkit.
FROM python:3.12-slim-trixie AS locked
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/cuda.txt requirements/
RUN pip install --require-hashes --no-deps --requirement requirements/cuda.txt

FROM locked AS wheel
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs/
COPY scripts scripts/
COPY ringformer ringformer/
RUN pip wheel --no-index --no-build-isolation --no-deps --wheel-dir /wheel .

FROM locked
# --no-index: a package that the lock file does not have is an error, not a download. The wheel has the version of its sources.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-index --find-links=/wheel "ringformer[train,plot,cuda]" && pip check
# Mount your folder at /work. Caches (~/.cache) are there too, so any user id can write them.
RUN useradd --uid 1000 --create-home --home-dir /work ringformer
# The parts of the driver that JAX needs, and the share of a GPU's memory that estimates assume.
ENV HOME=/work NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
WORKDIR /work
USER 1000
ENTRYPOINT ["ringformer"]
CMD ["--help"]
