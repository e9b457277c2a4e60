"""What a rank runs: a small training, in whose sixth step the culprit does what its fault says."""

from __future__ import annotations

import functools
import json
import multiprocessing
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fastddp
from bench.faults.entries import FOR_EVER, Place, fault_named
from bench.faults.network import Machine
from fastddp import comm_hooks

LIMIT = 120.0  # seconds of a run, which guards against a launcher that waits for ever
FAULT_STEP = 5  # buckets have been rebuilt, PowerSGD has begun
WIDTH, SMALLER = 64, 48
BUCKET_MB = 0.015  # a layer each


@dataclass(frozen=True)
class Setting:
    """What a process is told; it travels as JSON."""

    fault: str
    rank: int
    ranks: int
    exchange: str
    implementation: str  # "fastddp" or "torch"
    patience: float
    folder: str
    port: int  # of the store
    store_pid: int  # of a process that serves nothing but the store; 0: there is none
    machine: Machine | None = None  # where it runs; None: where the launcher does

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Setting:
        """From JSON."""
        machine = fields.pop("machine")
        if machine is not None:
            machine = Machine(machine["side"], (*machine["namespaces"],), (*machine["addresses"],), machine["store"])
        return cls(**fields, machine=machine)


class Run:
    """The training of one rank, as faults see it."""

    step_seconds = 0.02

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rank, self.patience = setting, setting.rank, setting.patience
        self.fault = fault_named(setting.fault)
        culprits = [culprit % setting.ranks for culprit in self.fault.culprits]
        self.is_culprit = setting.rank in culprits or not culprits
        self.step = -1
        self.branch = self.skips = False
        self.batches = Batches()

    def train(self) -> None:
        """Until the fault has shown, or steps are over."""
        torch.manual_seed(0)
        self.module = Net(self, WIDTH)
        self.at("construction")
        self.model = self._wrap(self.module)
        self.wrappers = [self.model]
        if self.fault.several:
            self.wrappers.append(self._wrap(Net(self, SMALLER)))
        optimizer: torch.optim.Optimizer = (
            fastddp.ShardedOptimizer(self.model, functools.partial(Optimizer, self))
            if self.fault.sharded and isinstance(self.model, fastddp.DistributedDataParallel)
            else Optimizer(self, [p for model in self.wrappers for p in model.parameters()])
        )
        batches = iter(DataLoader(self.batches, batch_size=None, num_workers=1)) if self.fault.loader else None
        # What must not be reported lasts for three times the patience.
        steps = int(3 * self.patience / (10 * self.step_seconds)) if self.fault.is_harmless else 1_000_000
        steps = self.fault.steps or steps
        for self.step in range(steps):
            time.sleep(self.step_seconds)
            self.at("batch")
            if batches is not None:
                next(batches)
            self.at("step")
            optimizer.zero_grad()
            for model in self.wrappers:
                loss = model(self.inputs(model)).square().mean()
                self.at("loss")
                if not self.skips:
                    loss.backward()
            self.at("after backward")
            if not self.skips:
                optimizer.step()
            self.skips = False
        self.at("end")
        dist.barrier()

    @property
    def machine(self) -> Machine:
        """Where it runs, of faults of the network."""
        assert self.setting.machine is not None
        return self.setting.machine

    def inputs(self, model: nn.Module | None = None) -> Tensor:
        """Of one step."""
        width = SMALLER if model is not None and model is not self.model else WIDTH
        return torch.randn(4, width)

    def at(self, place: Place) -> None:
        """The training has come to a place: the culprit does its deed there, once or in every step."""
        fault = self.fault
        comes = place == "construction" or self.step == FAULT_STEP or (fault.repeats and self.step >= 0)
        if self.is_culprit and place == "end" and fault.at_end:
            fault.at_end(self)
        if not (self.is_culprit and fault.at == place and comes):
            return
        marker = Path(self.setting.folder, f"deed.{self.rank}")
        if not marker.exists():
            marker.write_text(str(time.monotonic()))
        fault.act(self)

    def _wrap(self, module: nn.Module) -> nn.Module:
        exchange, is_fastddp = self.setting.exchange, self.setting.implementation == "fastddp"
        options: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "find_unused_parameters": exchange == "find-unused"}
        if is_fastddp:
            options["watch"] = fastddp.Watch(stall=self._note, patience=self.patience)
        elif exchange == "powersgd":
            options["bucket_cap_mb"] = 25  # torch's waits for ever on gloo with several buckets
        kind = fastddp.DistributedDataParallel if is_fastddp else nn.parallel.DistributedDataParallel
        model = kind(module, **options)
        if exchange == "fp16":
            model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
        elif exchange == "powersgd":
            state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, comm_hooks.powerSGD_hook)
        elif exchange == "python-hook":
            model.register_comm_hook(self, _python_hook)
        return model

    def _note(self, report: Any) -> None:
        """A line a report, beside what is printed."""
        line = {"at": time.monotonic(), "report": json.loads(report.to_json())}
        with Path(self.setting.folder, f"reports.{self.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _python_hook(run: Run, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    if bucket.index() == 1:
        run.at("hook")
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(run.setting.ranks))


