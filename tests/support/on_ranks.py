"""Tests whose body runs on ranks: they get the rank, and the other arguments as any test does.

@on_ranks(2)
def test_gradients_are_averaged(rank: int) -> None:
    ...
    assert model.module.weight.grad.item() == 1.5

@same_under_both()
def test_gradients(wrap: Wrap, rank: int) -> Any:
    model = wrap(nn.Linear(2, 2))  # once torch's class, once fastddp's
    ...
    return gradients(model)  # has to be the same, bit for bit
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastddp
import in_place
from ranks import RankPool
from releases import TORCH_WITH_USABLE_GRAPHS

Wrap = Callable[..., Any]
Test = Callable[..., Any]
BOTH = (TORCH_WITH_USABLE_GRAPHS, fastddp.DistributedDataParallel)


def on_ranks(world_size: int, pool: str = "ranks", **how: Any) -> Callable[[Test], Test]:
    """The body runs on each of these ranks. ``pool``: the fixture; ``how``: what ``RankPool.run`` takes besides."""
    return functools.partial(_test, _once, {"rank"}, world_size, pool, how)


def same_under_both(world_size: int = 2, both: tuple[Wrap, Wrap] = BOTH) -> Callable[[Test], Test]:
    """The body runs with torch's class and with fastddp's, or others; what it returns has to be the same."""
    return functools.partial(_test, functools.partial(_with_both, both=both), {"wrap", "rank"}, world_size, "ranks", {})


def _test(
    how: Callable[..., None], given: set[str], world_size: int, pool: str, options: dict[str, Any], function: Test
) -> Test:
    """``given``: arguments that are no fixtures."""

    @functools.wraps(function)
    def test(**arguments: Any) -> None:
        of_pool: RankPool = arguments.pop(pool)
        of_pool.run(how, world_size, test, arguments, **options)

    others = [one for one in inspect.signature(function).parameters.values() if one.name not in given]
    of_pool = inspect.Parameter(pool, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([of_pool, *others])  # type: ignore[attr-defined]
    return test


def _once(rank: int, test: Any, arguments: dict[str, Any]) -> None:
    _with_values(test.__wrapped__, rank, arguments)


def _with_both(rank: int, test: Any, arguments: dict[str, Any], both: tuple[Wrap, Wrap]) -> None:
    found = []
    for wrap in map(in_place.wrap, both):
        torch.manual_seed(5)
        found.append(_with_values(functools.partial(test.__wrapped__, wrap), rank, arguments))
    differing = differences(*found)
    assert differing == [], "\n".join(differing)


def _with_values(function: Test, rank: int, arguments: dict[str, Any]) -> Any:
    """Call it; an assertion that fails says what the variables around it were, as pytest's do."""
    try:
        return function(rank=rank, **arguments)
    except AssertionError as error:
        frames = inspect.getinnerframes(error.__traceback__)  # type: ignore[arg-type]
        for name, value in frames[-1].frame.f_locals.items():
            error.add_note(f"{name} = {value!r}"[:500])
        raise


def of_ranks(value: Any) -> list[Any]:
    """What each rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def gradients(model: Any) -> list[Any]:
    """Copies of what parameters have."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def differences(theirs: Any, ours: Any, where: str = "the result") -> list[str]:
    """Places in lists and dictionaries."""
    if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(theirs) == len(ours):
        theirs, ours = dict(enumerate(theirs)), dict(enumerate(ours))
    if isinstance(theirs, dict) and isinstance(ours, dict) and list(theirs) == list(ours):
        return [text for key in theirs for text in differences(theirs[key], ours[key], f"{where}[{key!r}]")]
    both_tensors = isinstance(theirs, Tensor) and isinstance(ours, Tensor)
    same = identical(theirs, ours) if both_tensors else type(theirs) is type(ours) and theirs == ours
    return [] if same else [f"{where} is {ours} and under torch's DDP {theirs}"]


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: a zero's sign and a NaN's payload included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
