"""torch.compile: one graph, out of the middle of whose backward gradients go to their buckets.

A compiled backward gives autograd all its gradients when it ends. So dynamo cuts the graph of the DDP whose forward
runs: it makes a ``DDPOptimizer`` (``torch/_dynamo/backends/distributed.py``), which compiles a graph for each bucket.
While a forward of fastddp's runs, another function makes what dynamo gets. The graph stays whole, and has an operator
where a parameter is first used, because autograd runs the latest nodes first. Forward passes the parameter on; backward
hands its gradient over: note [Handed over], ``csrc/autograd/grad_hooks.h``. Parameters are inputs of the graph, so
graphs of the same code serve other parameters too, and torch's caches hold.

Where gradients cannot be handed over, dynamo cuts as for torch's DDP. It walks the parameters from the last used to the
first, as ``plan_buckets`` does, and asks the model for one cap, ``bucket_bytes_cap``. We tell it the first bucket's.

Note [Whose forward runs]
Torch keeps the model whose forward runs in a global, which forwards save and restore. Of two threads (an actor and a
learner, an evaluation beside training) the one that ends last would leave the other's model there, for ever. So what
runs is a fact of its thread, and torch's global looks into the thread that asks. A wrapper of torch's writes over it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp._C import Reducer
from fastddp.errors import see
from fastddp.module.nested import tensors_in
from fastddp.torch_compat.refusals import is_torchs


@torch.library.register_fake("fastddp::identities")
def _(parameters: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(parameters), dtype=torch.int64)


def leave_alone(*functions: Callable[..., Any], where_inlined: bool = True) -> None:
    """Tell dynamo not to compile these, but what they call; ``where_inlined``: nor to take them into another graph.

    ``torch._disable_dynamo(recursive=False)`` would put a frame of torch's around them, for which dynamo breaks the
    graph of a compiled wrapper. Dynamo takes seconds to import, so no decorator does this.
    """
    import torch._dynamo.backends.distributed

    for function in functions:
        if where_inlined:
            torch._dynamo.decorators.skip(function)
        else:
            torch._dynamo.eval_frame.skip_code(function.__code__)


def call(module: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
    """Call ``module``; where the wrapper is compiled, dynamo compiles this call as one.

    Dynamo leaves frames of torch's own forwards alone, such as that of ``nn.Sequential``, and so would compile its
    layers one by one, or nothing. This frame is for it to begin with, as ``torch.compile`` of such a module has one.
    """
    return module(*inputs, **kwargs)


def is_exporting() -> bool:
    """As ``torch.compiler.is_exporting``, which is true for dynamo of torch 2.11 wherever it compiles."""
    return torch.compiler._is_exporting_flag


def is_left_alone(function: Callable[..., Any]) -> bool:
    """Whether dynamo compiles no frame of this function: of torch's own, for example."""
    return _check(getattr(function, "__code__", function))


_check = functools.cache(lambda code: bool(torch._dynamo.trace_rules.check(code)))  # a function may hold its class


