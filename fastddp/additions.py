"""The wrapper's methods that torch's class does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fastddp._C import Lost
from fastddp.config import check_types
from fastddp.engine import Carried
from fastddp.errors import see
from fastddp.planning.bucket_plan import BucketPlan
from fastddp.ranks.backends import check_numbers, default_group
from fastddp.ranks.listing import ranks
from fastddp.regrouping import Names, agree, change_groups, check_may_regroup, tell
from fastddp.times.step_report import StepReport
from fastddp.torch_compat.surface import TorchSurface
from fastddp.watch.non_finite import NonFinite, blame
from fastddp.watch.non_finite_module import find_in_next_forward
from fastddp.watch.stalls import begin_to_watch
from fastddp.window.grad_norm import measured


class Additions(TorchSurface):
    """Torch's class with these methods added. The subclass has the constructor and the step."""

    _names_of_ranks: Names = staticmethod(ranks)

    def _name_ranks(self) -> Names:
        """What the ranks of the present group are called."""
        return ranks

    def bucket_plan(self) -> BucketPlan:
        """Which parameters share a bucket now. "Bucket 3" in an error is number 3 of this plan.

        Unless a plan was given, it changes at the second step's forward, when buckets are rebuilt. With
        ``bucket_cap_mb="auto"`` it changes twice more, at the fifth and the eighth step's forward.
        """
        setting = self.engine.now.setting
        return BucketPlan.of(setting.plan, setting.names, setting.parameters)

    def sample_steps(self, every: int, *, compare_ranks: bool = False) -> None:
        """Take the times of each ``every``-th step, for :meth:`step_report`, the next step first. Not in torch.

        Args:
            every: how many steps there are from one sample to the next. 0, the state at first: sample no step.
            compare_ranks: gather each rank's own times, without its waits, in an all-gather of 72 bytes a rank in each
                ``every``-th step. Rank 0 then writes to the logger "fastddp" which rank is slow
                (:mod:`fastddp.times.rank_times`). Call this with the same arguments on every rank, between the same two
                steps. A single rank compares nothing.

        Raises:
            ValueError: ``every`` is no integer >= 0.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(
                f"sample_steps(every={every!r}): every is a number of steps, or 0 for none." + see("FD024")
            )
        self.engine.here.sample_steps(every, compare_ranks)

    def step_report(self) -> StepReport | None:
        """Where the time of the last sampled step went. On a device with streams the host waits for that step's end.

        A step begins with the first forward that may have a backward. A forward whose backward never comes counts into
        the step after it. If a forward has several backwards, the report covers the first.

        Returns:
            None before the first report. :meth:`sample_steps` asks for reports. A step is complete when the next one
            begins; a step that began before buckets were rebuilt does not count.
        """
        sampled = self.reducer.sampled()
        if sampled is None:
            return None
        slow_ranks, setting = self.engine.slow_ranks, self.engine.now.setting
        history = None if slow_ranks is None else slow_ranks.history
        return StepReport.of(sampled.times(), setting.bucket_ends, history, self.process_group.rank())

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Average over other ranks from the next forward on, in the same process. Not in torch.

        The old group may be dead: nobody waits for it. An open window, or one that has failed, is void: its gradients
        are removed, and what compression remembers is as before its step. Windows, buckets, sampling, the
        communication hook with its state and the watches go on. All ranks of ``process_group`` call this together, and
        first compare models and options. A process that joins wraps its module over a group of its own, registers the
        same hook, and calls this too: the ranks that were there hand it buckets, windows, PowerSGD's Q and the settings
        of 8 bits. Parameters, buffers and the optimizer's state are not sent: load them before.

        Args:
            process_group: the ranks from now on; None: the default group. The group that it had may be given again, if
                torch has given that other ranks (``ProcessGroup.reconfigure``).

        Raises:
            RuntimeError: ranks have different models or options: on all of them, with the ranks that differ. Call it
                again, with ranks that agree. Or it was called inside a backward.
            TypeError: it is no process group.
            ValueError: the hook's state names the group that is left; or ``hierarchy`` is a mesh, which has its own
                ranks.
        """
        check_types(self.module, process_group)
        process_group = process_group or default_group()
        check_numbers(process_group)
        engine, before = self.engine, self.process_group
        stays = process_group is before
        check_may_regroup(self._recipe, self._comm_hook, before, stays=stays)
        carried, lost = engine.leave(group_stays=stays)
        change_groups(before, process_group)
        with self._waits.meeting(process_group, self.device):
            self._meet(process_group, carried, lost)

    def _meet(self, process_group: dist.ProcessGroup, carried: Carried, lost: Lost | None) -> None:
        engine = self.engine
        sharded = engine.sharded
        agreed = agree(
            self._recipe,
            process_group,
            self.device,
            self._number,
            carried,
            self._comm_hook,
            engine.remembers,
            ([], False) if sharded is None else (sharded.settings, sharded.has_state),
        )
        begin_to_watch(process_group)
        names = self._names_of_ranks, self._name_ranks()
        if process_group.rank() == 0 and self._number.members:
            tell(self._number, agreed.number, lost, names)
        self.process_group, self._number, self._names_of_ranks = process_group, agreed.number, names[1]
        self._make_engine(agreed.carried)
        if sharded is not None:
            sharded.move(without_state=agreed.without_state)
            self.engine.shard(sharded)

    def abort(self, why: str) -> None:
        """End this rank's waits for other ranks, those that have begun and those that follow. Not in torch.

        Call it from another thread when other ranks are known to be gone: a rank may wait for one that is there and has
        noticed earlier. The step raises, or :meth:`regroup`, and then :meth:`regroup` goes on. On a device this aborts
        the process groups.

        Args:
            why: what the error says.
        """
        _, end = self._waits.look()
        end(f"fastddp: {why}" + see("FD052"))

    def on_lost(self, callback: Callable[[Lost], None]) -> None:
        """Call back, in place of an error in backward, when a connection to another rank is lost. Not in torch.

        For managers of replicas alone, which refuse the step and then :meth:`regroup`: the window is void, its
        backward returns, and neither an optimizer nor a forward goes on before that. It holds for all coming groups.

        Args:
            callback: gets the window's number (from 0), the bucket's (None: what follows the buckets) and the error.
                It is called inside of backward.
        """
        self._on_lost = callback
        self.reducer.on_lost(callback)

    def audit(self, optimizer: Optimizer | None = None, *, buffers: Iterable[str] = ()) -> None:
        """Let the audit (``Watch(audit_every=...)``) compare more than parameters, from the next step on. Not in torch.

        Call it with the same arguments on every rank, in the same step. Only plain tensors with strides are compared:
        no numbers, sparse tensors or tensor subclasses.

        Args:
            optimizer: compare its state of this model's parameters, which all ranks must have alike.
            buffers: names of buffers that are the same on every rank when a forward begins. A BatchNorm's buffers are
                not, unless rank 0's were broadcast after the last forward.

        Raises:
            RuntimeError: the model was made without an audit.
            TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
            ValueError: it is a ``ZeroRedundancyOptimizer``, which has a part of the state on each rank, or has none of
                the model's parameters; or there is no buffer of that name.
        """
        audit = self.engine.here.audit
        if audit is None:
            raise RuntimeError(
                "audit() adds to what an audit compares: wrap the module with watch=fastddp.Watch(audit_every=N)."
                + see("FD027")
            )
        if optimizer is not None:
            audit.tensors.add_optimizer(optimizer)
        audit.tensors.add_buffers(self.module, buffers)
        audit.plan_again()

    def last_grad_norm(self) -> Tensor:
        """The 2-norm of all synchronised gradients, as the last backward left them, without a wait for the device.

        Where unpack wrote the gradients, it has computed the norm on the way. Otherwise one pass over the buckets
        computes it now, so call this before the gradients are changed.

        With a :class:`fastddp.ShardedOptimizer` each rank measures its part, as it is now. Then all ranks have to call
        this: they add 16 bytes up.

        Returns:
            A 0-dimensional tensor on the device of the first bucket, fp32 (fp64 if a parameter is);
            :func:`torch.nn.utils.get_total_norm` of the gradients, to rounding.

        Raises:
            RuntimeError: no synchronisation has ended since the last forward; call it before the next one.
        """
        parameters = self._recipe.parameters.tensors
        is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
        return self._measured()[0].sqrt().to(torch.float64 if is_double else torch.float32)

    def found_inf(self) -> Tensor:
        """Whether a synchronised gradient holds an infinity or NaN: 1.0 or 0.0, like ``GradScaler``'s tensor.

        The caller is expected to skip the step if it is 1.0, so this then also does what :meth:`discard_step` does.
        With a :class:`fastddp.ShardedOptimizer` all ranks have to call this, as :meth:`last_grad_norm`.

        Returns:
            A 0-dimensional tensor on the device of the first bucket, fp32.

        Raises:
            RuntimeError: no synchronisation has ended since the last forward; call it before the next one.
        """
        found = (self._measured()[1] > 0).to(torch.float32)
        self.reducer.discard_step(only_if=found)
        return found

    def parameters_ready(self) -> None:
        """Wait until the parameters of the last optimizer step are here. On a device only the current stream waits.

        Only a ``ShardedOptimizer`` with ``gather="forward"`` lets parameters arrive later. Who reads them through their
        modules, as forward and :meth:`state_dict` do, need not call this.
        """
        if self.engine.sharded is not None:
            self.engine.sharded.parameters_ready()

    def _measured(self) -> Tensor:
        sharded = self.engine.sharded
        return measured(self.engine.here.now, None if sharded is None else sharded.gradients())

    def discard_step(self) -> None:
        """Say that no optimizer will step with the present gradients, for example because they are too large.

        Compression then forgets what it left out of them, which would otherwise go into the next step. Call this on all
        ranks, after backward. Gradients stay as they are. A step that a ``GradScaler`` skips needs no call.

        Raises:
            RuntimeError: gradients are travelling.
        """
        self.engine.here.reducer.discard_step()

    def find_non_finite_module(self) -> None:
        """Look, in the next forward of this rank, for the first module whose output is not finite.

        The report has the module's name, the rank, and the least and the greatest number of the module's input. It goes
        where ``Watch.corruption`` says, else to the logger "fastddp". That forward waits for the device after each
        module.
        """
        find_in_next_forward(self, self.engine.here.now, self._recipe.watch.corruption)

    def blame_non_finite(self) -> NonFinite | None:
        """Where the last backward's infinities and NaNs came from: rank, parameter, how many elements.

        All ranks that average with each other have to call this, since it makes one small all-gather. The host waits
        for the device. It may also be called after a replay of a captured graph. If a rank had such gradients, the
        wrapper asks by itself, at the next optimizer step or the next forward.

        Returns:
            None if all gradients are finite; the same on all ranks that share gradients. Under ``noop_hook``, where
            each rank keeps its own gradients, all ranks are asked.

        Raises:
            RuntimeError: the wrapper has no ``Watch(corruption=...)``, so nothing was measured; or no synchronisation
                has ended since the last forward.
        """
        if self._recipe.watch.corruption is None:
            raise RuntimeError(
                "What each rank's gradients were is measured only where it is asked for: wrap the module with "
                'watch=fastddp.Watch(corruption=...): "report", "raise", or a callable.' + see("FD027")
            )
        return blame(self.engine.here.now)
