# For jobs on GPUs: torch 2.13 with CUDA, fastddp and its command. docs/install.md says how to use it, and what of it was
# tried. Another torch, from 2.11 on: docker build --build-arg BASE=pytorch/pytorch:TAG (a -devel tag, which has g++).
ARG BASE=pytorch/pytorch:2.13.0-cuda13.2-cudnn9-devel

FROM ${BASE} AS build
# The interpreter may be the system's, where pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /fastddp
COPY pyproject.toml setup.py MANIFEST.in README.md CHANGELOG.md LICENSE constraints.txt fastddp_command.py ./
COPY csrc csrc
COPY fastddp fastddp
COPY kernels kernels
RUN python -m pip install ninja 'setuptools>=77'
RUN python -m pip wheel --no-build-isolation --no-deps --wheel-dir /dist .

# Sources and what compiled them stay behind. g++ is in the base, and torch.compile and Triton need it.
FROM ${BASE}
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY --from=build /dist /dist
RUN python -m pip install "$(ls /dist/fastddp-*.whl)[cli]"
# Where fastddp._C does not fit the torch, this fails and no image is made.
RUN python -m fastddp --help && fastddp --version
WORKDIR /job
