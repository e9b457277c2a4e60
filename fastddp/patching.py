"""fastddp in place of torch's DDP, for code that knows nothing of fastddp."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing import spawn
from types import ModuleType
from typing import Any, Unpack

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import comm_hooks
from fastddp.ddp import DistributedDataParallel
from fastddp.in_place import torchs_replicate
from fastddp.sharding import torchs_clipping
from fastddp.torch_compat import job_options
from fastddp.torch_compat.job_options import JobOptions, check_options
from fastddp.watch import presence


class StandsForTorchs(type(TorchDDP)):  # type: ignore[misc]  # torch's metaclass is what it is
    """The metaclass of fastddp's class under a patch: instances of torch's class are instances of it too.

    Code that asks ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` before it takes ``model.module``
    then also accepts models that were made before the patch. Subclasses of fastddp's class are not affected.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return (cls is DistributedDataParallel and _is_torchs(type(instance))) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return (cls is DistributedDataParallel and _is_torchs(subclass)) or super().__subclasscheck__(subclass)


def _is_torchs(kind: type) -> bool:
    # issubclass would ask the metaclass above again: torch's class asks its subclasses.
    return TorchDDP in getattr(kind, "__mro__", ())


class Patch:
    """What :func:`patch` changed. As a context manager it is undone at the end of the block."""

    def __init__(self) -> None:
        self._changes = contextlib.ExitStack()

    def change(self, owner: object, name: str, value: object) -> None:
        """Set an attribute, until the patch is undone.

        Args:
            owner: any object.
            name: of its attribute.
            value: what it stands for.
        """
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._changes.callback(_change_back, owner, name, value, before)

    def once_imported(self, module: str, change: Callable[[Patch], None]) -> None:
        """Change more as soon as a module is imported that takes long to import: now, if it is.

        Args:
            module: its name.
            change: is called with this patch, unless it is undone before.
        """
        if module in sys.modules:
            change(self)
        else:
            finder = _Finder(module, lambda: change(self))
            sys.meta_path.insert(0, finder)
            self._changes.callback(finder.end)

    def undo(self) -> None:
        """Let the names stand for what they stood for before. A second call does nothing.

        Existing models stay as they are, and so do names in modules that were first imported under the patch. What
        somebody else has put in the place of ours stays, too.
        """
        self._changes.close()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


class _Finder(MetaPathFinder):
    """Calls ``then`` when the module has been imported, once."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then = module, then

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """What other finders say of the module."""
        if fullname != self._module:
            return None
        self.end()
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec

    def end(self) -> None:
        """Look no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _change_back(owner: object, name: str, ours: object, before: object) -> None:
    if getattr(owner, name, None) is ours:
        setattr(owner, name, before)


def patch(**options: Unpack[JobOptions]) -> Patch:
    """Replace torch's ``DistributedDataParallel``, and the hooks of which fastddp has its own, in all loaded modules.

    So are functions of torch's that replicate a module in place: ``torch.distributed._composable.replicate``, and the
    one of this name that is FSDP2's, which stays torch's, with a warning, where fastddp's does not do the same.

    Torch's modules are among them, so later imports get fastddp's classes too. Existing objects stay torch's, and so do
    references that code keeps elsewhere (in a list, as a default argument, as a base class). ``isinstance`` with
    torch's name holds for models of either class. Processes that this one starts with :mod:`multiprocessing`
    (``torch.multiprocessing.spawn``, Lightning's launcher) are patched too, with the same options.

    >>> with fastddp.patch(hook="int8", on_stall="raise"):
    ...     model = torch.nn.parallel.DistributedDataParallel(model)  # fastddp's

    Args:
        **options: what wrappers get whose code says nothing about it, as with ``python -m fastddp``: ``hook``,
            ``buckets``, ``hierarchy``, ``gradient_average``, ``main_grads``, ``wire_memory``, ``on_stall``,
            ``patience``, ``on_corruption``, ``audit_every``. ``on_stall`` and ``on_corruption`` may be callables. Those
            of an outer patch hold as well.

    Returns:
        What undoes it: by ``undo()``, or at the end of a ``with`` block.

    Raises:
        TypeError: there is no such option, or its value is of another type.
        ValueError: no wrapper takes this value.
    """
    check_options(options)
    patched = Patch()
    patched.once_imported("torch.distributed.optim.zero_redundancy_optimizer", _shard_where_possible)
    if type(DistributedDataParallel) is not StandsForTorchs:
        patched.change(DistributedDataParallel, "__class__", StandsForTorchs)
    patched.change(job_options, "in_force", {**job_options.in_force, **options})
    patched.change(presence, "to_stderr", True)
    patched.change(spawn, "get_preparation_data", _patching(spawn.get_preparation_data))
    _rename(patched, _REPLACEMENTS)
    patched.once_imported(torchs_replicate.COMPOSABLE, _replicate_in_place)
    patched.once_imported(torchs_replicate.COMPOSABLE_FSDP, _replicate_in_fsdps_way)
    return patched


def _rename(patched: Patch, replacements: dict[int, object]) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "fastddp":
            continue  # this package needs torch's own class
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                patched.change(module, name, replacements[id(value)])


def _replicate_in_place(patched: Patch) -> None:
    # What stays torch's there needs torch's own class, too. It also keeps that after the patch.
    vars(sys.modules[torchs_replicate.COMPOSABLE_DDP])["DistributedDataParallel"] = TorchDDP
    torchs, ours = torchs_replicate.of_ddp()
    _rename(patched, {id(torchs): ours})


def _replicate_in_fsdps_way(patched: Patch) -> None:
    torchs, ours = torchs_replicate.of_fsdp()
    _rename(patched, {id(torchs): ours})


def _shard_where_possible(patched: Patch) -> None:
    from fastddp.sharding import zero  # which imports what took long

    if type(zero.TorchZero) is not zero.ShardsWherePossible:
        patched.change(zero.TorchZero, "__class__", zero.ShardsWherePossible)


# Note [Processes that a script starts]
# Multiprocessing sends a new process what it needs to prepare, and the process runs the script's file again before it
# gets to its work. The patch is in what is sent, so it comes before the script. A forked process has the patch anyway.


class _PatchAgain:
    """Patches the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[], Patch], tuple[()]]:
        return functools.partial(patch, **job_options.in_force), ()


def _patching(preparation: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    @functools.wraps(preparation)
    def preparation_with_patch(name: str) -> dict[str, Any]:
        presence.starts_processes = True
        return {"fastddp": _PatchAgain(), **preparation(name)}

    return preparation_with_patch


# Read when this module is imported, because a patch changes the names. Stateless hooks are torch's own functions in
# fastddp too.
_HOOKS = [
    (getattr(module, name), getattr(comm_hooks, name))
    for module in (default_hooks, powerSGD_hook)
    for name in comm_hooks.__all__
    if hasattr(module, name)
]

_CLIP = (torchs_clipping.torchs_clip_grad_norm_, torchs_clipping.clip_grad_norm_)
_REPLACEMENTS: dict[int, object] = {
    id(original): replacement
    for original, replacement in [(TorchDDP, DistributedDataParallel), _CLIP, *_HOOKS]
    if original is not replacement
}
