"""``python -m fastddp`` gives a script what ``python`` gives it: arguments, names, where it lies."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    for inside in (tmp_path, tmp_path / "elsewhere", tmp_path / "elsewhere" / "elsewhere"):
        inside.mkdir(exist_ok=True)
        (inside / "train.py").write_text(SCRIPT)
        (inside / "beside.py").write_text("VALUE = 7\n")
    return tmp_path


def ran(folder: Path, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.stdout, ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("given", ["train.py -- x --lr 3", "train.py -m -- -- -h", "elsewhere/train.py"])
def test_a_script_finds_what_it_finds_under_python(folder: Path, given: str) -> None:
    assert ran(folder, "-m", "fastddp", *given.split()) == ran(folder, *given.split())


@pytest.mark.tier("slow")
def test_a_module_gets_its_arguments_as_they_are(folder: Path) -> None:
    (folder / "train.py").write_text("import sys; print(sys.argv, __file__, __name__)")
    arguments = ["-m", "train", "--", "x", "-m"]
    assert ran(folder, "-m", "fastddp", *arguments) == ran(folder, *arguments)


@pytest.mark.tier("nightly")
def test_folders_archives_and_compiled_scripts_run_too(folder: Path) -> None:
    printing = "import sys; print(__name__, sys.argv[1:])"
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text(printing)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", printing)
    py_compile.compile(str(folder / "package" / "__main__.py"), cfile=str(folder / "compiled.pyc"))
    for target in ("package", "archive.zip", "compiled.pyc"):
        assert ran(folder, "-m", "fastddp", target, "--", "x") == ran(folder, target, "--", "x")


def test_without_a_target_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert "the following arguments are required: script.py | module" in capsys.readouterr().err
