"""Builds what users install, and tries it outside of the repository.

    python tests/support/packaging_check.py wheel   # from this folder
    python tests/support/packaging_check.py sdist   # and from that a wheel

Both must hold every file that they should, and no other. The wheel goes into an empty environment, which sees torch,
and two ranks take the step of one_step.py there. What passes is moved to dist/.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

from repository import ROOT, TESTS

BUILT = ("fastddp/_build_info.py", "fastddp/_C*.so", "fastddp/_pages*.so")
TOP = ("LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "constraints.txt", "pyproject.toml", "setup.py")
MODULES = ("fastddp_command.py",)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def is_built(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in BUILT)


def sources() -> set[str]:
    """What the sdist must hold: the package, and what it is built from."""
    paths = [path for folder in ("csrc", "fastddp", "kernels") for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    return {name for name in names if not is_built(name)} | {*TOP, *MODULES}


def compare(archive: Path, held: set[str], expected: set[str]) -> None:
    if held != expected:
        sys.exit(
            f"{archive.name} lacks {sorted(expected - held)}, and holds {sorted(held - expected)} that it should not."
        )


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    built = {name for name in held if is_built(name)}
    if len(built) != len(BUILT):
        sys.exit(f"{wheel.name} holds {sorted(built)} of what is built, not one of each of {BUILT}.")
    package = {name for name in sources() if name.startswith("fastddp/")} | {*MODULES}
    package |= {f"fastddp/{name}" for name in sources() if name.startswith("kernels/")}
    compare(wheel, held - built, package)


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {name for name in held if name in ("PKG-INFO", "setup.cfg") or name.startswith("fastddp.egg-info/")}
    compare(sdist, held - made, sources())


def run(*command: str | Path, folder: Path) -> None:
    # ninja lies beside the interpreter. The packages of another environment must not be found.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(command, cwd=folder, env=variables | {"PATH": path, "OMP_NUM_THREADS": "1"}, check=True)


def build_wheel(source: Path, out: Path) -> Path:
    run(*PIP, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", out, source, folder=source)
    return next(out.glob("*.whl"))


def build_sdist(source: Path, out: Path) -> Path:
    # setuptools would add every file that was once in an sdist.
    shutil.rmtree(source / "fastddp.egg-info", ignore_errors=True)
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", out, folder=source)
    return next(out.glob("*.tar.gz"))


def try_out(wheel: Path, folder: Path) -> None:
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run(*PIP, "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel, folder=folder)
    # Only the folder, after the environment's own: .pth files in it, as of a fastddp in place, are not followed.
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "torch_of_this_environment.pth").write_text(sysconfig.get_path("purelib"))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(python, *launch, TESTS / "support" / "one_step.py", wheel.name.split("-")[1], folder=folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if sys.argv[1:] == ["sdist"]:
            result = build_sdist(ROOT, folder / "built")
            check_sdist(result)
            shutil.unpack_archive(result, folder)
            wheel = build_wheel(folder / result.name.removesuffix(".tar.gz"), folder)
        else:
            wheel = result = build_wheel(ROOT, folder)
            fits = "+torch" + ".".join(version("torch").split(".")[:2])
            assert wheel.name.split("-")[1].endswith(fits), f"{wheel.name} does not say {fits}"
        check_wheel(wheel)
        try_out(wheel, folder)
        (ROOT / "dist").mkdir(exist_ok=True)
        print(shutil.move(result, ROOT / "dist" / result.name))


if __name__ == "__main__":
    main()
