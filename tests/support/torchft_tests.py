"""torchft's own tests of its DistributedDataParallel, with fastddp's class in its place.

python tests/support/torchft_tests.py [pytest's arguments]

Their replicas are threads of one process. Managers are synchronous unless a test says otherwise, and such tests are
left out: fastddp refuses them by name.
"""

from __future__ import annotations

import functools
import sys

import pytest
import torchft.manager_integ_test as theirs
from torchft.manager import Manager

from fastddp import elastic

theirs.DistributedDataParallel = elastic.DistributedDataParallel
theirs.Manager = functools.partial(Manager, use_async_quorum=False)

if __name__ == "__main__":
    chosen = ["-k", "ddp and not _async_quorum", "-p", "no:cacheprovider", "-q", *sys.argv[1:]]
    sys.exit(pytest.main([theirs.__file__, *chosen]))
