"""Which parameters and buffers of a module fastddp synchronises, and whether it can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class NamedParameters:
    """The parameters whose gradients travel, each once, in the order of registration."""

    names: list[str]
    tensors: list[nn.Parameter]

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.tensors, strict=True)


def collect_parameters(module: nn.Module, ignored: set[str]) -> NamedParameters:
    """Collect the parameters of ``module`` that require a gradient; a shared one counts once, under its first name.

    Raises:
        RuntimeError: no parameter requires a gradient; or a parameter is uninitialised (lazy) or on the meta device.
        ValueError: parameters are on several types of device.
        NotImplementedError: a module produces sparse gradients.
    """
    taken = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if not _matches(name, ignored)]
    _check_initialised(taken)
    if not any(parameter.requires_grad for _, parameter in taken):
        raise RuntimeError(
            "DistributedDataParallel is not needed: the module has no parameter that requires a gradient. "
            "Set requires_grad=True on the parameters to train before wrapping, or use the module as it is."
        )
    _check_one_device_type(taken)
    _check_dense(module, ignored)
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in taken:
        if parameter.requires_grad:
            first_names.setdefault(parameter, name)
    return NamedParameters(list(first_names.values()), list(first_names))


def replicated_tensors(module: nn.Module, ignored: set[str], with_buffers: bool) -> list[tuple[str, Tensor]]:
    """All that has to be equal on all ranks before training, by name: parameters, frozen ones too, and buffers."""
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if not _matches(name, ignored)]
    return parameters + (list(named_buffers(module, ignored).items()) if with_buffers else [])


def named_buffers(module: nn.Module, ignored: set[str]) -> dict[str, Tensor]:
    """The buffers of ``module`` by name, without ignored ones."""
    return {name: buffer for name, buffer in module.named_buffers() if not _matches(name, ignored)}


def _matches(name: str, ignored: set[str]) -> bool:
    # torch documents "{module_name}.{param_name}", which for the root module begins with a dot.
    return name in ignored or f".{name}" in ignored


def _check_initialised(named: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"Parameter {name} is uninitialised, so it has no shape yet. "
                "Run a forward pass of the lazy module before wrapping it."
            )
        if parameter.is_meta:
            raise RuntimeError(
                f"Parameter {name} is on the meta device, so it has no values. "
                "Materialise the module (module.to_empty(device=...) and initialise it) before wrapping it."
            )


def _check_one_device_type(named: list[tuple[str, nn.Parameter]]) -> None:
    first_of_type: dict[str, str] = {}
    for name, parameter in named:
        first_of_type.setdefault(parameter.device.type, name)
    if len(first_of_type) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first_of_type.items())
        raise ValueError(
            f"All parameters must be on one type of device, but there are {places}. Move the module to one device, "
            "or exclude parameters with _set_params_and_buffers_to_ignore_for_model."
        )


def _check_dense(module: nn.Module, ignored: set[str]) -> None:
    for name, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)) or not child.sparse:
            continue
        weight = f"{name}.weight" if name else "weight"
        if child.weight.requires_grad and not _matches(weight, ignored):
            raise NotImplementedError(
                f"Parameter {weight} belongs to a module with sparse=True; fastddp does not support sparse gradients "
                "yet. Build the module with sparse=False, or use torch.nn.parallel.DistributedDataParallel."
            )


def check_optimizer_in_backward(parameters: Iterable[Tensor]) -> None:
    """Raise ``NotImplementedError`` if an optimizer has been attached to a parameter's backward."""
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        raise NotImplementedError(
            "fastddp does not support optimizers that run in backward (apply_optimizer_in_backward) yet. "
            "Step the optimizer after backward, or use torch.nn.parallel.DistributedDataParallel."
        )
