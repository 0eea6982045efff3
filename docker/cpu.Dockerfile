# docker build --file docker/cpu.Dockerfile --tag roll-cpu .
FROM python:3.12-slim-bookworm

# The CPU engine compiles its kernels with g++ at the first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Arguments of pip for PyTorch alone, such as --index-url with PyTorch's CPU index.
ARG TORCH_INDEX_ARGS=""

WORKDIR /opt/roll
COPY requirements requirements
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir --no-deps ${TORCH_INDEX_ARGS} "$(grep ^torch== requirements/cpu.txt)" \
    && pip install --no-cache-dir --no-deps --requirement requirements/cpu.txt "setuptools>=77"

COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml roll_posttraining.py setup.py ./
COPY roll roll
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# Examples import `examples.*`; a run writes to the current folder.
WORKDIR /work
COPY examples examples
ENV RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT ["roll"]
CMD ["--help"]
