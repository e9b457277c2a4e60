"""The third way to wrap: ``fastddp.replicate``, in place of ``fastddp.DistributedDataParallel``, for tests of both.

``pytest --in-place`` gives ranks :class:`InPlace` under the wrapper's name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import fake_cuda
import fastddp
from fastddp.in_place.hidden_wrapper import HiddenWrapper
from fastddp.in_place.replicated import Replicated, wrapper_of

Wrapper = fastddp.DistributedDataParallel


class InPlace:
    """The wrapper's constructor, which gives the module itself."""

    def __new__(cls, module: nn.Module, *positional: Any, **options: Any) -> Any:
        """As torch's."""
        names = ("device_ids", "output_device", "dim", "broadcast_buffers")
        return fastddp.replicate(module, **dict(zip(names, positional, strict=False)), **options)


def _get(self: Any, name: str) -> Any:
    """What tests ask of a wrapper: its module, and what the hidden one has."""
    try:
        return super(Replicated, self).__getattr__(name)  # type: ignore[misc]
    except AttributeError:
        return self if name == "module" else getattr(wrapper_of(self), name)


def _set(self: Any, name: str, value: Any) -> None:
    is_of_wrapper = hasattr(HiddenWrapper, name) and not hasattr(type(self), name)
    if is_of_wrapper:
        setattr(wrapper_of(self), name, value)
    else:
        super(Replicated, self).__setattr__(name, value)


def wrap(which: Any) -> Any:
    """What a test shall wrap with that asks for this class."""
    return fastddp.DistributedDataParallel if which is Wrapper else which


def install() -> None:
    """In a rank's process."""
    fastddp.DistributedDataParallel = InPlace  # type: ignore[assignment, misc]
    Replicated.__getattr__, Replicated.__setattr__ = _get, _set  # type: ignore[attr-defined, method-assign, assignment]


def install_on_simulated_device() -> None:
    """The same, where the device is simulated."""
    fake_cuda.install()
    install()
