"""What the wrapper has beside the names of torch's class."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastddp.bucket_plan import BucketPlan
from fastddp.compression.auto import AutoSchedule
from fastddp.compression.plan import CompressionPlan
from fastddp.step_report import StepReport
from fastddp.torch_compat.surface import TorchSurface
from fastddp.watch.non_finite import NonFinite, blame
from fastddp.watch.non_finite_module import find_in_next_forward
from fastddp.watch.slow_ranks import SlowRanks
from fastddp.window.grad_norm import measured


class Additions(TorchSurface):
    """Torch's class, and these; its subclass has the constructor and the step."""

    def bucket_plan(self) -> BucketPlan:
        """Which parameters share a bucket, now: errors that speak of "bucket 3" mean number 3 of this plan.

        The plan changes once, when buckets are rebuilt at the second step's forward, unless one was given; with
        ``bucket_cap_mb="auto"`` twice more, at the fifth's and the eighth's.
        """
        setting = self.engine.now.setting
        return BucketPlan.of(setting.plan, setting.names, setting.parameters)

    def compression_plan(self) -> CompressionPlan | None:
        """What ``comm_hooks.auto_hook`` has decided about each bucket, and why. Not in torch.

        It decides once, at the ninth step's forward behind the hook's registration, and looks once whether that was
        right, seven steps later.

        Returns:
            None without that hook, or as long as it measures.
        """
        schedule = self.engine.schedule
        return schedule.plan if isinstance(schedule, AutoSchedule) else None

    def sample_steps(self, every: int, *, compare_ranks: bool = False) -> None:
        """Take the times of each ``every``-th step, for :meth:`step_report`; 0, as at first: of none. Not in torch.

        The next step is the first one.

        Args:
            every: how many steps there are from one sample to the next.
            compare_ranks: gather what each rank took without its waits, in an all-gather of 72 bytes a rank in each
                ``every``-th step, and let rank 0 write to the logger "fastddp" who is slow
                (:mod:`fastddp.rank_times`). Then this is to be called with the same on every rank, between the same
                two steps. One rank has nothing to compare.

        Raises:
            ValueError: ``every`` is no integer >= 0.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"sample_steps(every={every!r}): every is a number of steps, or 0 for none.")
        next_window = self.reducer.windows() + (self.reducer.state not in ("idle", "finished"))
        self.logger.others_sample = True
        self.reducer.sample_every(every, next_window)
        self.engine.slow_ranks = None
        if compare_ranks and every > 0 and self.process_group.size() > 1:
            self.engine.slow_ranks = SlowRanks(every, next_window, self.process_group, self.device)

    def step_report(self) -> StepReport | None:
        """Where the time of the last sampled step went. On a device with streams the host waits for that step's end.

        A step begins with the first forward that may be followed by a backward: one whose backward never comes counts
        into the step after it. Of several backwards over one forward it has the first.

        Returns:
            None as long as there is none: :meth:`sample_steps` asks for them, a step is complete when the next one
            begins, and one that began before buckets were rebuilt does not count.
        """
        sampled = self.reducer.sampled() if self.logger.others_sample else None
        if sampled is None:
            return None
        slow_ranks, setting = self.engine.slow_ranks, self.engine.now.setting
        history = None if slow_ranks is None else slow_ranks.history
        return StepReport.of(sampled.times(), setting.bucket_ends, history, self.process_group.rank())

    def audit(self, optimizer: Optimizer | None = None, *, buffers: Iterable[str] = ()) -> None:
        """Let the audit (``Watch(audit_every=...)``) compare more than parameters, from the next step on. Not in torch.

        To be called with the same on every rank, in the same step. What is not a plain tensor with strides (numbers,
        sparse tensors, tensor subclasses) is not compared.

        Args:
            optimizer: its state of this model's parameters, where all ranks have the same.
            buffers: names of buffers that are the same on every rank when a forward begins. Those of a BatchNorm are
                not, unless rank 0's were broadcast after the last one.

        Raises:
            RuntimeError: the model was made without an audit.
            TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
            ValueError: it is a ``ZeroRedundancyOptimizer``, which has a part of the state on each rank, or has none of
                the model's parameters; or there is no buffer of that name.
        """
        audit = self.engine.audit
        if audit is None:
            raise RuntimeError(
                "audit() adds to what an audit compares: wrap the module with watch=fastddp.Watch(audit_every=N)."
            )
        if optimizer is not None:
            audit.tensors.add_optimizer(optimizer)
        audit.tensors.add_buffers(self.module, buffers)
        audit.plan_again()

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write what ``bucket_cap_mb="auto"`` has measured to a file, for ``fastddp plan``; the same on all ranks.

        Raises:
            RuntimeError: nothing has been measured, or not yet.
        """
        planner = self.engine.planner
        if planner is None or planner.profile is None:
            raise RuntimeError(
                'There is no profile. One is made with bucket_cap_mb="auto", at the fifth step\'s forward.'
            )
        planner.profile.save(path)

    def last_grad_norm(self) -> Tensor:
        """The 2-norm of all synchronised gradients, as the last backward left them, without a wait for the device.

        Where unpack has written the gradients it was computed on the way; else one pass over the buckets computes it
        now, so call it before the gradients are changed.

        Returns:
            A 0-dimensional tensor on the device of the first bucket, fp32 (fp64 if a parameter is);
            :func:`torch.nn.utils.get_total_norm` of the gradients, to rounding.

        Raises:
            RuntimeError: no synchronisation has ended since the last forward; call it before the next one.
        """
        parameters = self._recipe.parameters.tensors
        is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
        return measured(self.reducer)[0].sqrt().to(torch.float64 if is_double else torch.float32)

    def found_inf(self) -> Tensor:
        """Whether a synchronised gradient holds an infinity or NaN: 1.0 or 0.0, like ``GradScaler``'s tensor.

        Who asks skips the step where it is 1.0: then this is :meth:`discard_step` too.

        Returns and raises as :meth:`last_grad_norm`; fp32.
        """
        found = (measured(self.reducer)[1] > 0).to(torch.float32)
        self.reducer.discard_step(only_if=found)
        return found

    def discard_step(self) -> None:
        """Say that no optimizer steps with the gradients that there are, since they are too large, say.

        What compression has left out of them is forgotten: it would go into the next step. Call it on all ranks, after
        backward; gradients stay as they are. A step that a ``GradScaler`` skips is noticed without it.

        Raises:
            RuntimeError: gradients travel just now.
        """
        self.reducer.discard_step()

    def find_non_finite_module(self) -> None:
        """Look, in the next forward of this rank, for the first module whose output is not finite.

        What is found goes where ``Watch.corruption`` says, else to the logger "fastddp": the module's name, the rank,
        and the least and the greatest number of its input. That forward waits for the device behind each module.
        """
        find_in_next_forward(self, self.engine.now, self._recipe.watch.corruption)

    def blame_non_finite(self) -> NonFinite | None:
        """Who brought what is not finite in the gradients of the last backward: rank, parameter, how many elements.

        All ranks that average with each other have to call this, since it makes one small all-gather; the host waits
        for the device. It may be asked behind a replay of a captured graph, too. A wrapper with
        ``Watch(corruption=...)`` asks by itself where a rank had such gradients: at the next optimizer step or the next
        forward.

        Returns:
            None where all gradients are finite; the same on all ranks that share gradients. Under ``noop_hook`` each
            rank keeps its own, and all ranks are asked.

        Raises:
            RuntimeError: the wrapper has no ``Watch(corruption=...)``, so that nothing was measured; or no
                synchronisation has ended since the last forward.
        """
        if self._recipe.watch.corruption is None:
            raise RuntimeError(
                "What each rank's gradients were is measured only where it is asked for: wrap the module with "
                'watch=fastddp.Watch(corruption=...): "report", "raise", or a callable.'
            )
        return blame(self.engine.now)
