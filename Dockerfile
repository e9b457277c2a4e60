# For jobs on GPUs: torch 2.13 with CUDA, fastddp and its command. docs/install.md says how to use it, and what of it was
# tried. Another torch, from 2.11 on: docker build --build-arg BASE=pytorch/pytorch:TAG (a -devel tag, which has g++).
ARG BASE=pytorch/pytorch:2.13.0-cuda13.2-cudnn9-devel

FROM ${BASE}
# The interpreter may be the system's, where pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# g++ and Python's headers: torch.compile and Triton need them too.
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py MANIFEST.in README.md CHANGELOG.md LICENSE constraints.txt fastddp_command.py /fastddp/
COPY csrc /fastddp/csrc
COPY fastddp /fastddp/fastddp
COPY kernels /fastddp/kernels
# The C++ part goes beside the package: whoever runs the image has another home. Where it cannot be compiled, no image is made.
RUN python -m pip install '/fastddp[cli]' && rm -r /fastddp && python -m fastddp build --in-package && fastddp --version
WORKDIR /job
