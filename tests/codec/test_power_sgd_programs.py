"""PowerSGD on random models: any shapes, ranks, buckets and options, against the algorithm in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import PowerSGDState
from fastddp.exchange.power_sgd import is_compressed
from program_execution import new_memory_is_nan
from ranks import RankPool
from test_power_sgd import Reference, difference, mean

SHAPES = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
    st.just(()),
    st.just((0, 5)),
)


@dataclass(frozen=True)
class Program:
    shapes: tuple[tuple[int, ...], ...]
    rank: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    bucket_cap_mb: float
    view: bool
    accumulate: bool
    channels_last: bool
    seed: int


PROGRAMS = st.builds(
    Program,
    shapes=st.lists(SHAPES, min_size=1, max_size=6).map(tuple).filter(lambda shapes: any(map(elements, shapes))),
    rank=st.integers(1, 6),
    min_compression_rate=st.sampled_from([0.1, 1.0, 2.0]),
    error_feedback=st.booleans(),
    warm_start=st.booleans(),
    bucket_cap_mb=st.sampled_from([0.0, 0.001, 25.0]),
    view=st.booleans(),
    accumulate=st.booleans(),
    channels_last=st.booleans(),
    seed=st.integers(0, 1000),
)


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class Given(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        tensors = [torch.zeros(shape) for shape in program.shapes]
        if program.channels_last:
            tensors = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
        self.weights = nn.ParameterList(tensors)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(self.weights, gradients, strict=True)]).sum()


def gradients(rank: int, program: Program, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(program.seed + 100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in program.shapes]


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements as they lie in memory that is laid out like ``like``."""
    return torch.empty_like(like).copy_(tensor).as_strided((like.numel(),), (1,))


@new_memory_is_nan()
def differences(rank: int, program: Program) -> list[str]:
    settings: dict[str, Any] = {
        "matrix_approximation_rank": program.rank,
        "min_compression_rate": program.min_compression_rate,
        "use_error_feedback": program.error_feedback,
        "warm_start": program.warm_start,
    }
    state = PowerSGDState(None, start_powerSGD_iter=2, **settings)
    options = {"bucket_cap_mb": program.bucket_cap_mb, "gradient_as_bucket_view": program.view}
    model = fastddp.DistributedDataParallel(Given(program), **options)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    found = []
    for step in range(5):
        given = gradients(rank, program, step)
        model.zero_grad()
        if program.accumulate:
            with model.no_sync():
                model([gradient / 2 for gradient in given]).backward()
            given_now = [gradient / 2 for gradient in given]
        else:
            given_now = given
        loss = model(given_now)
        before = {name: (q.clone(), state.errors.get(name)) for name, q in state.qs.items()} if step >= 2 else {}
        expected = []
        for (name, parameter), gradient in zip(model.module.named_parameters(), given, strict=True):
            compressed = is_compressed(parameter, program.rank, program.min_compression_rate)
            assert step < 2 or compressed == (name in before)
            if name in before:
                q, error = before[name]
                reference = Reference(parameter, q, state)
                if error is not None:
                    reference.error.copy_(error)
                expected.append(reference.step(in_memory_order(gradient, parameter)).flatten())
            else:
                expected.append(mean(in_memory_order(gradient.double(), parameter.double())))
        loss.backward()
        for (name, parameter), wanted in zip(model.module.named_parameters(), expected, strict=True):
            got = in_memory_order(parameter.grad, parameter)
            if got.numel() and difference(got, wanted) > 2e-3:
                found.append(f"step {step}, {name} {tuple(parameter.shape)}: {difference(got, wanted):.2g}")
    return found


@pytest.mark.tier("nightly")
@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
def test_gradients_are_those_of_the_algorithm(ranks: RankPool) -> None:
    @settings(max_examples=150, phases=[Phase.generate, Phase.shrink], deadline=None, derandomize=True)
    @given(program=PROGRAMS)
    def check(program: Program) -> None:
        assert ranks.run(differences, 2, program) == [[], []]

    check()
