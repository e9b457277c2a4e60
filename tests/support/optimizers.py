"""Small optimizers after those of packages: what they take norms, factors or numbers over, and where they keep it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class Small(Optimizer):
    """Each step moves a parameter by ``update``."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, parameter.grad, self.state[parameter], group)
                    parameter.sub_(group["lr"] * update)

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        raise NotImplementedError


def mean(state: Any, key: str, value: Tensor, rate: float = 0.1) -> Tensor:
    state[key] = value * rate if key not in state else state[key].lerp(value, rate)
    return state[key]


class Lion(Small):
    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        sign = (0.9 * state.get("m", torch.zeros_like(gradient)) + 0.1 * gradient).sign()
        mean(state, "m", gradient)
        return sign


class LARS(Small):
    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        return gradient * torch.norm(parameter) / (torch.norm(gradient) + 1e-8)


class LAMB(Small):
    """It looks at its first parameter when it is made, as Apex' does, and counts steps in its group."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, count=0, **settings)
        first = self.param_groups[0]["params"][0]
        self.overflow = torch.zeros(1, device=first.device)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        m, v = mean(state, "m", gradient), mean(state, "v", gradient**2)
        update = m / (1 - 0.9 ** group["count"]) / (v.sqrt() + 1e-6)
        return update * torch.norm(parameter) / (torch.norm(update) + 1e-8)


class FactoredFrom128(Small):
    """Adafactor and CAME: the mean square of a large matrix is a row and a column."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        if parameter.ndim < 2 or min(parameter.shape) < 128:
            return gradient / (mean(state, "v", gradient**2).sqrt() + 1e-8)
        row, column = mean(state, "row", (gradient**2).mean(1)), mean(state, "column", (gradient**2).mean(0))
        return gradient / (torch.outer(row, column) / row.mean()).sqrt()


class Shampoo(Small):
    """SOAP too: a list of factors, one a dimension, and the number of a step as a Python number."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        matrix = gradient.reshape(gradient.shape[0], -1)
        factors = state.setdefault("factors", [torch.eye(size, dtype=matrix.dtype) for size in matrix.shape[:1]])
        state["count"] = state.get("count", 0) + 1
        factors[0].lerp_(matrix @ matrix.T, 0.1)
        return torch.linalg.solve(factors[0], matrix).reshape(gradient.shape)


class Prodigy(Small):
    """D-Adaptation too: the distance, one number over all parameters, grows in the group."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, d=1e-6, **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            dots = [
                (parameter.grad * (self.state[parameter].setdefault("first", parameter.clone()) - parameter)).sum()
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            group["d"] = max(group["d"], float(sum(dots)))
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        return group["d"] * gradient.sign()


class AdamWClipped(torch.optim.AdamW):
    """By the norm of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.div_(torch.norm(parameter).clamp(min=1.0))
        super().step()


class ScheduleFree(Small):
    """The parameters are those to train with or, after ``eval``, their mean; the group counts steps."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, count=0, trains=False, **settings)

    def train(self) -> None:
        self._switch(True, 1 - 1 / 0.9)

    def eval(self) -> None:
        self._switch(False, 1 - 0.9)

    @torch.no_grad()
    def _switch(self, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["trains"] is not trains:
                group["trains"] = trains
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            group["count"] += 1
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        z = state.setdefault("z", parameter.clone())
        move = (parameter - z) * (0.9 / group["count"])
        z.sub_(gradient * group["lr"])
        return gradient + move

    def restart(self) -> None:
        self.state.clear()


class Noise(Small):
    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Half(Small):
    """As of kernels that know no fp64."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        if parameter.dtype == torch.float64:
            raise TypeError("no kernel for Double")
        return gradient / (torch.norm(gradient) + 1)


class Counts:
    def __init__(self) -> None:
        self.count = 0


class KeepsAnObject(Small):
    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        counts = state.setdefault("counts", Counts())
        counts.count += 1
        state["flat"] = gradient.flatten() / counts.count
        return state["flat"].reshape(gradient.shape)


class KeepsTwo(Small):
    """Numbers of no parameter's shape, beside a count in a list."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        state["rates"] = 0.9 * state.get("rates", torch.ones(2, 3))
        state.setdefault("count", [0])[0] += 1
        return gradient * state["rates"][0, 0] / state["count"][0]


class GathersItself(Small):
    """Muon of KellerJordan: it takes parameters alone, and each rank steps some of them."""

    def __init__(self, params: Any, **settings: Any) -> None:
        assert all(isinstance(parameter, torch.nn.Parameter) for parameter in params)
        super().__init__(params, **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            found = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(found, parameter.detach())


class AddsUp(Small):
    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


class KeepsElsewhere(Small):
    """Momentum that is in no state."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.momentum: dict[Tensor, Tensor] = {}

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        return self.momentum.setdefault(parameter, torch.zeros_like(parameter)).mul_(0.9).add_(gradient)


class Quantised(Small):
    """AdamW8bit's: from ``least`` elements on, the mean is numbers of 8 bits, and a scale for each block of 256."""

    least = 4096

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        if parameter.numel() < self.least or parameter.numel() % 256:
            return mean(state, "m", gradient)
        scales = state.setdefault("scales", gradient.new_zeros(parameter.numel() // 256))
        m = state.setdefault("m", torch.full_like(gradient, 128, dtype=torch.uint8))
        new = (
            ((m.double() - 128).view(-1, 256) * scales[:, None] / 127).view(gradient.shape).lerp(gradient.double(), 0.1)
        )
        scales.copy_(new.view(-1, 256).abs().amax(1))
        m.copy_((new.view(-1, 256) / scales[:, None].clamp(min=1e-30) * 127).round().view(gradient.shape) + 128)
        return new.to(gradient.dtype)


class QuantisedLate(Quantised):
    """Of so many that no trial sees it."""

    least = 65537


class ByGroup(Small):
    """What a group asks for: steps of length 1, or plain ones."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        assert all(isinstance(group["matrices"], bool) for group in self.param_groups)

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        return gradient / gradient.norm() if group["matrices"] else gradient
