"""``python -m fastddp`` gives a script what ``python`` gives it: arguments, names, where it lies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import __main__ as command

SCRIPT = """
import atexit, json, os, pickle, sys
import beside

class Thing: pass

def annotated(value: int) -> None: pass

os.chdir("elsewhere")
print(json.dumps({
    "name": __name__, "argv": sys.argv, "file": __file__, "there": os.path.exists(__file__), "path": sys.path[0],
    "annotations": str(annotated.__annotations__), "loader": type(__loader__).__name__, "spec": repr(__spec__),
    "main": sys.modules["__main__"].__dict__ is globals(), "pickled": repr(pickle.loads(pickle.dumps(Thing))),
}))
atexit.register(lambda: print("at exit", pickle.loads(pickle.dumps(Thing())).__class__ is Thing))
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "printing.py").write_text("import sys; print(sys.argv, __file__, __name__)")
    for inside in (tmp_path, tmp_path / "elsewhere", tmp_path / "elsewhere" / "elsewhere"):
        inside.mkdir(exist_ok=True)
        (inside / "train.py").write_text(SCRIPT)
        (inside / "beside.py").write_text("VALUE = 7\n")
    return tmp_path


def ran(folder: Path, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100)
    assert ended.stdout, ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize(
    "given", ["train.py -- x --lr 3", "train.py -m -- -- -h", "elsewhere/train.py", "-m printing -- x -m"]
)
def test_a_script_finds_what_it_finds_under_python(folder: Path, given: str) -> None:
    assert ran(folder, "-m", "fastddp", *given.split()) == ran(folder, *given.split())


@pytest.mark.parametrize("how", ["train.py", "-m train"])
def test_an_error_of_the_script_begins_there(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text("import atexit, sys\natexit.register(lambda: print(sys.last_value))\nint('x')\n")
    command = [sys.executable, "-m", "fastddp", *how.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    first, of_script, *_, last = ended.stderr.splitlines()
    assert (ended.returncode, first) == (1, "Traceback (most recent call last):")
    assert of_script == f'  File "{tmp_path / "train.py"}", line 3, in <module>'
    assert last.removeprefix("ValueError: ") == ended.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: script.py | module"),
        (["--hooks", "int8", "train.py"], "there is no option --hooks. Did you mean '--hook'? There are --hook, "),
        (["--on_stall=raise", "train.py"], "there is no option --on_stall. Did you mean '--on-stall'?"),
        (["trian.py", "--lr", "3"], "there is no script 'trian.py' in {} (a module is run with -m)"),
    ],
)
def test_no_target_or_one_that_is_not_there_is_an_error_that_says_so(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert text.format(tmp_path) in capsys.readouterr().err
    assert parallel.DistributedDataParallel is TorchDDP


TRAINING = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import beside

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(40, 40))
model(torch.full((2, 40), dist.get_rank() + 1.0)).sum().backward()
if dist.get_rank() == 0:
    print(json.dumps([type(model).__module__, sys.argv[1:], __name__, beside.VALUE]))
dist.barrier()
dist.destroy_process_group()
"""

STARTS_ITS_OWN_RANKS = """
import os, subprocess, sys
import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
dist.init_process_group("gloo")
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
"""


@pytest.mark.tier("slow")
def test_ranks_that_a_script_starts_as_new_processes_may_be_without_fastddp(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STARTS_ITS_OWN_RANKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    without_launcher = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "fastddp", "train.py", port]
    ended = subprocess.run(command, cwd=tmp_path, env=without_launcher, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "Start it with torchrun -m fastddp, or call fastddp.patch() in the script. [FD015" in ended.stderr


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("target", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_torchrun_runs_a_script_that_knows_nothing_of_fastddp(folder: Path, target: list[str]) -> None:
    (folder / "train.py").write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = '["fastddp.ddp", ["--lr", "3", "-m"], "__main__", 7]\n'
    assert ran(folder, *torchrun, "-m", "fastddp", *target, "--lr", "3", "-m") == (0, said)
