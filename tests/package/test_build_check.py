"""An extension for another torch is refused with a sentence, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest


def import_fastddp(before: str) -> tuple[int, str]:
    # -P: what is installed, which is not what lies in this folder if a torch was named to make.
    result = subprocess.run(
        [sys.executable, "-P", "-c", f"import torch\n{before}\nimport fastddp"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr.strip().splitlines()[-1] if result.stderr else ""


def test_it_imports_with_the_torch_that_it_was_built_for() -> None:
    assert import_fastddp("")[0] == 0


@pytest.mark.tier("nightly")
def test_another_patch_release_of_that_torch_will_do() -> None:
    assert import_fastddp("torch.__version__ = '.'.join(torch.__version__.split('.')[:2]) + '.99+cu999'")[0] == 0


@pytest.mark.tier("slow")
def test_another_minor_version_is_named_with_the_command_that_rebuilds() -> None:
    status, message = import_fastddp("torch.__version__ = '2.999.0'")
    assert status == 1
    assert message.startswith("ImportError: fastddp was built for torch 2.")
    assert "but torch 2.999.0 is imported" in message
    assert "pip install --no-build-isolation" in message


@pytest.mark.tier("nightly")
def test_an_extension_that_was_never_built_is_named_too() -> None:
    hide = (
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fastddp._C' else find(name, *a)"
    )
    status, message = import_fastddp(hide)
    assert status == 1
    assert "fastddp._C has not been built" in message
