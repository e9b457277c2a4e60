"""A window alone: its states, what it waits for, what it learns. No tensors, no ranks."""

from __future__ import annotations

from itertools import product

import pytest

from fastddp._C import Expect, Hook, Window, WindowEvent, WindowState

# The state that follows each event; "-": the event cannot happen.
TRANSITIONS = """
              forward       arm       local_gradient  reduce    lack     finish    fail    repair  stand_aside
idle          idle          armed     accumulating    -         -        -         failed  -       idle
accumulating  accumulating  armed     accumulating    -         -        -         -       -       idle
armed         armed         armed     armed           reducing  -        -         failed  -       idle
reducing      reducing      reducing  reducing        -         partial  finished  failed  -       -
partial       -             partial   partial         reducing  -        -         failed  -       -
finished      idle          finished  accumulating    reducing  -        -         failed  -       idle
failed        failed        failed    failed          -         -        -         -       idle    -
"""
EVENTS, *ROWS = [line.split() for line in TRANSITIONS.strip().splitlines()]
TABLE = {(state, event): after for state, *row in ROWS for event, after in zip(EVENTS, row, strict=True)}

WAY_TO = {
    "idle": "",
    "accumulating": "local_gradient",
    "armed": "arm",
    "reducing": "arm reduce",
    "partial": "arm reduce lack",
    "finished": "arm reduce finish",
    "failed": "arm reduce fail",
}
# What had come is forgotten.
NEW_WINDOWS = {("finished", event) for event in ("forward", "local_gradient", "reduce")} | {("failed", "repair")}


def take(window: Window, event: str) -> bool:
    return window.apply(WindowEvent.__members__[event])


def window_that_is(state: str) -> Window:
    window = Window(1)
    for event in WAY_TO[state].split():
        take(window, event)
    assert window.state == WindowState.__members__[state]
    return window


def test_the_table_has_every_state_and_event() -> None:
    assert set(TABLE) == set(product(WindowState.__members__, WindowEvent.__members__))


@pytest.mark.parametrize(("state", "event"), TABLE)
def test_what_follows(state: str, event: str) -> None:
    window = window_that_is(state)
    after = TABLE[state, event]
    if after == "-":
        with pytest.raises(RuntimeError, match=f"in a window that is {state} there is no event '{event}'"):
            take(window, event)
        assert window.state == WindowState.__members__[state]
    else:
        begins_another = (state, event) in NEW_WINDOWS or event == "stand_aside"
        assert take(window, event) == begins_another
        assert window.state == WindowState.__members__[after]


@pytest.mark.parametrize("state", WAY_TO)
def test_a_window_is_open_until_it_ends_and_is_counted_then(state: str) -> None:
    """A failure that is known late is found in a window that owes others nothing, and ends none."""
    window = window_that_is(state)
    is_open, ended = state in {"armed", "reducing", "partial"}, int(state in {"finished", "failed"})
    assert (window.is_open, window.ended) == (is_open, ended)
    if TABLE[state, "fail"] != "-":
        take(window, "fail")
        assert (window.owes, window.ended) == (is_open, ended + is_open)


def test_forwards_of_a_window_are_counted() -> None:
    window = Window(1)
    for event, forwards in [("arm", 1), ("arm", 2), ("reduce", 2), ("finish", 2), ("forward", 0), ("arm", 1)]:
        take(window, event)
        assert window.forwards == forwards


def run_window(window: Window, hooks: list[int], used: list[int]) -> list[Hook]:
    """One with these hooks, whose parameters were used by any rank as in ``used``."""
    for event in ("forward", "arm", "reduce"):
        take(window, event)
    meanings = [window.count_hook(parameter) for parameter in hooks]
    window.learn(used)
    take(window, "finish")
    return meanings


def test_what_came_last_is_expected_next() -> None:
    window = Window(3, Expect.as_last)
    run_window(window, [0, 1, 1], [1, 1, 0])
    take(window, "forward")
    assert [window.waits_for(parameter) for parameter in range(3)] == [True, True, False]
    assert window.ever_used() == [0, 1]
    assert run_window(window, [1, 2, 1], [1, 1, 1]) == [Hook.more_to_come, Hook.unexpected, Hook.last]
    assert run_window(window, [1], [0, 1, 0]) == [Hook.more_to_come]
    assert run_window(window, [1, 1], [0, 1, 0]) == [Hook.more_to_come, Hook.last]  # as often as it ever came


def test_a_static_graph_learns_until_it_is_fixed() -> None:
    window = Window(3, Expect.as_first)
    run_window(window, [0], [1, 0, 0])
    assert window.is_learning
    assert window.knows_first
    run_window(window, [1], [0, 1, 0])  # another backward of the first step
    window.fix_first()
    assert not window.is_learning
    assert not window.ends_with_backward
    assert [window.waits_for(parameter) for parameter in range(3)] == [True, True, False]
    assert run_window(window, [0, 1, 2], [1, 1, 0]) == [Hook.last, Hook.last, Hook.unexpected]


def test_a_bucket_is_complete_when_the_last_gradients_of_all_its_members_have_come() -> None:
    window = Window(3)
    window.set_buckets([[2, 0], [1]])
    for event in ("arm", "reduce"):
        take(window, event)
    for parameter, is_complete, not_final in [(0, False, [1, 2]), (1, True, [2]), (2, True, [])]:
        assert window.count_hook(parameter) == Hook.last
        assert window.count_down(parameter) == is_complete
        assert window.not_final() == not_final
    assert [window.is_complete(bucket) for bucket in range(2)] == [True, True]
    assert window.count_hook(1) == Hook.too_many
    take(window, "finish")
    take(window, "forward")
    assert window.not_final() == [0, 1, 2]
    assert not window.is_complete(0)
