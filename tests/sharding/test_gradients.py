"""What users do with gradients of which each rank has a part: look at them, clip them, zero them, unscale them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import fastddp
from fastddp import comm_hooks
from on_ranks import Wrap, of_ranks, on_ranks, same_under_both
from parts import Parts

SIZES = (3000, 7, 2500)


class Training:
    """Parameters whose gradients are chosen, in buckets whose runs cut them; with a replicated optimizer or a sharded.

    Gradients are small integers times ``scale``, so their sums over ranks, and sums of squares, are exact in any order.
    """

    def __init__(
        self,
        rank: int,
        sharded: bool,
        kind: Any = torch.optim.SGD,
        hook: Any = None,
        sizes: tuple[int, ...] = SIZES,
        **settings: Any,
    ) -> None:
        self.rank, self.step_number = rank, 0
        self.model = fastddp.DistributedDataParallel(Chosen(sizes), bucket_cap_mb=0.011)
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        settings = {"lr": 0.5, **settings}
        self.is_sharded = sharded
        self.optimizer: Any = (
            fastddp.ShardedOptimizer(self.model, kind, **settings)
            if sharded
            else kind(self.model.parameters(), **settings)
        )

    def backward(self, scale: float | Tensor = 1.0, spoilt: float | None = None) -> None:
        """``spoilt``: one element of rank 1's gradient of the first parameter; the last, which is in rank 1's part."""
        self.step_number += 1
        generator = torch.Generator().manual_seed(10 * self.step_number + self.rank)
        parameters = [*self.model.parameters()]
        gradients = [torch.randint(-4, 5, p.shape, generator=generator).float() * 2 for p in parameters]
        if spoilt is not None and self.rank == 1:
            gradients[0][-1] = spoilt
        (self.model(gradients) * scale).backward()

    def clip(self, max_norm: float) -> Tensor:
        """Gradients as they are now."""
        if self.is_sharded:
            return fastddp.clip_grad_norm_(self.model, max_norm)
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def own_gradients(self) -> list[Tensor]:
        """This rank's part."""
        return self.optimizer.parts.gradients()  # type: ignore[no-any-return]

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


EITHER = partial(Training, sharded=False), partial(Training, sharded=True)


