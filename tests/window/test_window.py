"""A window alone: its states, what it waits for, what it learns. No tensors, no ranks."""

from __future__ import annotations

import random
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


class Model:
    """The same, said once more: what is waited for, as sets and counts."""

    def __init__(self, buckets: list[list[int]], expect: Expect) -> None:
        self.buckets = buckets
        self.expect = expect
        parameters = sum(map(len, buckets))
        self.expected = [int(expect is Expect.all)] * parameters  # hooks
        self.most = [0] * parameters
        self.begin()

    def begin(self) -> None:
        self.hooks = [0] * len(self.expected)

    def hook(self, parameter: int) -> Hook:
        self.hooks[parameter] += 1
        expected = self.expected[parameter]
        if expected == 0:
            return Hook.unexpected
        left = expected - self.hooks[parameter]
        return Hook.more_to_come if left > 0 else Hook.last if left == 0 else Hook.too_many

    def not_final(self) -> list[int]:
        return [i for i, expected in enumerate(self.expected) if self.hooks[i] < expected]

    def is_complete(self, bucket: int) -> bool:
        return not set(self.buckets[bucket]) & set(self.not_final())

    def end(self) -> None:
        if self.expect is Expect.as_last:
            self.most = [max(pair) for pair in zip(self.most, self.hooks, strict=True)]
            self.expected = [most if hooks else 0 for most, hooks in zip(self.most, self.hooks, strict=True)]


@pytest.mark.parametrize("expect", [Expect.all, Expect.as_last])
@pytest.mark.parametrize("seed", range(50))
def test_a_random_walk_agrees_with_the_model(seed: int, expect: Expect) -> None:
    chance = random.Random(seed)
    parameters = list(range(chance.randint(1, 8)))
    chance.shuffle(parameters)
    cuts = sorted(chance.choices(range(1, len(parameters) + 1), k=2))
    buckets = [part for part in (parameters[: cuts[0]], parameters[cuts[0] : cuts[1]], parameters[cuts[1] :]) if part]
    window, model = Window(len(parameters), expect), Model(buckets, expect)
    window.set_buckets(buckets)
    state = "idle"
    has_learned = False  # what the next window expects says nothing of this one's hooks
    for _ in range(200):
        if state == "reducing" and chance.random() < 0.8:
            parameter = chance.choice(parameters)
            meaning = window.count_hook(parameter)
            assert meaning == model.hook(parameter)
            if meaning == Hook.last:
                assert window.count_down(parameter) == model.is_complete(
                    next(i for i, bucket in enumerate(buckets) if parameter in bucket)
                )
        else:
            event = chance.choice([event for event in EVENTS if TABLE[state, event] != "-"])
            if event == "finish":
                window.learn([1] * len(parameters))
                model.end()
                has_learned = True
            begins = take(window, event)
            if begins:
                model.begin()
                has_learned = False
            state = TABLE[state, event]
        if not has_learned:
            assert window.not_final() == model.not_final()
            assert [window.is_complete(i) for i in range(len(buckets))] == [
                model.is_complete(i) for i in range(len(buckets))
            ]
        assert window.state == WindowState.__members__[state]
