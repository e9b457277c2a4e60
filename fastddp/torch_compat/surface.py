"""What torch's class has besides constructor, forward and hooks, for a model with fastddp's reducer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from fastddp import comm_hooks
from fastddp._C import Expect, Lost
from fastddp.engine import Carried, Engine, Recipe
from fastddp.errors import see
from fastddp.module.buffers import buffer_hook
from fastddp.module.numbering import ModelNumber
from fastddp.module.parameters import replicated_tensors
from fastddp.ranks.living import Living
from fastddp.ranks.together import Waits
from fastddp.torch_compat.logging_data import Logger, LoggingData, logging_data
from fastddp.torch_compat.reducer import Reducer
from fastddp.torch_compat.refusals import refuse_torchs_helpers
from fastddp.window import joining

wrappers: Living[Any, None] = Living()
"""All of fastddp's in this process."""


def check_not_shared(engine: Engine, *, if_sharded: bool) -> None:
    """Raise ValueError if another wrapper has a parameter of this engine; ``if_sharded``: and shards its gradient."""
    for other, name in _sharing(engine):
        if other.engine.sharded or not if_sharded:
            raise ValueError(
                f"Two wrappers have parameter {name}, and with a ShardedOptimizer each rank gets a part of its "
                "gradient alone, which the other wrapper cannot average. Wrap the module once." + see("FD047")
            )


def _sharing(engine: Engine) -> Iterator[tuple[Any, str]]:
    """Other models, and a parameter that they have in common with the engine's."""
    names = {id(parameter): name for name, parameter in engine.now.parameters}
    for other in wrappers:
        if other.engine is not engine:
            for parameter in other.engine.now.parameters.tensors:
                if id(parameter) in names:
                    yield other, names[id(parameter)]
                    break