class Chosen(nn.Module):
    """The input is the gradients."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.linspace(-1, 1, size) for size in sizes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, gradients, strict=True)]).sum()


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


def assert_the_same_on_all_ranks(training: Training) -> None:
    first, *others = of_ranks(training.parameters())
    for other in others:
        assert_same(other, first)


# --------------------------------------------------------------------------------------------------- parameter.grad

USES: dict[str, Callable[[nn.Parameter, list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda one, all_: clip_grad_norm_(all_, 1.0),
    "clip_grad_value_": lambda one, all_: clip_grad_value_(all_, 1.0),
    "get_total_norm": lambda one, all_: get_total_norm([p.grad for p in all_ if p.grad is not None]),
    "a product": lambda one, all_: 2 * one.grad,  # type: ignore[operator]
    "an argument by name": lambda one, all_: torch.add(one, other=one.grad),  # type: ignore[arg-type]
    "a copy of values": lambda one, all_: one.data.copy_(one.grad),  # type: ignore[arg-type]
    "data": lambda one, all_: one.grad.data,  # type: ignore[union-attr]
    "deepcopy": lambda one, all_: copy.deepcopy(one.grad),
    "save": lambda one, all_: torch.save(one.grad, io.BytesIO()),
    "SGD": lambda one, all_: torch.optim.SGD(all_, lr=1.0).step(),
    "SGD, fused": lambda one, all_: torch.optim.SGD(all_, lr=1.0, fused=True).step(),
    "AdamW, foreach": lambda one, all_: torch.optim.AdamW(all_, lr=1.0, weight_decay=0.0, foreach=True).step(),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_a_use_of_values_raises_with_the_remedy_and_changes_nothing(rank: int, use: str) -> None:
    training = Training(rank, sharded=True)
    training.backward()
    before = training.parameters()
    parameters = [*training.model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"of parameter all\.[02] is sharded(.|\n)*Use fastddp\.clip_grad_norm_\(model"
    ):
        USES[use](parameters[0], parameters)
    assert_same(training.parameters(), before)
    assert fastddp.clip_grad_norm_(training.model, 1e9) == fastddp.clip_grad_norm_(training.model, 1e9)


@on_ranks(2)
def test_who_only_looks_sees_a_gradient(rank: int) -> None:
    model = Training(rank, sharded=True).model
    parameter = model.module.all[0]
    assert parameter.grad is None
    model([torch.ones_like(parameter) for parameter in model.parameters()]).backward()
    gradient = parameter.grad
    assert isinstance(gradient, Tensor)
    assert (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, parameter.dtype, parameter.device)
    assert (gradient.numel(), gradient.layout, gradient.is_sparse) == (3000, torch.strided, False)
    assert f"{gradient}" == str(gradient) == repr(gradient) == "ShardedGradient of all.0"
    model.module.requires_grad_(True)
    assert copy.deepcopy(model.module).all[0].grad is None
    assert parameter.grad is gradient


@on_ranks(2)
def test_a_module_may_be_moved_with_its_gradients(rank: int) -> None:
    """Lightning does so at the end of a training, whether they are zeroed or not."""
    training = Training(rank, sharded=True)
    training.backward()
    module, gradient = training.model.module, training.model.module.all[0].grad
    norm = fastddp.clip_grad_norm_(training.model, 1e9)
    assert module.cpu().all[0].grad is gradient
    assert fastddp.clip_grad_norm_(training.model, 1e9) == norm
    module.to("meta")
    assert repr(module.all[0].grad) == "ShardedGradient of all.0"
    assert module.all[0].grad.device.type == "meta"
    with pytest.raises(RuntimeError, match="is sharded"):
        gradient.data = torch.zeros(3000)


# --------------------------------------------------------------------------------------------------------- zero_grad

ZEROING: dict[str, Callable[[Training, bool], None]] = {
    "model": lambda training, to_none: training.model.zero_grad(set_to_none=to_none),
    "module": lambda training, to_none: training.model.module.zero_grad(set_to_none=to_none),
    "optimizer": lambda training, to_none: training.optimizer.zero_grad(set_to_none=to_none),
    "foreach": lambda training, to_none: torch.optim.SGD(training.model.parameters(), foreach=True).zero_grad(to_none),
}


@pytest.mark.parametrize("of", ZEROING)
@pytest.mark.parametrize("set_to_none", [True, False])
@same_under_both(both=EITHER)
def test_after_zero_grad_a_window_adds_to_nothing(wrap: Wrap, rank: int, of: str, set_to_none: bool) -> Any:
    training = wrap(rank, momentum=0.5)
    for _ in range(4):
        training.backward()
        training.optimizer.step()
        training.backward()  # into the rest of the last one
        ZEROING[of](training, set_to_none)
        training.backward()
        training.optimizer.step()
        ZEROING[of](training, set_to_none)
        assert all((parameter.grad is None) == set_to_none for parameter in training.model.parameters())
        assert not training.is_sharded or (training.own_gradients() == []) == set_to_none
        training.optimizer.step()  # with zeros momentum goes on, without gradients nothing does
    return training.parameters()


def each(change: Callable[[Any], object]) -> Callable[[Training, bool], None]:
    def change_all(training: Training, to_none: bool) -> None:
        for parameter in training.model.parameters():
            change(parameter)

    return change_all


BEHIND_OUR_BACK = {
    "each in place": each(lambda one: one.grad.zero_()),
    "other zeros": each(lambda one: setattr(one, "grad", torch.zeros_like(one))),
    "written to, but not zeroed": each(lambda one: one.grad.mul_(1.0)),
}


@pytest.mark.parametrize("of", [*ZEROING, *BEHIND_OUR_BACK])
@pytest.mark.parametrize("again", [False, True], ids=["", "another local backward"])
@same_under_both(both=EITHER)
def test_averages_are_zeroed_with_the_local_gradient_that_was_added_to_them(
    wrap: Wrap, rank: int, of: str, again: bool
) -> Any:
    zero = (ZEROING | BEHIND_OUR_BACK)[of]
    training = wrap(rank)
    for _ in range(3):
        training.backward()
        with training.model.no_sync():
            training.backward()
            zero(training, False)
            if again:
                training.backward()
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.parameters()


# -------------------------------------------------------------------------------------------------------- the norm

NONE, FP16, BF16, INT8 = None, *(getattr(comm_hooks, f"{name}_compress_hook") for name in ("fp16", "bf16", "int8"))


@pytest.mark.parametrize(
    ("hook", "windows"),
    [*((hook, windows) for hook in (NONE, FP16, BF16) for windows in (1, 2)), (INT8, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2)
def test_clipping_and_the_norm_are_those_of_whole_gradients(rank: int, hook: Any, windows: int) -> None:
    """Bit for bit, where sums are exact in any order, as they are not where 8 bits are decoded."""
    found = []
    for sharded in (False, True):
        training = Training(rank, sharded, hook=hook)
        norms = []
        for _ in range(3):
            training.model.zero_grad()
            for _ in range(windows):
                training.backward()
            norms.append(training.model.last_grad_norm())
            assert training.model.found_inf() == 0
            assert fastddp.clip_grad_norm_(training.model, 1.0) == norms[-1] > 100
            training.optimizer.step()
        found.append([*norms, *training.parameters()])
        assert_the_same_on_all_ranks(training)
    if hook is INT8:
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    else:
        assert_same(found[1], found[0])


@on_ranks(2)
def test_what_only_some_ranks_have_found_all_know(rank: int) -> None:
    training = Training(rank, sharded=True)
    training.backward(spoilt=torch.inf)
    assert of_ranks(all(part.isfinite().all() for part in training.own_gradients())) == [True, False]
    assert training.model.found_inf() == 1.0
    assert training.model.last_grad_norm() == torch.inf
    with pytest.raises(RuntimeError, match="norm of the gradients is inf, so they cannot be clipped"):
        fastddp.clip_grad_norm_(training.model, 1.0, error_if_nonfinite=True)


# ------------------------------------------------------------------------------------------------- sparse gradients


class Words(nn.Module):
    """A table with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 600)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))


