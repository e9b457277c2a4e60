"""Fixtures of all tests, and the guard that keeps the repository's root off ``sys.path``."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

HERE = Path(__file__).resolve().parent

# `python -m pytest` puts the current folder first. With the root there, `import kernels` would find this repository's
# folder where third-party code looks for the package of that name, and `import fastddp` the sources, not what is
# installed. Tests import fake_cuda from this folder, which pytest puts on the path, and helpers (ranks, models) from
# support/. What lies here must not be called as somebody's package is: pack/, not kernels/.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.parent]
sys.path.append(str(HERE / "support"))

# torch's store asks for the name of each address that connects to it. Some machines have a DNS server that leaves one
# question in thirty without an answer, for five seconds in which all ranks wait. Tests need no names: nobody is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

pytest.register_assert_rewrite("side_by_side")  # it asserts for the tests that use it

import fake_cuda  # noqa: E402
import in_place  # noqa: E402
from ranks import RankPool  # noqa: E402

# The same examples in every run, on every machine. To look for more: pytest --hypothesis-profile=thorough
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
# The first program that fails, as it is: making smaller one that hangs takes a minute for each try.
settings.register_profile(
    "unshrunk", derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("thorough", max_examples=2000, database=None, deadline=None)
settings.load_profile("repeatable")


TIERS = ("quick", "slow", "nightly")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which tests run, and on which device those in ``tests/gpu``."""
    parser.addoption("--tier", choices=[*TIERS, "all"], default=TIERS[0], help="which tests run (default: %(default)s)")
    parser.addoption("--in-place", action="store_true", help="fastddp.replicate in place of the wrapper, on ranks")
    parser.addoption("--device", choices=["cuda", fake_cuda.DEVICE], default="cuda", help="what tests/gpu runs on")


_tier = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Give each test its tier: the last of those that marks give it, else the first there is."""
    made = yield
    for number, test in enumerate(made if isinstance(made, list) else []):
        tiers = [mark.args[0] for mark in test.iter_markers("tier") if not _is_spared(mark, number)]
        test.stash[_tier] = max(tiers, key=TIERS.index, default=TIERS[0])
    return made


def _is_spared(mark: pytest.Mark, number: int) -> bool:
    return "but_one_in" in mark.kwargs and number % mark.kwargs["but_one_in"] == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the tier, unless it was named. Mark what differs in place."""
    for item in items if config.option.in_place else ():
        for name, reason in in_place.DIFFERS.items():
            if name in (item.name, getattr(item, "originalname", None)):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    tier = config.option.tier
    if tier == "all" or any("::" in argument for argument in config.args):
        return
    chosen = [item.stash[_tier] == tier for item in items]
    config.hook.pytest_deselected(items=[item for item, is_chosen in zip(items, chosen, strict=True) if not is_chosen])
    items[:] = [item for item, is_chosen in zip(items, chosen, strict=True) if is_chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the simulated device, where a test takes it, before any test's clock runs."""
    takes_it = any("simulated_device" in getattr(item, "fixturenames", ()) for item in session.items)
    if takes_it and not session.config.option.collectonly:
        fake_cuda.build()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Rank processes for ``ranks.run(function, world_size, ...)``, shared by all tests of the session."""
    pool = RankPool(prepare=in_place.install if request.config.option.in_place else None)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def simulated_device() -> None:
    """Its library is compiled."""


@pytest.fixture(scope="session")
def simulated_ranks(request: pytest.FixtureRequest, simulated_device: None) -> Iterator[RankPool]:
    """Rank processes that have the simulated device, and a process group for it: ``backend="simulated"``."""
    prepare = in_place.install_on_simulated_device if request.config.option.in_place else fake_cuda.install
    pool = RankPool(prepare=prepare, backend=fake_cuda.DEVICE)
    yield pool
    pool.stop()
