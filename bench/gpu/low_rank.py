"""PowerSGD's kernels on the GPU: `bench.low_rank`."""

from functools import partial

from bench.gpu.kernels import measure_family
from bench.low_rank import FAMILY

measure = partial(measure_family, family=FAMILY)
