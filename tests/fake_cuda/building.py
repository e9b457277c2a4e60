"""Compiles the C++ files of this folder into one library, when they have changed."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAME = "fake_cuda_extension"
FOLDER = ROOT / "build" / f"fake_cuda-torch-{torch.__version__}"
# A process with a sanitizer takes the library that tests/support/sanitized.py has compiled for it.
SANITIZED_FOLDERS = {
    symbol: ROOT / "build" / f"sanitized-{what}-torch-{torch.__version__}"
    for symbol, what in (("__asan_init", "memory"), ("__tsan_init", "threads"))
}
SANITIZED = next((folder for symbol, folder in SANITIZED_FOLDERS.items() if hasattr(ctypes.CDLL(None), symbol)), None)
LIBRARY = (SANITIZED or FOLDER) / f"{NAME}.so"
FLAGS = ["-std=c++20", "-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
# fastddp's kernels for the CPU compute what the Triton kernels would.
OF_FASTDDP = {
    "block8": ["kernels_cpu"],
    "device": ["cuda_driver", "memory_part", "streams"],
    "pack": ["kernels_cpu", "kernels_aten", "local_sums"],
}
TWIN = [ROOT / "csrc" / folder / f"{name}.cpp" for folder, names in OF_FASTDDP.items() for name in names]


def build() -> Path:
    """The library, compiled first if it is not up to date. Several processes may ask at once."""
    if SANITIZED:
        return LIBRARY
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "one builder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, digest = FOLDER / "stamp", _digest()
        if not LIBRARY.exists() or not stamp.exists() or stamp.read_text() != digest:
            (FOLDER / "lock").unlink(missing_ok=True)  # torch's, of a builder that was ended: it would be waited for
            # In a process of its own: torch's builder loads what it built, and that registers a device for good.
            # ninja lies beside the interpreter, which need not be on the path.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            environment = {"MAX_JOBS": str(len(os.sched_getaffinity(0))), **os.environ, "PATH": path}
            result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"cannot build the simulated device:\n{result.stdout}{result.stderr}")
            stamp.write_text(digest)
    return LIBRARY


def _digest() -> str:
    content = hashlib.sha256(" ".join([torch.__version__, sys.version, *FLAGS]).encode())
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), *TWIN, *(ROOT / "csrc").rglob("*.h")]):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()


if __name__ == "__main__":
    from torch.utils import cpp_extension

    # torch's builder names an object after its source, and two rooms have kernels_cpu.cpp.
    units = [FOLDER / f"{path.parent.name}_{path.name}" for path in TWIN]
    for unit, path in zip(units, TWIN, strict=True):
        unit.write_text(f'#include "{path}"\n')
    cpp_extension.load(
        NAME,
        [str(path) for path in [*sorted(HERE.glob("*.cpp")), *units]],
        extra_include_paths=[str(ROOT / "csrc")],
        extra_cflags=FLAGS,
        build_directory=str(FOLDER),
        verbose=True,
    )
