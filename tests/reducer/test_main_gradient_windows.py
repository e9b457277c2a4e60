"""gradient_dtype=torch.float32: windows that are not like the others, rebuilt buckets, copies, several wrappers."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fastddp
from ranks import RankPool

ATTRIBUTES = pytest.mark.parametrize("attribute", ["grad", "main_grad"])


class Parts(nn.Module):
    """Three parameters of bf16 that can be used apart; the gradient of each is the input."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))

    def forward(self, x: Tensor, parts: str = "abc") -> Tensor:
        return sum((getattr(self, part) * x).sum() for part in parts)  # type: ignore[return-value]


def wrapped(attribute: str, module: nn.Module | None = None, **options: Any) -> fastddp.DistributedDataParallel:
    options = {"bucket_cap_mb": 0, **options}
    return fastddp.DistributedDataParallel(
        module or Parts(), gradient_dtype=torch.float32, gradient_attribute=attribute, **options
    )


def constant(value: float) -> Tensor:
    return torch.full((5,), value, dtype=torch.bfloat16)


def values(model: nn.Module, attribute: str) -> list[float | None]:
    """Of each gradient, whose elements are equal."""
    found: list[float | None] = []
    for parameter in model.module.parameters():
        gradient = getattr(parameter, attribute)
        assert gradient is None or (gradient.dtype == torch.float32 and (gradient == gradient[0]).all())
        found.append(None if gradient is None else gradient[0].item())
    return found


# ---------------------------------------------------------------------------------------------------- zero and windows


def without_zeroing(rank: int, attribute: str) -> list[list[float | None]]:
    model = wrapped(attribute)
    found = []
    for _ in range(2):
        model(constant(256.0 + rank)).backward()
        found.append(values(model, attribute))
    model.zero_grad()
    found.append(values(model, attribute))
    model(constant(1.0)).backward()
    found.append(values(model, attribute))
    return found


@ATTRIBUTES
def test_gradients_add_up_over_windows_until_they_are_set_to_zero(ranks: RankPool, attribute: str) -> None:
    nothing = None if attribute == "grad" else 0.0
    for found in ranks.run(without_zeroing, 2, attribute):
        # bf16 has no 257, and rounds it to 256.
        assert found == [[256.0] * 3, [512.0] * 3, [nothing] * 3, [1.0] * 3]


def test_zero_grad_of_the_wrapper_leaves_main_grad_the_tensor_that_it_is(ranks: RankPool) -> None:
    assert ranks.run(identities, 2) == [[True] * 5] * 2


def identities(rank: int) -> list[bool]:
    model = wrapped("main_grad", bucket_cap_mb=25, find_unused_parameters=True)
    first = [p.main_grad for p in model.module.parameters()]
    found = [all(g.dtype == torch.float32 and not g.any() for g in first)]
    for window in range(3):
        model(constant(1.0), "ab" if window == rank else "abc").backward()  # buckets are rebuilt, placeholders travel
        found.append(all(p.main_grad is g for p, g in zip(model.module.parameters(), first, strict=True)))
        model.zero_grad()
    return [*found, all(p.main_grad is g for p, g in zip(model.module.parameters(), first, strict=True))]


def held(rank: int) -> tuple[list[float], list[float]]:
    """A gradient that somebody keeps beyond its window, while the next ones begin with a microbatch under no_sync."""
    model = wrapped("grad", bucket_cap_mb=25)
    kept, seen = [], []
    for window in range(4):
        model.zero_grad()
        with model.no_sync():
            model(constant(2.0 * window)).backward()
        model(constant(rank)).backward()
        kept.append(model.module.a.grad)
        seen.append(model.module.b.grad[0].item())
    return [gradient[0].item() for gradient in kept], seen


def test_a_gradient_that_somebody_keeps_is_not_overwritten_by_the_next_microbatches(ranks: RankPool) -> None:
    assert ranks.run(held, 2) == [([0.5, 2.5, 4.5, 6.5],) * 2] * 2


# ---------------------------------------------------------------------------------------------------------- who is used


def unused(rank: int, attribute: str, options: dict[str, bool]) -> list[list[float | None]]:
    model = wrapped(attribute, **options)
    found = []
    for window, parts in enumerate(["ab", "ab", "ab"] if "static_graph" in options else ["ab", "b", "abc"]):
        model.zero_grad()
        # c comes to rank 0 alone, and in the last window late.
        mine = parts if "static_graph" in options or rank == 0 else parts.replace("c", "")
        with model.no_sync():
            model(constant(256.0), mine).backward()
        model(constant(2.0 * window + 1), mine).backward()
        found.append(values(model, attribute))
    return found


@ATTRIBUTES
def test_parameters_that_are_not_used_keep_what_they_had(ranks: RankPool, attribute: str) -> None:
    nothing = None if attribute == "grad" else 0.0
    for found in ranks.run(unused, 2, attribute, {"find_unused_parameters": True}):
        assert found == [[257.0, 257.0, nothing], [nothing, 259.0, nothing], [261.0, 261.0, 130.5]]
    for found in ranks.run(unused, 2, attribute, {"static_graph": True}):
        assert found == [[257.0, 257.0, nothing], [259.0, 259.0, nothing], [261.0, 261.0, nothing]]


# ------------------------------------------------------------------------------------------------------------- failures