# Torch's DDP compares them with the types themselves, and here they are text.
_python_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


class Net(nn.Module):
    """Four layers; the culprit may leave out the second one."""

    def __init__(self, run: Run, width: int) -> None:
        super().__init__()
        self._run = run
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        if run.fault.buffers:
            self.register_buffer("seen", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        """A rank's step, where some faults happen."""
        self._run.at("forward")
        for number, layer in enumerate(self.layers):
            if number == 1 and self._run.branch:
                continue
            assert isinstance(layer, nn.Linear)
            inputs = layer(inputs.to(layer.weight.dtype)).to(torch.float32)
            if number == 1:
                inputs = _Backward.apply(inputs, self._run)
        return inputs


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, run: Run) -> Tensor:
        context.run = run
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.run.at("backward")
        return gradient, None


class Optimizer(torch.optim.SGD):
    """SGD in whose step the culprit may do its deed."""

    def __init__(self, run: Run, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3)
        self._run = run

    def step(self, closure: Any = None) -> Any:
        """One step."""
        self._run.at("optimizer")
        return super().step(closure)


class Batches(Dataset):
    """Batches without end, whose worker sleeps as soon as `stuck` is set."""

    def __init__(self) -> None:
        self.stuck = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if self.stuck.value:
            time.sleep(FOR_EVER)
        return index


def run_rank(setting: Setting) -> None:
    """Join the others, and train."""
    torch.set_num_threads(1)
    port = setting.port
    serves = port == 0 and setting.rank == 0
    if not serves:
        port = port or port_told(setting.folder)
    host = "127.0.0.1" if setting.machine is None else setting.machine.store
    store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)
    if serves:
        _tell_port(setting.folder, store.port)
    dist.init_process_group(
        "gloo", store=store, rank=setting.rank, world_size=setting.ranks, timeout=timedelta(seconds=120)
    )
    Run(setting).train()
    dist.destroy_process_group()


def serve_store(setting: Setting) -> None:
    """A store, and nothing else, for as long as the process lives."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _tell_port(setting.folder, store.port)
    time.sleep(FOR_EVER)


def _tell_port(folder: str, port: int) -> None:
    written = Path(folder, "port.new")
    written.write_text(str(port))
    written.rename(written.with_suffix(""))


def port_told(folder: str) -> int:
    """The store's, as soon as whoever serves it has told."""
    until = time.monotonic() + LIMIT
    while not Path(folder, "port").exists():
        if time.monotonic() > until:
            raise TimeoutError("no process serves the store")
        time.sleep(0.01)
    return int(Path(folder, "port").read_text())
