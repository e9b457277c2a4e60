"""Block8's kernels on the GPU: `bench.block8`."""

from functools import partial

from bench.block8 import FAMILY
from bench.gpu.kernels import measure_family

measure = partial(measure_family, family=FAMILY)
