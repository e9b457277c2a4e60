"""A window alone: its states. No tensors, no ranks."""

from __future__ import annotations

from itertools import product

import pytest

from fastddp._C import Window, WindowEvent, WindowState

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
