"""Where nothing that was compiled fits, the first import compiles: once on each machine, whoever is killed meanwhile.

The compiler is a script that stands in for g++: it takes what the build in place has made. ninja, locks, folders and
the import are real.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastddp import _C
from fastddp.extension import choosing, compiling
from fastddp.extension.compiling import Torch
from package_copy import link_package
from repository import ROOT

COMPILER = """#!/bin/sh
for word; do
  [ "$before" = -o ] && made=$word
  before=$word
done
echo "$made" >> {log}
[ -e {fails} ] && {{ echo "error: 'nothing' was not declared in this scope"; exit 1; }}
case "$made" in
  *.o) touch "$made" ;;
  *) while [ -e {hold} ]; do sleep 0.05; done; cp {real}/"$made" "$made" ;;
esac
"""
IMPORT = "import fastddp; print(fastddp._C.__file__)"


@dataclass
class Site:
    """An installation that has sources alone, a user's home, and a compiler."""

    folder: Path

    def __post_init__(self) -> None:
        self.cache, self.log = self.folder / "cache", self.folder / "log"
        self.hold, self.fails = self.folder / "hold", self.folder / "fails"  # the compiler, while there are these files
        self.compiler = self.folder / "compiler"
        real = Path(_C.__file__).parent
        self.compiler.write_text(COMPILER.format(log=self.log, fails=self.fails, hold=self.hold, real=real))
        self.compiler.chmod(0o755)
        self.installed()

    def installed(self, name: str = "site") -> Path:
        compiled = link_package(self.folder / name).parent
        shutil.rmtree(compiled)
        return self.folder / name

    def start(self, code: str = IMPORT, site: str = "site", **variables: str) -> subprocess.Popen[str]:
        alone = {"PYTHONPATH": str(self.folder / site), "XDG_CACHE_HOME": str(self.cache), "CXX": str(self.compiler)}
        command = [sys.executable, "-P", "-c", code]
        environment = {**os.environ, **alone, **variables}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def compiled(self) -> Counter[str]:
        return Counter(self.log.read_text().split() if self.log.exists() else [])

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "fastddp").iterdir())

    def wait_for_the_linker(self) -> None:
        while not any(name.startswith("_C") for name in self.compiled()):
            time.sleep(0.05)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.tier("slow")
def test_ranks_that_start_at_once_compile_once_and_say_what_they_wait_for(site: Site) -> None:
    site.hold.touch()
    first = site.start()
    site.wait_for_the_linker()
    second = site.start()
    assert second.stderr is not None
    waits = second.stderr.readline()
    site.hold.unlink()
    out, said = first.communicate()
    assert second.communicate()[0] == out
    [folder] = site.folders()
    assert Path(out.strip()).parent == site.cache / "fastddp" / folder
    assert set(site.compiled().values()) == {1}
    assert (
        f"compiling its C++ part for torch {_torch().version}: it has been compiled for none. It takes about " in said
    )
    assert f"waiting for process {first.pid} of this machine, which has been compiling fastddp's C++ part" in waits
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.tier("slow")
@pytest.mark.parametrize("how", ["the process alone", "its compilers too"])
def test_who_comes_after_a_killed_process_goes_on_with_what_it_made(site: Site, how: str) -> None:
    site.hold.touch()
    killed = site.start()
    site.wait_for_the_linker()
    (os.kill if how == "the process alone" else os.killpg)(killed.pid, signal.SIGKILL)
    killed.wait()
    next_one = site.start()
    if how == "the process alone":  # whose compiler still writes, and has the lock
        assert next_one.stderr is not None
        assert f"waiting for process {killed.pid}" in next_one.stderr.readline()
    site.hold.unlink()
    next_one.communicate()
    assert next_one.returncode == 0
    again = {name for name, times in site.compiled().items() if times > 1}
    assert {name for name in again if name.endswith(".o")} == set()
    assert bool(again) == (how == "its compilers too")
    assert len(site.folders()) == 1


@pytest.mark.tier("slow")
def test_nodes_that_share_a_home_compile_each_for_itself_and_use_the_first_that_is_ready(site: Site) -> None:
    site.hold.touch()
    of_node = "import platform; platform.node = lambda: {!r}; " + IMPORT
    nodes = [site.start(of_node.format(name)) for name in ("node1", "node2")]
    while sum(times for name, times in site.compiled().items() if name.startswith("_C")) < 2:
        time.sleep(0.05)
    site.hold.unlink()
    assert len({node.communicate()[0] for node in nodes}) == 1
    assert [node.returncode for node in nodes] == [0, 0]
    assert set(site.compiled().values()) == {2}
    assert len(site.folders()) == 1


