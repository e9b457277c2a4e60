"""``fastddp.replicate``: data parallelism for a module that stays the object that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import comm_hooks
from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.in_place.replicated import Replicated, hold, wrapper_of
from fastddp.in_place.replication import Replication, let_go
from fastddp.module.parameters import trained_parameters
from fastddp.torch_compat.job_options import check_names_of_arguments
from fastddp.torch_compat.refusals import check_not_replicated, replication_of


def replicate(
    module: nn.Module, *, hook: str | tuple[object, Callable[..., Any]] | None = None, **options: Any
) -> nn.Module:
    """Average the gradients of ``module`` over ranks in each backward, whichever of its methods the loss came by.

    The module stays the same object, with the same ``state_dict()`` keys. Its class becomes a subclass of the one that
    it had, with the methods of :class:`fastddp.in_place.replicated.Replicated`. All ranks call this.

    Args:
        module: the module to train; the same on every rank. If parameters are on the meta device, it is replicated in
            its first forward, or that of one of its submodules.
        hook: the communication hook: its name, as of ``python -m fastddp --hook``, or its state and itself.
        **options: of :class:`fastddp.DistributedDataParallel`, without ``mixed_precision``.

    Returns:
        ``module``.

    Raises:
        RuntimeError: as :class:`fastddp.DistributedDataParallel`.
        TypeError: ``module`` is no module, or an argument is of another type.
        ValueError: ``module`` is a wrapper, compiled by TorchScript or torch.compile, is replicated already, has parts
            or parameters that are, or has an attribute of the name of a method that it would get; ``mixed_precision``
            is given; or as :class:`fastddp.DistributedDataParallel`.
    """
    check_module(module, options)
    if isinstance(hook, str):
        hook = comm_hooks.hook_named(hook)
    if hook is not None:
        comm_hooks.check_hook(hook[1])
    hold(module, Replication(options, hook))
    if not any(parameter.is_meta for parameter in module.parameters()):
        try:
            wrapper_of(module)
        except BaseException:
            let_go(module)
            raise
    return module


def check_module(module: object, options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError, as :func:`replicate`. Drops a replication that another one may replace."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}." + see("FD024"))
    if options.get("mixed_precision") is not None:
        raise ValueError(
            "mixed_precision is for DistributedDataParallel: methods of a replicated module would run in the "
            "parameters' dtype. Use torch.autocast, or parameters of 16 bits with main_grads." + see("FD023")
        )
    check_names_of_arguments(DistributedDataParallel.__init__, options)
    if (found := replication_of(module)) is None or _is_over(found, module):
        let_go(module)
    check_not_replicated(module)
    _check_kind(module)
    taken = sorted(
        name for name in vars(Replicated) if name not in vars(nn.Module) and name[:2] != "__" and hasattr(module, name)
    )
    if taken:
        raise ValueError(
            f"{type(module).__name__} has {', '.join(taken)}, and replicate() adds a method of that name. Rename it, "
            "or use fastddp.DistributedDataParallel." + see("FD022")
        )


def _check_kind(module: nn.Module) -> None:
    if isinstance(module, TorchDDP | nn.DataParallel):
        raise ValueError(
            f"replicate() takes the module that this {type(module).__name__} wraps: pass model.module, and drop the "
            "wrapper." + see("FD013")
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "replicate() changes the class of a module, and a module of TorchScript has none of its own. Use "
            "fastddp.DistributedDataParallel." + see("FD022")
        )
    for name, child in module.named_modules():
        if isinstance(child, TorchDDP):
            raise ValueError(f"{name} is a {type(child).__name__}. Replicate the whole model alone." + see("FD013"))
    if "_orig_mod" in module._modules:
        raise ValueError(
            "replicate() comes before torch.compile(): pass the module that was compiled (model._orig_mod), then "
            "compile it." + see("FD022")
        )


def _is_over(replication: Replication, module: nn.Module) -> bool:
    """Whether its wrapper is of no use, because the module has other parameters; or it would be made only now."""
    if replication.wrapper is None:
        return not any(parameter.is_meta for parameter in module.parameters())
    wrapper = replication.wrapper
    trained = {id(parameter) for _, parameter in trained_parameters(module, wrapper.parameters_to_ignore)}
    known = {id(parameter) for parameter in wrapper.engine.now.parameters.tensors}
    return trained != known or bool(wrapper.reducer.parameters_without_hook())