@refuse_torchs_helpers
class TorchSurface(TorchDDP):
    """The small methods of torch's class; the subclass has the constructor and the step."""

    reducer: Reducer  # type: ignore[assignment]  # torch's class has one of torch's
    logger: Logger  # type: ignore[assignment]
    _recipe: Recipe
    _number: ModelNumber
    engine: Engine
    _comm_hook: tuple[object, Callable[..., Any]] | None
    _builtin_hook_name: str | None = None  # torch's name of the hook, if torch has no function for it
    _begin_shadow: Callable[[bool, bool], None]
    regroup: Callable[[dist.ProcessGroup | None], None]
    _on_lost: Callable[[Lost], None] | None = None
    _is_alone = False  # whether no other model may have a parameter of this one
    _loses_ranks = False  # whether others go on by themselves where a rank is lost
    _divide_by_initial_world_size: bool

    # Code copied from torch's forward asks for these. The answers lead it past what fastddp does not have: construction
    # in the first forward, gradients that only a hook of the wrapper sends, clones of outputs, and collectives that a
    # static graph's first backward leaves undone.
    _lazy_init_ran = True
    _delay_all_reduce_all_params = False
    _delay_grad_buffer: Tensor | None = None
    _ddp_sink_clone = False
    _static_graph_delay_allreduce_enqueued = True

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook`` synchronise buffers, in place of the broadcast from rank 0, before or after the forward.

        ``hook(state, buffers: dict[str, Tensor]) -> list[torch.futures.Future] | None`` changes the buffers in place.
        The end of backward waits for the futures, or at the latest the next forward. Another call replaces the hook.
        """
        self.buffer_hook = buffer_hook(state, hook, comm_hook_location)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register torch's ALLREDUCE or FP16_COMPRESS: see :meth:`register_comm_hook`."""
        builtin = dist.BuiltinCommHookType
        hooks = {builtin.ALLREDUCE: comm_hooks.allreduce_hook, builtin.FP16_COMPRESS: comm_hooks.fp16_compress_hook}
        if comm_hook_type not in hooks:
            raise TypeError(
                f"comm_hook_type must be torch.distributed.BuiltinCommHookType.ALLREDUCE or .FP16_COMPRESS, not "
                f"{comm_hook_type!r}. Other hooks are for register_comm_hook()." + see("FD024")
            )
        self.register_comm_hook(None, hooks[comm_hook_type])
        self._builtin_hook_name = str(comm_hook_type)

    def _get_ddp_logging_data(self) -> LoggingData:
        """Options, sizes, buckets and environment under torch's keys: :mod:`fastddp.torch_compat.logging_data`."""
        hook = None if self._comm_hook is None else self._builtin_hook_name or self._comm_hook[1]
        return logging_data(self, self.engine, self.logger, hook)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing, but raise ValueError for a rate below 1: :meth:`step_report` tells the times of steps."""
        if sample_rate < 1:
            raise ValueError(f"The sample rate must be 1 or more steps, got {sample_rate}." + see("FD024"))

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: fastddp returns the module's own outputs, never clones."""

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context in which ranks may have different numbers of inputs.

        A rank that leaves the context takes part in the others' exchanges, without gradients, until all have left. Then
        all ranks get the model of a rank that trained to the end.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; else by the number of ranks that
                still have inputs.
            enable: False: the context has no effect.
            throw_on_early_termination: raise on all ranks as soon as one has no more inputs.

        Raises:
            RuntimeError: a ``ShardedOptimizer`` trains the model, and has to take part too.
        """
        if enable and self.engine.sharded is not None:
            raise RuntimeError(
                "A rank without inputs still has to step with its part of the others' gradients. Use "
                "torch.distributed.algorithms.Join([model, optimizer]), in this order, in place of model.join()."
                + see("FD042")
            )
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this model does in a :class:`torch.distributed.algorithms.Join` when its rank has no more inputs.

        Args:
            **kwargs: of torch's context; ``divide_by_initial_world_size`` counts.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return joining.JoinedRank(self.engine.here.now, self._begin_shadow, self._replicas)

    def _replicas(self) -> list[tuple[str, Tensor]]:
        return replicated_tensors(self.module, self.parameters_to_ignore, self.forward_sync_buffers)

    def _note_who_has_inputs(self) -> None:
        """Before a forward: note whether torch's Join lets ranks run out of inputs."""
        now = self.engine.now
        now.is_uneven = self._join_config.enable
        now.counts_ranks_with_inputs = now.is_uneven and not self._divide_by_initial_world_size

    def _make_engine(self, carried: Carried | None = None) -> None:
        """Make the model's engine, in place of an earlier one that has left ``carried``."""
        before = self.__dict__.get("engine")
        audited = None if before is None or before.audit is None else before.audit.tensors
        self.logger = Logger(self)
        note_error = self.logger.set_error_and_log
        hook = self._comm_hook
        if hook is not None and before is not None:
            hook = (before.remembers or hook[0], hook[1])
        self.engine = Engine(
            self._recipe, self.process_group, self._number, Reducer, note_error, hook, audited, carried
        )
        assert isinstance(self.engine.reducer, Reducer)
        self.reducer = self.engine.reducer
        self.reducer.belongs_to(self.engine)
        self._waits: Waits = self.__dict__.get("_waits") or Waits()
        self._waits.are_of(self.reducer)
        if self._on_lost is not None:
            self.reducer.on_lost(self._on_lost)
        check_not_shared(self.engine, if_sharded=True)
        for other, name in _sharing(self.engine):
            if self._is_alone or other._is_alone:
                raise ValueError(
                    f"Parameter {name} is in a module that is replicated in place and in another model, so it would be "
                    "averaged twice. Replicate or wrap the model around both." + see("FD013")
                )
        wrappers[self] = None

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Run a functional optimizer on a bucket's parameters after it has been averaged, as torch's DDP does."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim  # takes a second

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} cannot run in backward: torch has no functional form of it. Step it after backward."
                + see("FD038")
            ) from error

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Do nothing: ranks tell each other which rows they have."""

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """As :meth:`regroup`. Ranks outside of the group keep theirs."""
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            self.regroup(new_process_group)

    def _set_static_graph(self) -> None:
        """Set ``static_graph=True`` after construction. Raises RuntimeError if a step has begun."""
        if self.static_graph:
            warnings.warn("static_graph is set already; _set_static_graph() changes nothing.", stacklevel=2)
            return
        if self.reducer.windows() > 0 or self.reducer.state not in ("idle", "accumulating"):
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts, and training has begun: what the "
                "first step uses has to be noted in it. Call it before the first forward, or give static_graph=True to "
                "the constructor." + see("FD014")
            )
        if self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is of no use with _set_static_graph(), which finds unused parameters in "
                "the first step.",
                stacklevel=2,
            )
        self.static_graph = True
        config = dataclasses.replace(self._recipe.config, expect=Expect.as_first)
        self._recipe = dataclasses.replace(self._recipe, config=config)
        self.engine.here.expect(self._recipe)

    @property
    def broadcast_buffers(self) -> bool:  # type: ignore[override]  # torch has had this property since 2.13 only
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _module_parameters(self) -> list[Tensor]:  # type: ignore[override]
        """All parameters except ignored ones; with frozen ones."""
        return [parameter for _, parameter in replicated_tensors(self.module, self.parameters_to_ignore, False)]

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:  # type: ignore[override]
        """The registered hook and its state, if there is one."""
        return [] if self._comm_hook is None else [(self._comm_hook[1], self._comm_hook[0])]

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self.engine.has_rebuilt_buckets

    @_has_rebuilt_buckets.setter
    def _has_rebuilt_buckets(self, value: bool) -> None:
        self.engine.has_rebuilt_buckets = value

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always False: gradients are averages when backward returns. Setting it to True raises RuntimeError.

        Torch's DDP has it from 2.15 on.
        """
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise RuntimeError(
                "require_manual_backward_finalization: fastddp.DistributedDataParallel always ends its exchanges "
                "before backward returns. Leave it False and do not call finalize_backward(), or use "
                "torch.nn.parallel.DistributedDataParallel." + see("FD038")
            )

    @property
    def should_finalize_after_backward(self) -> bool:
        """Always False: backward is not finalized by hand."""
        return False

    def finalize_backward(self) -> None:
        """Raise RuntimeError, as torch's DDP does if ``require_manual_backward_finalization`` is False."""
        raise RuntimeError(
            "finalize_backward() is for require_manual_backward_finalization=True, which "
            "fastddp.DistributedDataParallel does not have: gradients are complete when backward returns. "
            "Leave the call out." + see("FD038")
        )

    def _remove_autograd_hooks(self) -> None:
        """Take the gradient hooks off the module's parameters; the wrapper then no longer synchronises."""
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward left gradients incomplete."""
        self.engine.check_complete()