class CompiledGraphs:
    """What becomes of the graphs that dynamo compiles while one model's forward runs.

    Args:
        parameters: the model's.
        names: their names, in the same order.
        have_stand_ins: while the model runs, other tensors are in the places of its parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], have_stand_ins: bool) -> None:
        self._parameters = parameters
        self._names = names
        self._have_stand_ins = have_stand_ins
        self._why_cut = ""
        self._frames = 0  # that dynamo had seen at the last look
        self._window = 0  # of that look
        self._compiled: set[int] = set()
        self._is_said = False

    def are_cut(self, reducer: Reducer, backend: Any) -> bool:
        """Whether dynamo shall cut what it compiles now, because gradients cannot be handed over."""
        why_cut = self._why_not(reducer, backend)
        self._why_cut = self._why_cut or why_cut
        return why_cut != ""

    def _why_not(self, reducer: Reducer, backend: Any) -> str:
        if self._have_stand_ins:
            return "other tensors stand in the places of its parameters (mixed_precision, or parts of a mesh)"
        if reducer.steps_inside_backward():
            return "an optimizer steps inside backward"
        if _uses_cuda_graphs(backend):
            return "the backend replays CUDA graphs, in which no operator calls the reducer"
        return ""

    def put_operators(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Let gradients be handed over. ``inputs``: an example for each placeholder, parameters themselves.

        Returns whether the graph has one output more: what nobody gets, backward would compute from parameters again.
        """
        if any("increment_nesting" in getattr(node.target, "__name__", "") for node in graph.graph.nodes):
            return False  # torch.func: inside it parameters are other tensors
        own = {id(parameter) for parameter in self._parameters if type(parameter) in (Tensor, nn.Parameter)}
        # Dynamo has run the graph with its fakes in the parameters' places. A fake that shares the memory of another
        # begins with another version than one that is alone. So new fakes, all kept, tell which were written to.
        mode = FakeTensorMode()
        unwritten = {id(value): mode.from_tensor(value) for value in inputs if id(value) in own}
        users = _users_with_gradients(graph.graph)
        placeholders: Any = graph.graph.find_nodes(op="placeholder")
        passing = [
            node
            for node, value in zip(placeholders, inputs, strict=True)
            if node in users and id(value) in unwritten
            if node.meta["example_value"]._version == unwritten[id(value)]._version
        ]
        if not passing:
            return False
        with graph.graph.inserting_after(placeholders[-1]):
            identities = graph.graph.call_function(torch.ops.fastddp.identities.default, (passing,))
        for place, node in enumerate(passing):
            with graph.graph.inserting_before(users[node][0]):
                passed = graph.graph.call_function(torch.ops.fastddp.passes.default, (node, identities, place))
            passed.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}
            for user in users[node]:
                user.replace_input_with(node, passed)
        output = graph.graph.output_node()
        output.args = ((*output.args[0], identities),)  # type: ignore[misc]
        graph.recompile()
        return True

    def look(self, output: Any, reducer: Reducer) -> None:
        """If dynamo has been at work since the last look, note which parameters get gradients from compiled graphs."""
        frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
        if self._is_said or frames == self._frames:
            return
        self._frames, self._window = frames, reducer.windows()
        compiled = _with_compiled_gradients(tensors_in(output))
        self._compiled = {index for index, parameter in enumerate(self._parameters) if id(parameter) in compiled}

    def check(self, reducer: Reducer, rank: int) -> None:
        """After the backward of the forward that was looked at: warn once if gradients were not handed over."""
        if self._is_said or not (self._compiled or self._why_cut) or reducer.windows() == self._window:
            return
        late = [self._names[index] for index in sorted(self._compiled.difference(reducer.handed_over()))]
        self._compiled = set()
        self._is_said = bool(late or self._why_cut)
        if self._is_said and rank == 0:
            warnings.warn(_text(self._why_cut, late) + see("FD051"), stacklevel=2)


