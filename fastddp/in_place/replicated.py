"""What a module can do besides, once it is replicated in place, and what becomes of its copies."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.in_place.replication import PLAIN_CLASS, Replication, forget_first_calls, set_class
from fastddp.torch_compat.compiling import is_exporting, is_left_alone, leave_alone
from fastddp.torch_compat.refusals import REPLICATED, replication_of

Of = ParamSpec("Of")
Result = TypeVar("Result")


def wrapper_of(model: Any) -> Any:
    """The wrapper that does a model's work: the hidden one of a module that is replicated in place, or itself."""
    found = replication_of(model)
    return model if found is None else found.ready()


def _who_synchronises(module: Any) -> Any:
    return replication_of(module).wrapper or replication_of(module)


def _by_wrapper(method: Callable[Concatenate[Any, Of], Result]) -> Callable[Concatenate[Any, Of], Result]:
    """A method that the wrapper has."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Of.args, **kwargs: Of.kwargs) -> Result:
        return method(wrapper_of(self), *args, **kwargs)

    return call


def _attribute_of_wrapper(name: str, of: Callable[[Any], Any] = wrapper_of) -> Any:
    return property(lambda self: getattr(of(self), name), lambda self, value: setattr(of(self), name, value))


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
    # Whether the backwards that come average gradients. Scripts set it, as that of torch's DDP.
    require_backward_grad_sync = _attribute_of_wrapper("require_backward_grad_sync", _who_synchronises)

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
        self.require_backward_grad_sync = requires_gradient_sync

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
        replication_of(self).register_comm_hook(state, hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as :meth:`torch.nn.Module.zero_grad`.

        Args:
            set_to_none: free gradients in ``parameter.grad``. Those in ``main_grad`` are always set to zero in place.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if (wrapper := replication_of(self).wrapper) is not None:
            wrapper.engine.zero_gradients()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain object. Libraries that copy modules call this, and fill in the rest."""
        kind = getattr(cls, PLAIN_CLASS, cls)
        return kind.__new__(kind, *args, **kwargs)

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Note [The class of a replicated module]."""
        if PLAIN_CLASS not in vars(cls):
            go_on = super().__init_subclass__
            cls.__bases__ = tuple(getattr(base, PLAIN_CLASS, base) for base in cls.__bases__)
            go_on(**keywords)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as :meth:`fastddp.DistributedDataParallel.forward` does."""
        replication = self.__dict__.get(REPLICATED)
        if replication is None or is_exporting() or replication.runs(self):
            return super().__call__(*inputs, **kwargs)  # type: ignore[misc]
        return replication.ready()(*inputs, **kwargs)

    # Note [Copies of a replicated module]
    # A copy is a plain module: it may be an average of weights that one rank evaluates, or each rank's own to tune. Who
    # wants it to be replicated says so. It is made of a plain module with the contents of the replicated one, which
    # stays as it is, since another thread may train it. Where somebody copies ``__dict__`` himself, a Replication
    # within it is that of another module, and does nothing.

    def __copy__(self) -> Any:
        return copy.copy(_plain(self))

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        key = (REPLICATED, id(self))
        if key in memo:  # the module is somewhere within itself
            return copy.deepcopy(memo[key], memo)
        memo[key] = _plain(self)
        replication_of(self).put_whole_parameters(memo)
        made = copy.deepcopy(memo[key], memo)
        forget_first_calls(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        module = copy.deepcopy(self) if replication_of(self).leaves_traces() else _plain(self)
        return module.__reduce_ex__(protocol)


def _plain(module: Any) -> Any:
    """A plain module with the contents of this one."""
    made = object.__new__(module.__class__)
    made.__dict__.update(vars(module))
    made.__dict__.pop(REPLICATED, None)
    slots = [one for kind in type(made).__mro__ for one in vars(kind).values() if inspect.ismemberdescriptor(one)]
    for slot in slots:
        with contextlib.suppress(AttributeError):  # it is empty
            slot.__set__(made, slot.__get__(module))
    return made


# Note [The class of a replicated module]
# It is made of two: the plain class, and what replicate() adds. A parametrization, or a library's mixin, makes another
# class of a module's, and assigns it. That is made of the plain class, which ``module.__class__`` names, and then takes
# its place. So what is added is always outermost, and copies have the class that they would have without it.
#
# Nobody hears of the class of both: neither the metaclass nor ``__init_subclass__`` of the plain class, which may write
# each class into a list, want keywords, or refuse.


class _ClassOfBoth(ABCMeta):
    """The metaclass; a subclass of ``ABCMeta``, so classes can be made of this one and an abstract one."""

    def mro(cls) -> Any:
        """What is added comes first. The plain class is the first base, since an object has to fit into both."""
        if PLAIN_CLASS not in vars(cls):
            return super().mro()
        plain, add = cls.__bases__
        return [cls, *add.__mro__[:-1], *plain.__mro__]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module. Modules make others of their own class, as a slice of an ``nn.ModuleList`` does."""
        plain = vars(cls).get(PLAIN_CLASS)
        return super().__call__(*args, **kwargs) if plain is None else plain(*args, **kwargs)


def hold(module: Any, replication: Replication, add: type = Replicated) -> Any:
    """Let ``module`` be replicated by this, and have what ``add`` adds. Return it. Its class may raise ValueError."""
    leave_alone(Replicated.__call__, where_inlined=False)
    try:
        set_class(module, _class_of_both(add, type(module)))
    except Exception as error:
        raise ValueError(
            f"replicate() gives a module a subclass of its class, and {type(module).__name__} allows none: {error}. "
            "Use fastddp.DistributedDataParallel." + see("FD022")
        ) from error
    module.__dict__[REPLICATED] = replication
    replication.attach(module)
    return module


_classes: weakref.WeakValueDictionary[tuple[type, int], type] = weakref.WeakValueDictionary()


def _class_of_both(add: type, plain: Any) -> type:
    """A subclass of both. Its names are those of ``plain``, since users write them into files."""
    plain = getattr(plain, PLAIN_CLASS, plain)
    made = _classes.get((add, id(plain)))
    if made is None:
        names = {"__module__", "__doc__", "__firstlineno__"} & vars(plain).keys()  # inspect.getsource() asks for some
        namespace = {"__qualname__": plain.__qualname__, **{name: vars(plain)[name] for name in names}}
        namespace |= {
            PLAIN_CLASS: plain,
            "__class__": property(lambda self: plain, lambda self, kind: set_class(self, _class_of_both(add, kind))),
        }
        if is_left_alone(plain.forward):
            namespace["forward"] = _forward_of(plain)
        meta = type(plain)
        if not issubclass(meta, _ClassOfBoth):
            meta = type(meta.__name__, (_ClassOfBoth, meta), {})
        made = type.__new__(meta, plain.__name__, (plain, add), namespace)
        abc._abc_init(made)  # type: ignore[attr-defined]  # what ABCMeta does, whose methods go on to others
        _classes[add, id(plain)] = made
    return made


def _forward_of(plain: Any) -> Any:
    """The forward of a class of torch's own. Dynamo puts a frame around such a module, and so would not meet ours."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return plain.forward(self, *inputs, **kwargs)

    return forward
