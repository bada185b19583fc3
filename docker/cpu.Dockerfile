# ringformer on CPUs: docker build -f docker/cpu.Dockerfile -t ringformer:cpu .
# Versions and hashes are those of requirements/train.txt. The image has three layers above Python's: the locked packages,
# ringformer, and the user. The sources are in none of them.
FROM python:3.12-slim-trixie AS locked
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/train.txt requirements/
RUN pip install --require-hashes --no-deps --requirement requirements/train.txt

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
    pip install --no-index --find-links=/wheel "ringformer[train,plot]" && pip check
# Mount your folder at /work. Caches (~/.cache) are there too, so any user id can write them.
RUN useradd --uid 1000 --create-home --home-dir /work ringformer
ENV HOME=/work JAX_PLATFORMS=cpu
WORKDIR /work
USER 1000
ENTRYPOINT ["ringformer"]
CMD ["--help"]
