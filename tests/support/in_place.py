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
from fastddp.torch_compat.refusals import replication_of

Wrapper = fastddp.DistributedDataParallel

# What differs, test by test. Each has to fail.
DIFFERS = {
    "test_a_copy_and_torchs_ddp_with_its_state_go_on_as_the_original": "copies are plain; no `module.` in keys",
    "test_a_given_group_averages_and_cannot_be_pickled": "it can: copies are plain",
    "test_a_module_may_be_wrapped_again_and_the_first_wrappers_hooks_go_with_it": "again is refused",
    "test_a_wrapper_that_is_gone_or_has_no_hooks_synchronises_no_more[dropped]": "the module itself would be dropped",
    "test_errors_carry_the_words_that_people_search_logs_for_43259_22049_68803": "a step says it, and not a forward",
    "test_forward_hooks_that_change_what_they_are_given": "the module's hooks are the wrapper's",
}


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
        wrapper = replication_of(self) and replication_of(self).wrapper
        if wrapper is None:  # it is under construction
            raise
        return self if name == "module" else getattr(wrapper, name)


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
