"""Keeps optimizers from stepping with gradients that are only partly synchronised, or wrong."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fastddp.exchange.in_force import InForce
from fastddp.module import backward
from fastddp.module.backward import when_backward_ends, when_backward_reaches
from fastddp.module.main_gradients import check_optimizer
from fastddp.watch.corruption import note_scaler
from fastddp.window.local_steps import LocalSteps


def check_before_each_step(now: InForce, local_steps: LocalSteps, check: Callable[[], None]) -> Steps:
    """Call both checks, which may raise, before each step of the model's optimizers, for as long as ``now`` lives.

    A backward that leaves out a parameter returns normally, because another backward may bring the missing gradient.
    The optimizer's step is the last moment to notice that none did. Two hooks, global to torch.optim, serve all models:
    a hook of each model would be removed when the model is collected, which may be while torch walks through the hooks.
    Nothing is kept alive.
    """
    steps = Steps(now, local_steps, check)
    _notice_skipped_steps()
    _ALL_STEPS.add(steps)
    weakref.finalize(now, _ALL_STEPS.discard, steps).atexit = False
    return steps


_ALL_STEPS: set[Steps] = set()  # of all models; walked as a list: what makes a tuple may collect some in between


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for steps in list(_ALL_STEPS):
        steps.begin(optimizer)
        if not has_closure(args, kwargs):
            steps.check_local(optimizer)
            steps.look_for_missed(optimizer)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for steps in list(_ALL_STEPS):
        if has_closure(args, kwargs):
            steps.check_local(optimizer)
        steps.end(optimizer)


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step runs the last forward and backward itself, as Lightning's do."""
    return any(callable(arg) for arg in (*args, *kwargs.values()))


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)


def _notice_skipped_steps() -> None:
    """Let a ``GradScaler`` that skips an optimizer's ``step`` tell the optimizer's models.

    ``GradScaler`` has no hooks, so its method is wrapped, once.
    """
    step: Any = GradScaler.step
    if hasattr(step, "tells_of_skipped_steps"):
        return

    @functools.wraps(step)
    def step_and_tell(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            note_scaler()
        before = {steps: steps.taken for steps in list(_ALL_STEPS)}
        result = step(scaler, optimizer, *args, **kwargs)
        for steps, taken in before.items():
            if steps.taken == taken:
                steps.was_skipped(optimizer)
        return result

    scale: Any = GradScaler.scale

    @functools.wraps(scale)
    def scale_and_tell(scaler: GradScaler, outputs: Any) -> Any:
        is_first = getattr(scaler, "_scale", None) is None
        scaled = scale(scaler, outputs)
        is_known = is_first or scaler._device == "cpu"  # without a wait for the device
        number = scaler.get_scale() if is_known else 0.0
        when_backward_reaches(scaled if _ALL_STEPS else None, lambda: _backward_is_scaled(number))
        return scaled

    step_and_tell.tells_of_skipped_steps = True  # type: ignore[attr-defined]
    GradScaler.step = step_and_tell  # type: ignore[assignment, method-assign]
    GradScaler.scale = scale_and_tell  # type: ignore[assignment, method-assign]


def _backward_is_scaled(number: float) -> None:
    """Tell all models, until this backward has ended: what another one begins at is not scaled by this."""

    def tell(number: float) -> None:
        for steps in tuple(_ALL_STEPS):
            steps.loss_is_scaled(number)

    tell(number)
    when_backward_ends(lambda: when_backward_ends(lambda: tell(1.0)))  # after the calls that end windows


class Steps:
    """What happens around each step of any optimizer."""

    def __init__(self, now: InForce, local_steps: LocalSteps, check: Callable[[], None]) -> None:
        self._now = weakref.ref(now)
        self._local_steps = weakref.ref(local_steps)
        self._check = weakref.WeakMethod(check)
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        # By optimizer, at its last step: how many windows the model, and backwards the process had had.
        self._last: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.taken = 0  # how many

    def begin(self, optimizer: Optimizer) -> None:
        """Before a step, do all checks but the last one."""
        if (now := self.trained_by(optimizer)) is not None:
            if (check := self._check()) is not None:
                check()
            if now.main_gradients.dtype is not None and now.sharding is None:
                check_optimizer(optimizer, now.parameters)
            # GradScaler sets it on an optimizer that decides itself whether to skip.
            if isinstance(found_inf := getattr(optimizer, "found_inf", None), Tensor):
                now.reducer.discard_step(only_if=found_inf)
            now.reducer.note_optimizer(begins=True)

    def check_local(self, optimizer: Optimizer) -> None:
        """Look for gradients that no backward has averaged."""
        local_steps = self._local_steps()
        if local_steps is not None and self.trained_by(optimizer) is not None:
            others = (steps._now() for steps in list(_ALL_STEPS) if steps is not self)
            local_steps.check(optimizer, (other for other in others if other is not None))

    def look_for_missed(self, optimizer: Optimizer) -> None:
        """Tell the reducer if backwards since the last step have brought nothing: other ranks may have had a window.

        Its gradients tell that from a second step over one backward, and from gradients that stay on this rank.
        """
        now = self.trained_by(optimizer)
        if now is None or backward.is_inside_backward():
            return
        windows, begun = now.reducer.windows(), backward.backwards_begun
        last = self._last.get(optimizer)
        self._last[optimizer] = windows, begun
        if last is None or last[0] != windows or last[1] == begun:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = (now.main_gradients.gradient_of(one) for one in now.parameters.tensors if id(one) in own)
        # A notice of a sharded gradient cannot be asked for its numbers.
        if not any(one is not None and (type(one) is not Tensor or bool(one.any())) for one in gradients):
            now.reducer.note_missed_step()

    def end(self, optimizer: Optimizer) -> None:
        """After a step."""
        if (now := self.trained_by(optimizer)) is not None:
            now.reducer.note_optimizer(begins=False)
            self.taken += 1
            if (local_steps := self._local_steps()) is not None:
                local_steps.note_step(optimizer)

    def was_skipped(self, optimizer: Optimizer) -> None:
        """A step of this optimizer was skipped."""
        if (now := self.trained_by(optimizer)) is not None:
            now.reducer.discard_step()

    def loss_is_scaled(self, scale: float) -> None:
        """Ranks compare scales in the window's status; 0: not known. Another thread's backward has its own."""
        if (now := self._now()) is not None and now.reducer.state != "reducing":
            now.reducer.note_loss_scale(scale)

    def trained_by(self, optimizer: Optimizer) -> InForce | None:
        """The model that this is about; None: the optimizer has none of its parameters."""
        now = self._now()
        if now is None:
            return None
        count = sum(len(group["params"]) for group in optimizer.param_groups)  # parameters may be added
        known_count, is_of_model = self._known.get(optimizer, (-1, False))
        if count != known_count:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            is_of_model = any(id(parameter) in stepped for parameter in now.parameters.tensors)
            self._known[optimizer] = (count, is_of_model)
        return now if is_of_model else None
