"""Builds what users install, and tries it outside of the repository.

    python tests/support/packaging_check.py sdist                  # from this folder, and from that a wheel without C++
    python tests/support/packaging_check.py wheel 2.11.0 2.13.0    # with the C++ part for each of these torches

Both must hold every file that they should, and no other. The wheel goes into an empty environment, which sees torch,
and two ranks take the step of one_step.py there: the one from the sdist compiles first. What passes is moved to dist/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from repository import ROOT, TESTS

sys.path.append(str(ROOT / "fastddp" / "extension"))  # of the sources: nothing need be installed

from compiling import Torch, find_torch, torch_in  # type: ignore[import-not-found]

BUILT = ("_build_info.py", f"_C{EXTENSION_SUFFIXES[0]}", f"_pages{EXTENSION_SUFFIXES[0]}")
TOP = ("LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "constraints.txt", "pyproject.toml", "setup.py")
MODULES = ("fastddp_command.py",)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# What compiling for a torch takes of its wheel, which may need gigabytes of CUDA to be imported.
NEEDED = re.compile(r"torch/(version\.py|include/.*|lib/lib(c10|torch|torch_cpu|torch_python)\.so)")


def sources() -> set[str]:
    """What the sdist must hold: the package, and what it is built from."""
    paths = [path for folder in ("csrc", "fastddp", "kernels") for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    return {name for name in names if not name.startswith("fastddp/extension/torch-")} | {*TOP, *MODULES}


def compare(archive: Path, held: set[str], expected: set[str]) -> None:
    if held != expected:
        sys.exit(
            f"{archive.name} lacks {sorted(expected - held)}, and holds {sorted(held - expected)} that it should not."
        )


def check_wheel(wheel: Path, torches: list[Torch]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in sources() if name.startswith("fastddp/")} | {*MODULES}
    package |= {f"fastddp/{name}" for name in sources() if name.startswith(("kernels/", "csrc/"))}
    compare(wheel, held, package | {f"fastddp/extension/{of.folder_name}/{name}" for of in torches for name in BUILT})


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


def torch_for(version: str) -> Torch:
    """That of this environment, or what is needed of another one's wheel."""
    own = find_torch()
    if own is not None and own.version.partition("+")[0] == version:
        return own
    folder = ROOT / "build" / "torches" / f"{version}-{sys.implementation.cache_tag}"
    if not (folder / "torch" / "version.py").exists():  # unpacked last
        with tempfile.TemporaryDirectory() as temporary:
            run(*PIP, "download", "--quiet", "--no-deps", "--dest", temporary, f"torch=={version}", folder=ROOT)
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
                names = [name for name in wheel.namelist() if NEEDED.fullmatch(name)]
                wheel.extractall(folder, sorted(names, key=lambda name: name.endswith("version.py")))
    return torch_in(folder / "torch")


def build_wheel(torches: list[Torch], out: Path) -> Path:
    folders = ":".join(str(torch.folder) for torch in torches)
    build = ("setup.py", "--quiet", "bdist_wheel", "--dist-dir", out, "build_ext", f"--torches={folders}")
    run(sys.executable, *build, folder=ROOT)
    wheel = next(out.glob("*.whl"))
    tag = f"manylinux_{oldest_libc(wheel).replace('.', '_')}_{os.uname().machine}"
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel, folder=out)
    return next(out.glob("*.whl"))


def oldest_libc(wheel: Path) -> str:
    """The glibc that the wheel needs, as in 2.34: pip takes it where there is that one or a newer one."""
    found = set()
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if name.endswith(".so"):
                said = subprocess.check_output(["objdump", "-T", archive.extract(name, folder)], text=True)
                found |= {tuple(map(int, version.split("."))) for version in re.findall(r"\bGLIBC_([\d.]+)\b", said)}
    return ".".join(map(str, max(found)))


def wheel_of(source: Path, out: Path) -> Path:
    """As pip makes it of an unpacked sdist: in an environment of its own, without torch."""
    run(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source, folder=source)
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
    kind, *versions = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torches = [torch_for(version) for version in versions]
        if kind == "sdist":
            result = build_sdist(ROOT, folder / "built")
            check_sdist(result)
            shutil.unpack_archive(result, folder)
            wheel = wheel_of(folder / result.name.removesuffix(".tar.gz"), folder)
        else:
            wheel = result = build_wheel(torches, folder)
        check_wheel(wheel, torches)
        try_out(wheel, folder)
        (ROOT / "dist").mkdir(exist_ok=True)
        print(shutil.move(result, ROOT / "dist" / result.name))


if __name__ == "__main__":
    main()
