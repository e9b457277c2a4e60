"""What a module can do besides, once it is replicated in place, and what becomes of its copies."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastddp.ddp import DistributedDataParallel
from fastddp.in_place.replication import PLAIN_CLASS, Replication, plain
from fastddp.torch_compat.compiling import is_exporting, is_left_alone, leave_alone
from fastddp.torch_compat.refusals import REPLICATED

Of = ParamSpec("Of")
Result = TypeVar("Result")


def wrapper_of(model: Any) -> Any:
    """The wrapper that does a model's work: the hidden one of a module that is replicated in place, or itself."""
    return _replication_of(model).ready() if isinstance(model, Replicated) else model


def _replication_of(module: Any) -> Replication:
    found: Replication = module.__dict__[REPLICATED]
    return found


def _by_wrapper(method: Callable[Concatenate[Any, Of], Result]) -> Callable[Concatenate[Any, Of], Result]:
    """A method that the wrapper has."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Of.args, **kwargs: Of.kwargs) -> Result:
        return method(wrapper_of(self), *args, **kwargs)

    return call


def _attribute_of_wrapper(name: str) -> Any:
    return property(
        lambda self: getattr(wrapper_of(self), name), lambda self, value: setattr(wrapper_of(self), name, value)
    )


class Replicated:
    """What :func:`fastddp.replicate` adds to a module: methods of the wrapper, and FSDP2's names."""

    regroup = _by_wrapper(DistributedDataParallel.regroup)
    abort = _by_wrapper(DistributedDataParallel.abort)
    on_lost = _by_wrapper(DistributedDataParallel.on_lost)
    bucket_plan = _by_wrapper(DistributedDataParallel.bucket_plan)
    sample_steps = _by_wrapper(DistributedDataParallel.sample_steps)
    step_report = _by_wrapper(DistributedDataParallel.step_report)
    audit = _by_wrapper(DistributedDataParallel.audit)
    last_grad_norm = _by_wrapper(DistributedDataParallel.last_grad_norm)
    found_inf = _by_wrapper(DistributedDataParallel.found_inf)
    parameters_ready = _by_wrapper(DistributedDataParallel.parameters_ready)
    discard_step = _by_wrapper(DistributedDataParallel.discard_step)
    find_non_finite_module = _by_wrapper(DistributedDataParallel.find_non_finite_module)
    blame_non_finite = _by_wrapper(DistributedDataParallel.blame_non_finite)
    join = _by_wrapper(DistributedDataParallel.join)
    # Torch's Join asks for these.
    join_hook = _by_wrapper(DistributedDataParallel.join_hook)  # type: ignore[arg-type]  # it has named arguments
    join_device = _attribute_of_wrapper("join_device")
    join_process_group = _attribute_of_wrapper("join_process_group")
    _join_config = _attribute_of_wrapper("_join_config")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank add up its own gradients, of all backwards within this context.

        The next backward outside of it averages the sum, whichever forward it belongs to.
        """
        with wrapper_of(self).no_sync():
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the backwards that come average gradients. FSDP2 has this method.

        Args:
            requires_gradient_sync: False: gradients stay on this rank, and add up.
            recurse: has no effect, since the module is replicated as a whole.
        """
        _replication_of(self).set_requires_gradient_sync(requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: gradients are averages when a backward that synchronises returns. FSDP2 has this method.

        Args:
            is_last_backward: has no effect.
        """

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange gradients: see :meth:`fastddp.DistributedDataParallel.register_comm_hook`.

        Args:
            state: handed to each call of the hook.
            hook: takes the state and a bucket, and returns a future.
        """
        _replication_of(self).register_comm_hook(state, hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as :meth:`torch.nn.Module.zero_grad`.

        Args:
            set_to_none: free gradients in ``parameter.grad``. Those in ``main_grad`` are always set to zero in place.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if (wrapper := _replication_of(self).wrapper) is not None:
            wrapper.engine.zero_gradients()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module. Modules make others of their own class, as a slice of an ``nn.ModuleList`` does."""
        return getattr(cls, PLAIN_CLASS)(*args, **kwargs)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as :meth:`fastddp.DistributedDataParallel.forward` does."""
        if is_exporting() or _replication_of(self).runs():
            return super().__call__(*inputs, **kwargs)  # type: ignore[misc]
        return _replication_of(self).ready()(*inputs, **kwargs)

    # Note [Copies of a replicated module]
    # A copy of a wrapper has an engine. A copy of a module may be an average of weights that nobody trains, or be
    # loaded where there is no process group. So it gets its wrapper when it is first used to train. A shallow copy has
    # the same parameters, whose gradients a second engine would average again: it is a plain module.

    def __copy__(self) -> Any:
        with plain(self):
            return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with plain(self) as replication:
            return hold(copy.deepcopy(self, memo), copy.deepcopy(replication, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain(self) as replication:
            function, args, *rest = self.__reduce_ex__(protocol)
            state, items, keys, fill = [*rest, None, None, None, None][:4]
            if isinstance(state, dict):
                state = dict(state)  # it may be the module's own
        return _new, (function, args), (state, fill, replication), items, keys, _fill


def _new(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A plain module, as its class makes one. Pickle lets that function make objects of its own class alone."""
    return function(*args)


def _fill(module: Any, states: tuple[Any, Callable[[Any, Any], None] | None, Replication]) -> None:
    """Give a module that was unpickled what it had."""
    state, fill, replication = states
    if fill is not None:
        fill(module, state)
    elif state is not None:
        module.__setstate__(state)
    hold(module, replication)


def hold(module: Any, replication: Replication, add: type = Replicated) -> Any:
    """Let ``module`` be replicated by this, and have what the class ``add`` adds. Returns ``module``."""
    leave_alone(Replicated.__call__, where_inlined=False)
    kind: Any = type(module)
    module.__class__ = _class_of_both(add, kind)
    module.__dict__[REPLICATED] = replication
    replication.attach(module)
    return module


@functools.cache
def _class_of_both(add: type, plain: Any) -> type:
    """A subclass of both. Its ``__name__`` is that of ``plain``, since users write it into files."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": plain.__module__, "__doc__": plain.__doc__, PLAIN_CLASS: plain}
        namespace["__qualname__"] = f"Replicated{plain.__qualname__}"
        if is_left_alone(plain.forward):
            namespace["forward"] = _forward_of(plain)

    return types.new_class(plain.__name__, (add, plain), {}, fill)


def _forward_of(plain: Any) -> Any:
    """The forward of a class of torch's own. Dynamo puts a frame around such a module, and so would not meet ours."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return plain.forward(self, *inputs, **kwargs)

    return forward