def blamed(rank: int, attribute: str) -> tuple[int | None, str, int]:
    model = wrapped(attribute, on_corruption=lambda corruption: None)
    with model.no_sync():
        model(constant(float("inf") if rank == 1 else 1.0), "b").backward()
    model(constant(1.0)).backward()
    found = model.blame_non_finite()
    assert found is not None
    assert model.found_inf().item() == 1
    return found.rank, found.parameter, found.count


@ATTRIBUTES
def test_who_brought_infinity_is_named(ranks: RankPool, attribute: str) -> None:
    assert ranks.run(blamed, 2, attribute) == [(1, "b", 5)] * 2


# ------------------------------------------------------------------------------------- rebuilt, planned, pinned buckets


def planned(rank: int, attribute: str) -> tuple[list[int], list[str], list[list[float | None]]]:
    model = wrapped(attribute, bucket_cap_mb="auto")
    found = []
    for window in range(9):
        model.zero_grad()
        model(constant(256.0 + window * 2)).backward()
        found.append(values(model, attribute))
    plan = model.bucket_plan()
    pinned = wrapped(attribute, bucket_cap_mb=None, bucket_plan=plan)
    pinned(constant(1.0)).backward()
    return [b.bytes for b in plan.buckets], [str(p.dtype) for b in plan.buckets for p in b.parameters], found


@ATTRIBUTES
@pytest.mark.filterwarnings("ignore")
def test_plans_count_the_bytes_of_fp32_gradients(ranks: RankPool, attribute: str) -> None:
    for sizes, dtypes, found in ranks.run(planned, 2, attribute):
        assert sum(sizes) == 3 * 5 * 4
        assert set(dtypes) == {"torch.float32"}
        assert found == [[256.0 + 2 * window] * 3 for window in range(9)]


def test_parameters_of_16_and_of_32_bits_share_a_bucket(ranks: RankPool) -> None:
    assert ranks.run(buckets_of_mixed, 1) == [1]


def buckets_of_mixed(rank: int) -> int:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    return len(fastddp.DistributedDataParallel(module, gradient_dtype=torch.float32).bucket_plan().buckets)


# ------------------------------------------------------------------------------------------------ copies and companions


def copies(rank: int, attribute: str) -> list[list[float | None]]:
    model = wrapped(attribute)
    model(constant(3.0)).backward()
    file = io.BytesIO(pickle.dumps(model))
    found = []
    for other in (copy.deepcopy(model), pickle.load(file)):
        with other.no_sync():
            other(constant(256.0)).backward()
        other(constant(1.0)).backward()
        found.append(values(other, attribute))
    return [*found, values(model, attribute)]


@ATTRIBUTES
def test_copies_and_pickles_have_fp32_gradients_of_their_own(ranks: RankPool, attribute: str) -> None:
    assert ranks.run(copies, 2, attribute) == [[[257.0] * 3, [257.0] * 3, [3.0] * 3]] * 2


def two_wrappers(rank: int, attribute: str) -> list[float | None] | str:
    inner = wrapped(attribute)
    outer = wrapped(attribute, nn.ModuleDict({"inner": inner}))
    outer.module.forward = lambda x: inner(x)  # type: ignore[method-assign]
    try:
        for micro in range(2):
            with outer.no_sync() if micro == 0 else torch.enable_grad():
                outer(constant(256.0 if micro == 0 else 1.0 + 2 * rank)).backward()
    except RuntimeError as error:
        return str(error)
    return values(inner, attribute)


def test_two_wrappers_share_fp32_gradients_in_grad(ranks: RankPool) -> None:
    # The inner one averages 256, too: its forward is not under no_sync.
    assert ranks.run(two_wrappers, 2, "grad") == [[258.0] * 3] * 2


def test_two_wrappers_of_main_gradients_are_refused(ranks: RankPool) -> None:
    for text in ranks.run(two_wrappers, 2, "main_grad"):
        assert 'gradient_attribute="main_grad"' in text


def in_backward(rank: int, attribute: str) -> float | str:
    module = Parts()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    model = wrapped(attribute, module)
    try:
        model(constant(1.0 + rank)).backward()
    except RuntimeError as error:
        return str(error)
    assert all(p.grad is None for p in module.parameters())
    return module.a[0].item()


def test_optimizers_in_backward_step_with_fp32_gradients(ranks: RankPool) -> None:
    assert ranks.run(in_backward, 2, "grad") == [-0.5, -0.5]


def test_optimizers_in_backward_are_refused_where_they_would_find_nothing(ranks: RankPool) -> None:
    for text in ranks.run(in_backward, 2, "main_grad"):
        assert 'gradient_attribute="main_grad"' in text


def compiled(rank: int, attribute: str) -> list[float | None]:
    model = wrapped(attribute)
    call = torch.compile(model, backend="aot_eager")
    with model.no_sync():
        call(constant(256.0)).backward()
    call(constant(1.0)).backward()
    return values(model, attribute)


@ATTRIBUTES
def test_a_compiled_model_brings_fp32_gradients(ranks: RankPool, attribute: str) -> None:
    assert ranks.run(compiled, 2, attribute) == [[257.0] * 3] * 2


def gone(rank: int) -> str:
    model = wrapped("main_grad")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(RuntimeError) as caught:
        model(constant(1.0)).backward()
    return str(caught.value)


def test_a_gradient_that_a_hook_took_away_is_an_error(ranks: RankPool) -> None:
    for text in ranks.run(gone, 1):
        assert re.search(r"parameter \w \(number \d, bucket \d\) got a gradient that is not in parameter\.grad", text)