@pytest.mark.tier("slow")
def test_two_versions_of_fastddp_have_two_folders(site: Site) -> None:
    other = site.installed("other") / "fastddp" / "csrc"
    other.unlink()
    shutil.copytree(ROOT / "csrc", other)
    with (other / "errors" / "see.h").open("a") as source:
        source.write("// Another version.\n")
    both = [site.start(site=name) for name in ("site", "other")]
    assert len({one.communicate()[0] for one in both}) == 2
    assert [one.returncode for one in both] == [0, 0]
    assert len(site.folders()) == 2


@pytest.mark.tier("slow")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"CXX": "no-compiler -O3"},
            r"there is no C\+\+ compiler \(no-compiler\)\. Install one \(Debian and Ubuntu: apt",
        ),
        ({"XDG_CACHE_HOME": "/proc/home"}, r"'/proc/home.*\. Name a folder that can be written by XDG_CACHE_HOME"),
        (
            {},
            r"the compiler ended with:[^$]*error: 'nothing' was not declared[^$]*The command was: \S* -m ninja",
        ),
    ],
    ids=["no compiler", "read-only home", "failing compiler"],
)
def test_what_cannot_be_compiled_is_an_error_with_cause_and_remedy(
    site: Site, variables: dict[str, str], words: str
) -> None:
    site.fails.touch()
    process = site.start(**variables)
    errors = process.communicate()[1]
    assert process.returncode == 1
    assert re.search(rf"ImportError: fastddp's C\+\+ part has to be compiled for torch .*{words}", errors, re.DOTALL)
    assert "[FD020: fastddp explain FD020]" in errors


@pytest.mark.tier("slow")
def test_ranks_that_waited_for_a_compiler_that_fails_do_not_call_it_again(site: Site) -> None:
    site.hold.touch()
    first = site.start()
    site.wait_for_the_linker()
    others = [site.start() for _ in range(2)]
    for other in others:
        assert other.stderr is not None
        assert "waiting for process" in other.stderr.readline()
    site.compiler.write_text("#!/bin/sh\necho error: too late; exit 1\n")
    os.killpg(first.pid, signal.SIGTERM)
    before = site.compiled()
    assert first.wait() != 0
    site.hold.unlink()
    for other in others:
        assert "error: too late" in other.communicate()[1]
    assert site.compiled() == before


@pytest.mark.tier("slow")
def test_beside_the_package_it_is_there_for_users_without_a_home_or_a_compiler(site: Site) -> None:
    build = "import sys; from fastddp.__main__ import main; main(['build', '--in-package'])"
    out, _ = site.start(build).communicate()
    package = site.folder / "site" / "fastddp" / "extension"
    assert out.rstrip().endswith(f"is in {package / _torch().folder_name}")
    other = site.start(XDG_CACHE_HOME="/proc/home", CXX="no-compiler")
    assert Path(other.communicate()[0].strip()).parent == package / _torch().folder_name


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(OSError, match="Could not determine home directory"):
        choosing.of_cache(_torch())


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0", "2.13"),
        ("2.13.1+cpu", "2.13"),
        ("2.15.0+cu132", "2.15"),
        ("2.15.0+rocm7.1", "2.15"),
        ("2.16.0.dev20261101+cu132", None),
        ("2.11.0a0+a6c236b9fd.nv26.01", None),
        ("2.13.0a0+gitcf30153", None),
        ("2.13.0+vendor", None),
    ],
)
def test_one_part_serves_all_patches_of_a_release_and_no_build_of_anybody_else(
    version: str, release: str | None
) -> None:
    torch = Torch(Path("torch"), version, "cf30153")
    assert torch.release == release
    assert torch.folder_name.startswith(f"torch-{release or version}-cpython-3")


def test_a_torch_that_is_too_old_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(compiling.CannotCompile, match=r"torch 2\.10\.0 is too old: fastddp needs 2\.11 or newer"):
        compiling.check(Torch(tmp_path, "2.10.0", ""))


@pytest.mark.parametrize(("version", "words"), [(None, "which is missing in"), ("70.1.0", "which is 70.1.0 in")])
def test_an_environment_whose_setuptools_is_of_no_use_is_one_line(
    tmp_path: Path, version: str | None, words: str
) -> None:
    if version is not None:
        (tmp_path / "setuptools.py").write_text(f"__version__ = {version!r}\n")
    backend = ROOT / "fastddp" / "extension" / "backend.py"
    command = [sys.executable, "-S", str(backend)]  # without packages
    ended = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, text=True, capture_output=True)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


def _torch() -> Torch:
    torch = compiling.find_torch()
    assert torch is not None
    return torch
