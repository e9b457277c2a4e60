"""What `fastddp doctor` says about versions, and about an extension that cannot be loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastddp
from fastddp.tools.doctor import software
from fastddp.tools.doctor.software import Software
from repository import ROOT

PACKAGE = Path(fastddp.__file__).parent
COMMAND = ROOT / "fastddp_command.py"
INSTALLED = software.look()


def test_what_is_installed_here_fits() -> None:
    lines = INSTALLED.lines()
    assert lines["torch"].startswith(f"{torch.__version__}, ")
    assert lines["fastddp"] == fastddp.__version__
    assert lines["fastddp._C"].startswith("compiled for torch ")
    assert "no use" not in lines["fastddp._C"]
    assert [finding for finding in software.findings(INSTALLED) if finding.level == "wrong"] == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, folder / "fastddp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "csrc"):
        if not (folder / "fastddp" / name).exists():  # installed in place
            shutil.copytree(PACKAGE.parent / name, folder / "fastddp" / name)
    shutil.copy(COMMAND, folder)
    return folder


def run_python(code: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    # What is installed in place would be found for what the copy lacks.
    code = f"import sys; sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]; {code}"
    command = [sys.executable, "-P", "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.tier("slow")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "It cannot be loaded: it has been compiled for torch 0.9 alone. Run `python -m fastddp build`"),
        (b"not a library", "It cannot be loaded: what is in "),
    ],
)
def test_an_extension_that_is_of_no_use_is_wrong_and_the_rest_is_checked(
    copy: Path, content: bytes | None, words: str, tmp_path: Path
) -> None:
    (file,) = (copy / "fastddp" / "extension").glob("torch-*/_C*.so")
    before = file.read_bytes()
    if content is None:
        file.parent.rename(file.parent.with_name("torch-0.9-of-old"))
    else:
        file.unlink()
        file.write_bytes(content)
    alone = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-compiler"}
    status, out, errors = run_python(
        f"sys.path.insert(0, {str(copy)!r}); from fastddp_command import main; main()", "doctor", **alone
    )
    out = " ".join(out.split())
    imported = run_python(f"sys.path.insert(0, {str(copy)!r}); import fastddp", **alone)
    if content is None:
        file.parent.with_name("torch-0.9-of-old").rename(file.parent)
    else:
        file.write_bytes(before)
    assert (status, errors) == (1, "")
    assert "WRONG fastddp._C: " in out
    assert words in out
    assert "python -m fastddp build" in out
    assert "Kernels" not in out
    assert "there is no C++ compiler (no-compiler)" in imported[2]  # everywhere else it is an error


def test_help_and_ps_do_without_torch() -> None:
    code = """
import sys
from fastddp_command import main
for arguments in ("--help", "doctor --help", "ps", "ps --json", "trace --help", "explain", "explain FD010"):
    sys.argv[1:] = arguments.split()
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, arguments
assert not {"torch", "numpy"} & sys.modules.keys()
"""
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.tier("slow")
def test_the_package_is_whole_once_more_than_a_tool_is_asked_for(copy: Path) -> None:
    code = f"""
sys.path.insert(0, {str(copy)!r})
import fastddp_command
fastddp_command._import_lazily()
from fastddp.tools.ps import live
import fastddp
assert "torch" not in sys.modules
fastddp.DistributedDataParallel, fastddp.__version__, fastddp._C.Reducer, fastddp.comm_hooks
import fastddp.sharding.clipping
print(fastddp.clip_grad_norm_ is fastddp.sharding.clipping.clip_grad_norm_)
"""
    assert run_python(code)[1] == "True\n"


FITS = replace(INSTALLED, torch="2.13.0", misfit=None, triton_problem=None, driver="", gpus=())
WITHOUT_TRITON = replace(FITS, triton=None, triton_problem="Triton does not import: No module named 'triton'.")


@pytest.mark.parametrize(
    ("found", "gpus", "expected"),
    [
        (FITS, ["H100"], []),
        (WITHOUT_TRITON, ["H100"], [("wrong", "Triton")]),
        (WITHOUT_TRITON, [], [("remark", "Triton")]),
        (replace(FITS, misfit="It cannot be loaded."), [], [("wrong", "fastddp._C")]),
        (replace(FITS, driver="580.95.05"), [], [("wrong", "torch")]),
        (FITS, ["H100", "A100"], [("wrong", "GPUs")]),
    ],
)
def test_what_does_not_fit_is_found(
    monkeypatch: pytest.MonkeyPatch, found: Software, gpus: list[str], expected: list[Any]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    judged = software.findings(replace(found, gpus=tuple(gpus)))
    assert [(finding.level, finding.about) for finding in judged] == expected


def test_ranks_that_differ_are_named() -> None:
    lines = FITS.lines()
    same = dict.fromkeys(range(4), lines)
    assert software.differences(same) == []
    other = same | {2: lines | {"NCCL": "2.20.5"}, 3: lines | {"NCCL": "2.20.5"}, 1: lines | {"Python": "3.12.1"}}
    found = {finding.about: (finding.level, finding.what) for finding in software.differences(other)}
    assert found == {
        "NCCL": ("wrong", f"Ranks differ: 2.20.5 on ranks 2, 3; {lines['NCCL']} on ranks 0, 1."),
        "Python": ("remark", f"Ranks differ: 3.12.1 on rank 1; {lines['Python']} on ranks 0, 2, 3."),
    }
