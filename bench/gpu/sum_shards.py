"""What adds up shards of 16 bits on the GPU: `bench.sum_shards`."""

from functools import partial

from bench.gpu.kernels import measure_family
from bench.sum_shards import FAMILY

measure = partial(measure_family, family=FAMILY)
