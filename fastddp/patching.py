"""fastddp in place of torch's DDP, for code that knows nothing of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, TracebackType

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import comm_hooks
from fastddp.ddp import DistributedDataParallel


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

    def undo(self) -> None:
        """Give the names back what they stood for. A second time does nothing.

        Models that exist stay what they are, and so do names in modules that were first imported under the patch.
        """
        while self.bindings:
            binding = self.bindings.pop()
            # What somebody else has put there since then stays.
            if getattr(binding.module, binding.name, None) is _REPLACEMENTS[id(binding.original)]:
                setattr(binding.module, binding.name, binding.original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def patch() -> Patch:
    """Replace torch's ``DistributedDataParallel``, and the hooks that fastddp has its own of, wherever they are named.

    That is every module that has been imported by now, torch's own among them, so what is imported later gets
    fastddp's too. ``isinstance`` with torch's class holds for models of fastddp as before; objects that were made, and
    references that code has put elsewhere (in a list, as a default argument, as a base class), stay torch's.

    >>> with fastddp.patch():
    ...     model = torch.nn.parallel.DistributedDataParallel(model)  # fastddp's
    """
    patched = Patch()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or _is_ours(module):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in _REPLACEMENTS:
                patched.bindings.append(Binding(module, name, value))
                setattr(module, name, _REPLACEMENTS[id(value)])
    return patched


def _is_ours(module: ModuleType) -> bool:
    """Whether the module belongs to this package, which needs torch's class as it is."""
    return module.__name__.partition(".")[0] == "fastddp"


# Read when this module is imported: behind a patch the names stand for something else. Stateless hooks are torch's own
# functions in fastddp too.
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
