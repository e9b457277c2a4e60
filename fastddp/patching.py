"""fastddp in place of torch's DDP, for code that knows nothing of fastddp."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, TracebackType

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import comm_hooks
from fastddp.ddp import DistributedDataParallel


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


@dataclass(frozen=True)
class Binding:
    """A name in a module, and what it stood for before."""

    module: ModuleType
    name: str
    original: object


@dataclass
class Patch:
    """What :func:`patch` changed. As a context manager it is undone at the end of the block."""

    bindings: list[Binding] = field(default_factory=list)
    metaclass: type | None = None
    """The former metaclass of fastddp's class; None: this patch has not changed it."""

    def undo(self) -> None:
        """Let the names stand for what they stood for before. A second call does nothing.

        Existing models stay as they are, and so do names in modules that were first imported under the patch.
        """
        while self.bindings:
            binding = self.bindings.pop()
            # If somebody else has replaced ours since then, theirs stays.
            if getattr(binding.module, binding.name, None) is _REPLACEMENTS[id(binding.original)]:
                setattr(binding.module, binding.name, binding.original)
        if self.metaclass is not None:
            DistributedDataParallel.__class__ = self.metaclass  # type: ignore[method-assign]
            self.metaclass = None

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def patch() -> Patch:
    """Replace torch's ``DistributedDataParallel``, and the hooks of which fastddp has its own, in all loaded modules.

    Torch's modules are among them, so later imports get fastddp's classes too. Existing objects stay torch's, and so do
    references that code keeps elsewhere (in a list, as a default argument, as a base class). ``isinstance`` with
    torch's name holds for models of either class.

    >>> with fastddp.patch():
    ...     model = torch.nn.parallel.DistributedDataParallel(model)  # fastddp's
    """
    patched = Patch()
    if type(DistributedDataParallel) is not StandsForTorchs:
        patched.metaclass = type(DistributedDataParallel)
        DistributedDataParallel.__class__ = StandsForTorchs  # type: ignore[method-assign]
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or _is_ours(module):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in _REPLACEMENTS:
                patched.bindings.append(Binding(module, name, value))
                setattr(module, name, _REPLACEMENTS[id(value)])
    return patched


def _is_ours(module: ModuleType) -> bool:
    """Whether the module belongs to this package, which needs torch's own class."""
    return module.__name__.partition(".")[0] == "fastddp"


# Read when this module is imported, because a patch changes the names. Stateless hooks are torch's own functions in
# fastddp too.
_HOOKS = [
    (getattr(module, name), getattr(comm_hooks, name))
    for module in (default_hooks, powerSGD_hook)
    for name in comm_hooks.__all__
    if hasattr(module, name)
]

_REPLACEMENTS: dict[int, object] = {
    id(original): replacement
    for original, replacement in [(TorchDDP, DistributedDataParallel), *_HOOKS]
    if original is not replacement
}
