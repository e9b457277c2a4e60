"""Which parameters and buffers of a module fastddp synchronises, and whether it can do so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fastddp.errors import see


@dataclass(frozen=True)
class NamedParameters:
    """The parameters whose gradients travel, each once, in the order of registration."""

    names: list[str]
    tensors: list[nn.Parameter]
    sparse: list[int]  # the numbers of the parameters whose gradients are sparse tensors

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.tensors, strict=True)


def collect_parameters(module: nn.Module, ignored: set[str]) -> NamedParameters:
    """Collect the parameters of ``module`` that require a gradient; a shared one counts once, under its first name.

    Raises RuntimeError if there is none, or one without values; ValueError for devices that do not go together.
    """
    taken = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if not _matches(name, ignored)]
    _check_initialised(taken)
    if not any(parameter.requires_grad for _, parameter in taken):
        raise RuntimeError(
            "DistributedDataParallel is not needed: the module has no parameter that requires a gradient. "
            "Set requires_grad=True on the parameters to train before wrapping, or use the module as it is."
            + see("FD022")
        )
    _check_one_device_type(taken)
    _check_sync_batch_norm(module, taken[0][1].device.type)
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in taken:
        if parameter.requires_grad:
            first_names.setdefault(parameter, name)
    sparse = _sparse(module)
    numbers = [number for number, parameter in enumerate(first_names) if parameter in sparse]
    return NamedParameters(list(first_names.values()), list(first_names), numbers)


def replicated_tensors(module: nn.Module, ignored: set[str], with_buffers: bool) -> list[tuple[str, Tensor]]:
    """The tensors that must be equal on all ranks before training, with names: all parameters, and buffers."""
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if not _matches(name, ignored)]
    return parameters + (list(named_buffers(module, ignored).items()) if with_buffers else [])


def named_buffers(module: nn.Module, ignored: set[str]) -> dict[str, Tensor]:
    """The buffers of ``module`` that are not ignored, by name."""
    return {name: buffer for name, buffer in module.named_buffers() if not _matches(name, ignored)}


def trained_parameters(module: nn.Module, ignored: set[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of ``module`` that require a gradient now and are not ignored, under all their names."""
    named = module.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in named if p.requires_grad and not _matches(name, ignored)]


def ignored_parameters(module: nn.Module, ignored: set[str]) -> set[nn.Parameter]:
    """The parameters of ``module`` that are ignored under one of their names."""
    return {p for name, p in module.named_parameters(remove_duplicate=False) if _matches(name, ignored)}


def _matches(name: str, ignored: set[str]) -> bool:
    # torch documents "{module_name}.{param_name}", which for the root module begins with a dot.
    return name in ignored or f".{name}" in ignored


def _check_initialised(named: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"Parameter {name} is uninitialised, so it has no shape yet. "
                "Run a forward pass of the lazy module before wrapping it." + see("FD022")
            )
        if parameter.is_meta:
            raise RuntimeError(
                f"Parameter {name} is on the meta device, so it has no values. "
                "Materialise the module (module.to_empty(device=...) and initialise it) before wrapping it."
                + see("FD022")
            )


def _check_one_device_type(named: list[tuple[str, nn.Parameter]]) -> None:
    first_of_type: dict[str, str] = {}
    for name, parameter in named:
        first_of_type.setdefault(parameter.device.type, name)
    if len(first_of_type) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first_of_type.items())
        raise ValueError(
            f"All parameters must be on one type of device, but there are {places}. Move the module to one device, "
            "or exclude parameters with _set_params_and_buffers_to_ignore_for_model." + see("FD022")
        )


def _check_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and device_type == "cpu":
            raise ValueError(
                f"{name or 'The module'} is a SyncBatchNorm, which torch runs on accelerators only, and the parameters "
                "are on the CPU. Move the module to the device before wrapping it, or use BatchNorm." + see("FD022")
            )


def _sparse(module: nn.Module) -> set[nn.Parameter]:
    """The parameters whose gradients will be sparse tensors."""
    return {
        child.weight  # type: ignore[misc]  # annotated as a tensor
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
