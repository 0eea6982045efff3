# docker build --file docker/gpu.Dockerfile --tag roll-gpu .
# docker run --gpus all --shm-size 16g --volume "$PWD:/work/run" roll-gpu run run/my.yaml
FROM nvidia/cuda:13.0.3-devel-ubuntu24.04

# SGLang compiles kernels with nvcc of this image and with g++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /opt/roll
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --requirement requirements/gpu-lock.txt "setuptools>=77"

COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml roll_posttraining.py setup.py ./
COPY roll roll
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

WORKDIR /work
COPY examples examples
ENV RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT ["roll"]
CMD ["--help"]
