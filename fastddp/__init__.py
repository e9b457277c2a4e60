"""fastddp: a faster drop-in for ``torch.nn.parallel.DistributedDataParallel``.

>>> model = fastddp.DistributedDataParallel(model)
"""

from fastddp.extension.building import build, provide

provide()  # first: everything else imports fastddp._C

from fastddp import comm_hooks  # noqa: E402
from fastddp._version import __version__  # noqa: E402
from fastddp.ddp import DistributedDataParallel  # noqa: E402
from fastddp.in_place.replicate import replicate  # noqa: E402
from fastddp.patching import patch  # noqa: E402
from fastddp.planning.bucket_plan import BucketPlan  # noqa: E402
from fastddp.sharding.clipping import clip_grad_norm_  # noqa: E402
from fastddp.sharding.optimizer import ShardedOptimizer  # noqa: E402
from fastddp.watch.corruption import Corruption, CorruptionError  # noqa: E402
from fastddp.watch.options import Watch  # noqa: E402
from fastddp.watch.stall_report import StallReport  # noqa: E402

__all__ = [
    "BucketPlan",
    "Corruption",
    "CorruptionError",
    "DistributedDataParallel",
    "ShardedOptimizer",
    "StallReport",
    "Watch",
    "__version__",
    "build",
    "clip_grad_norm_",
    "comm_hooks",
    "patch",
    "replicate",
]
