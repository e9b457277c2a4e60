"""Nsight Systems for a machine with a GPU that can fetch nothing: `make nsight-carry`. Needs no torch.

    python bench/gpu/nsight.py carry             # here: Debian's package beside what make gpu-carry made
    python bench/gpu/nsight.py unpack            # there: build/first-run/nsight/nsys, which bench.gpu.first_run runs
    python bench/gpu/nsight.py import OF.qdstrm  # here: OF.nsys-rep and OF.sqlite, which fastddp trace reads

nsys without its importer leaves a .qdstrm; an importer of another version may refuse it, and here both come from one
release of Debian. Packages come through apt-get with sources and lists of their own, and are unpacked by Python:
nothing is installed, and the machine's lists stay as they are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CARRIED = ROOT / "build" / "first-run"
PACKAGE = CARRIED / "nsight-systems-target.deb"
UNPACKED = CARRIED / "nsight"
NSYS = UNPACKED / "nsys"
HERE = ROOT / "build" / "nsight"  # the importer
MOST_MIB = 64

_SOURCES = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: trixie
Components: main non-free
Architectures: amd64
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_TARGET = f"{_LIBRARIES}/nsight-systems/target-linux-x64"
_HOST = "usr/lib/nsight-systems/host-linux-x64"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("what", choices=["carry", "unpack", "import"])
    parser.add_argument("file", nargs="?", type=Path, help="a .qdstrm, for import")
    options = parser.parse_args()
    if options.what == "carry":
        return carry()
    if options.what == "unpack":
        unpack(PACKAGE, UNPACKED)
        NSYS.unlink(missing_ok=True)
        NSYS.symlink_to(Path(_TARGET) / "nsys")
    elif options.file is None:
        parser.error("import takes a .qdstrm")
    else:
        import_stream(options.file.resolve())
    return 0


def carry() -> int:
    """The package into the folder that goes there; 1 if that gets too large."""
    CARRIED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (package,) = fetch(Path(folder), "nsight-systems-target")
        PACKAGE.write_bytes(package.read_bytes())
    mib = (
        sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file() and UNPACKED not in path.parents)
        / 2**20
    )
    print(f"{CARRIED.relative_to(ROOT)}: {mib:.0f} MiB with {package.name}")
    if mib > MOST_MIB:
        print(f"That is more than the {MOST_MIB} MiB that may travel.", file=sys.stderr)
    return int(mib > MOST_MIB)


def fetch(folder: Path, *packages: str) -> list[Path]:
    """Debian's packages, from sources that only this call knows."""
    (folder / "own.sources").write_text(_SOURCES)
    for name in ("lists", "cache"):
        (folder / name).mkdir()
    settings = {
        "Dir::Etc::sourcelist": folder / "own.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",  # the folder is nobody else's
    }
    command = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in settings.items())]
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, "download", *packages], check=True, cwd=folder)
    return sorted(folder.glob("*.deb"))


def unpack(package: Path, folder: Path) -> None:
    """As dpkg -x does, which may not be there: a .deb is an archive of ar that has one of tar."""
    with package.open("rb") as file:
        file.seek(len(b"!<arch>\n"))
        while header := file.read(60):
            name, size = header[:16].strip(), int(header[48:58])
            if name.startswith(b"data.tar"):
                with tarfile.open(fileobj=file, mode="r|*") as data:
                    data.extractall(folder, filter="tar")
                return
            file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError(f"{package} holds no data")


def import_stream(stream: Path) -> None:
    """What nsys left without an importer, made a report and an export beside it."""
    importer = HERE / _HOST / "QdstrmImporter"
    if not importer.exists():
        with tempfile.TemporaryDirectory() as folder:
            for package in fetch(Path(folder), "nsight-systems", "nsight-systems-target", "libssh-4"):
                unpack(package, HERE)
    report, export = stream.with_suffix(".nsys-rep"), stream.with_suffix(".sqlite")
    report.unlink(missing_ok=True)  # the importer overwrites nothing
    libraries = f"{HERE / _LIBRARIES}:{HERE / _HOST}"
    subprocess.run([importer, "--input-file", stream], check=True, env=os.environ | {"LD_LIBRARY_PATH": libraries})
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", export]
    subprocess.run([str(HERE / _TARGET / "nsys"), "export", *map(str, options), str(report)], check=True)


if __name__ == "__main__":
    sys.exit(main())
