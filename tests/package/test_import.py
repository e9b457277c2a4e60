"""What is built fits its torch and is complete, and importing it brings along next to nothing beyond torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastddp
import packaging_check


@pytest.mark.tier("nightly")
def test_an_sdist_holds_every_source_and_fits_any_torch(tmp_path: Path) -> None:
    sdist = packaging_check.build_sdist(packaging_check.ROOT, tmp_path)
    packaging_check.check_sdist(sdist)
    assert sdist.name == f"fastddp-{fastddp.__version__}.tar.gz"
    assert importlib.metadata.version("fastddp") == fastddp.__version__


# Torch's hooks, which are fastddp's too: eight small files. Everything else of torch's that fastddp needs at once is
# imported by torch's own class.
WELCOME = "torch.distributed.algorithms.ddp_comm_hooks"

NEW = """
import json, sys
import torch, torch.distributed, torch.nn.parallel.distributed
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

STEP = """
import fastddp
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = fastddp.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""


def others(code: str) -> list[str]:
    """What ``code`` imports of other packages, beyond what torch and its DDP have imported."""
    # -P: what is installed, which is not what lies in this folder if a torch was named to make.
    run = subprocess.run(
        [sys.executable, "-P", "-c", NEW.format(code=code)], capture_output=True, text=True, check=True
    )
    new: list[str] = json.loads(run.stdout.splitlines()[-1])
    ours = {"fastddp", *sys.stdlib_module_names}
    return [name for name in new if name.partition(".")[0] not in ours and not name.startswith(WELCOME)]


def test_fastddp_imports_nothing_heavy() -> None:
    """Such as torch.distributed.optim, which compiles eight optimizers, torch.distributed.tensor, triton or rich."""
    assert others("import fastddp") == []


@pytest.mark.tier("nightly")
def test_a_model_without_optimizers_in_backward_does_not_import_them() -> None:
    assert "torch.distributed.optim" not in others(STEP)