def _users_with_gradients(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, those that use it where autograd records, in the order in which they run."""
    found: dict[fx.Node, list[fx.Node]] = {}
    records = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            records = node.args[0]
        elif records and node.op != "output":
            for used in node.all_input_nodes:
                found.setdefault(used, []).append(node)
    return found


def _text(why_cut: str, late: Sequence[str]) -> str:
    if why_cut:
        return f"fastddp: graphs of this model are cut where buckets end, as for torch's DDP: {why_cut}."
    more = f" and {len(late) - 1} more" if len(late) > 1 else ""
    return (
        f"fastddp: the gradient of {late[0]}{more} comes when its compiled graph ends, so it overlaps none of it: the "
        "graph writes to the parameter, the code was compiled before the model was wrapped or outside of its forward, "
        "dynamo is told to do without DDPs (torch._dynamo.config.optimize_ddp), saved_tensors_hooks replace "
        "parameters, or this torch compiles in another way."
    )


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _as_gradients_come(backend: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` for ``backend``, so that it computes gradients in the order of backward.

    Where weights take more memory than activations, inductor would compute their gradients at the end, all together.
    """
    if "config_patches" not in inspect.signature(_innermost(backend)).parameters:
        return options
    return options | {"config_patches": {"reorder_for_peak_memory": False} | (options.get("config_patches") or {})}


def _uses_cuda_graphs(backend: Any) -> bool:
    """Whether it is inductor with ``mode="reduce-overhead"``, or another way to ask for that."""
    own = getattr(_innermost(backend), "config", None)
    asked = own.get("triton.cudagraphs") if isinstance(own, dict) else None
    if asked is None and "torch._inductor.config" in sys.modules:
        asked = sys.modules["torch._inductor.config"].triton.cudagraphs
    return bool(asked)


def _with_compiled_gradients(outputs: Sequence[Tensor]) -> set[int]:
    """The ``id`` of each leaf that gets its gradient from a compiled graph; the autograd graph is walked."""
    found = set()
    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    left = list(nodes)
    while left:
        node = left.pop()
        after = {one for one, _ in node.next_functions if one is not None}
        if type(node).__name__ == "CompiledFunctionBackward":
            found |= {id(one.variable) for one in after if hasattr(one, "variable")}
        left += after - nodes
        nodes |= after
    return found


class _Here(threading.local):
    """Note [Whose forward runs]."""

    innermost: ActiveModel | None = None

    def __get__(self, instance: object, owner: object) -> Any:
        """What torch's global is."""
        return self.innermost and self.innermost.model


_here = _Here()


@torch._disable_dynamo
def runs_here(model: Any) -> bool:
    """Whether the innermost forward of this thread is that of ``model``."""
    return _here.innermost is not None and _here.innermost.model is model


class ActiveModel:
    """Within this context, dynamo compiles this thread's graphs as those of ``model``, whose forward runs."""

    def __init__(self, model: Any, first_bucket_bytes: int, graphs: CompiledGraphs) -> None:
        self.model = model
        self._first_bucket_bytes = first_bucket_bytes
        self._graphs = graphs

    @torch._disable_dynamo
    def __enter__(self) -> bool:
        """Return whether the module needs a frame of ours to be compiled as one: :func:`call`."""
        forward = self.model.module.forward
        needs_a_frame = isinstance(forward, types.MethodType) and is_left_alone(forward.__func__)  # may raise
        torch._dynamo.backends.distributed.DDPOptimizer.__new__ = _make_optimizer  # type: ignore[assignment, method-assign]
        self._outer, _here.innermost = _here.innermost, self
        before = vars(TorchDDP)["_active_ddp_module"]
        self._before = before if is_torchs(before) else _here
        TorchDDP._active_ddp_module = _here  # type: ignore[assignment]
        return needs_a_frame

    @torch._disable_dynamo
    def __exit__(self, *exception: Any) -> None:
        if TorchDDP._active_ddp_module is self.model:  # else a wrapper of torch's has begun or ended in another thread
            TorchDDP._active_ddp_module = self._before  # type: ignore[assignment]
        _here.innermost = self._outer

    def make_optimizer(self, torchs: Callable[..., Any], bucket_bytes_cap: int, backend_compile_fn: Any) -> Any:
        """What dynamo gets in place of its ``DDPOptimizer``."""
        if self._graphs.are_cut(self.model.reducer, backend_compile_fn):
            cuts = torchs(bucket_bytes_cap, backend_compile_fn, first_bucket_cap=self._first_bucket_bytes)
            return types.SimpleNamespace(compile_fn=cuts.compile_fn)

        def compile_fn(graph: fx.GraphModule, inputs: Sequence[Any], **of_backend: Any) -> Any:
            has_more = self._graphs.put_operators(graph, inputs)
            compiled = backend_compile_fn(graph, inputs, **_as_gradients_come(backend_compile_fn, of_backend))
            return (lambda *arguments: compiled(*arguments)[:-1]) if has_more else compiled

        return types.SimpleNamespace(compile_fn=compile_fn)


def _make_optimizer(cls: Any, bucket_bytes_cap: int, backend_compile_fn: Any, first_bucket_cap: Any = None) -> Any:
    """In place of ``DDPOptimizer.__new__``."""
    forward = _here.innermost
    if forward is None or TorchDDP._active_ddp_module is not forward.model or first_bucket_cap is not None:
        return object.__new__(cls)
    return forward.make_optimizer(cls, bucket_bytes_cap, backend_compile_fn)