@on_ranks(2)
def test_sparse_gradients_which_all_ranks_have_whole_count_once(rank: int) -> None:
    """The optimizer of their tables cannot be sharded."""
    found = []
    for sharded in (False, True):
        model = fastddp.DistributedDataParallel(Words())
        tables = torch.optim.SGD([model.module.words.weight], lr=0.1)
        dense = [*model.module.head.parameters()]
        rest: Any = (
            fastddp.ShardedOptimizer(model, torch.optim.SGD, dense, lr=0.1)
            if sharded
            else torch.optim.SGD(dense, lr=0.1)
        )
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([step, 3 + rank])).square().sum().backward()
            found.append(fastddp.clip_grad_norm_(model, 1.0))
            rest.step()
            tables.step()
        assert model.module.words.weight.grad.is_sparse
        del rest
        with pytest.raises(ValueError, match=r"parameter words\.weight is sparse(.|\n)*FD042"):
            fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        found += [parameter.detach().clone() for parameter in model.parameters()]
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------- torch's scaler

WAYS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW, fused": {"kind": torch.optim.AdamW, "fused": True},
    "gradients in fp16": {"hook": FP16},  # whose norm is known before they are unscaled
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clips", [False, True], ids=["", "unscaled first, and clipped"])
@on_ranks(2)
def test_a_step_with_one_ranks_infinity_is_skipped_by_all(rank: int, way: str, clips: bool) -> None:
    """As with a replicated optimizer; without clipping bit for bit, since scales are powers of two."""
    found = []
    for sharded in (False, True):
        training = Training(rank, sharded, **WAYS[way])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        scales = []
        for step in range(6):
            training.optimizer.zero_grad()
            before = training.parameters()
            training.backward(scaler.scale(torch.ones(())), spoilt=torch.inf if step == 3 else None)
            if clips:
                scaler.unscale_(training.optimizer)
                norm = training.clip(1.0)
                assert (step == 3) == norm.isinf()
            scaler.step(training.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert (step == 3) == all(map(torch.equal, training.parameters(), before))
        assert scales == [2.0**4, 2.0**5, 2.0**5, 2.0**4, 2.0**4, 2.0**5]
        assert_the_same_on_all_ranks(training)
        found.append(training.parameters())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5 if clips else 0, atol=1e-5 if clips else 0)


@on_ranks(2)
def test_a_rank_without_any_part_steps_and_skips_with_the_others(rank: int) -> None:
    training = Training(rank, sharded=True, sizes=(3,))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training.backward()
    assert sorted(of_ranks(len(training.own_gradients()))) == [0, 1]
    for spoilt in (None, torch.nan):
        training.optimizer.zero_grad()
        before = training.parameters()
        training.backward(scaler.scale(torch.ones(())), spoilt)
        scaler.step(training.optimizer)
        scaler.update()
        assert all(map(torch.equal, training.parameters(), before)) == (spoilt is not None)
        assert scaler.get_scale() == (4.0 if spoilt is None else 2.0)
        assert_the_same_on_all_ranks(training)


@on_ranks(2)
def test_gradients_in_fp16_are_refused_on_all_ranks_as_torch_refuses_them(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Parts("a").half())
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(3).half()).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="cannot unscale gradients in fp16"):
        scaler.step(optimizer)
