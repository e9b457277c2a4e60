"""What `bench.gpu` does without a GPU: its arithmetic, its models, its rows, and how it ends."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fastddp
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import block8, harness, low_rank
from bench.cases import gpt2_shapes, resnet50_shapes
from bench.gpu import __main__ as main
from bench.gpu import alone, digest, gradients, kernels, machine, models, networks, results, step, wire
from bench.gpu.contestants import GpuStep, Mode, hook_modes, modes, wire_modes

sys.path.pop()

CPU = torch.device("cpu")
INSTALLED = str(Path(fastddp.__file__).parents[1])


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    command = [sys.executable, "-m", "bench.gpu", "--json", "not/written.json"]
    # The fastddp that is installed, which need not be the one in the folder.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([INSTALLED, str(harness.ROOT)])}
    ended = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stderr) == (main.NO_GPU, "")
    assert ended.stdout == "bench.gpu measures a GPU, and torch sees none on this machine.\n"


# ------------------------------------------------------------------------------------------------------- the network


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(networks).failed == 0


def test_an_allreduce_moves_every_byte_almost_twice() -> None:
    network = networks.Network("", gb_per_s=1, start_us=0, hop_us=0)
    assert network.all_reduce(2).milliseconds(10**6) == pytest.approx(1.0)
    assert network.all_reduce(1024).milliseconds(10**6) == pytest.approx(2 * 1023 / 1024)
    assert network.broadcast(1024).milliseconds(10**6) == pytest.approx(1.0)


def test_the_instant_network_takes_no_time() -> None:
    assert networks.INSTANT.all_reduce(8) == networks.INSTANT.broadcast(8) == networks.Cost(0, 0)


def test_configurations_begin_with_the_instant_network_and_divide_exactly() -> None:
    assert networks.CONFIGURATIONS[0][0] is networks.INSTANT
    assert all(math.log2(ranks).is_integer() for _, ranks in networks.CONFIGURATIONS)


def test_what_the_wire_costs_a_step() -> None:
    fast, slow = Mode("plain", "plain"), Mode("fastddp", "fastddp")
    samples = {"plain": step.StepSamples(device_ms=[10.0, 12.0]), "fastddp": step.StepSamples(device_ms=[15.0, 17.0])}
    columns = wire.wire_columns(slow, samples, {"fastddp": 1.0}, (3, 100, 16.0))
    assert (columns["added_ms"], columns["exposed_ms"], columns["hidden_fraction"]) == (5.0, 4.0, 0.75)
    assert wire.wire_columns(fast, samples, {}, (0, 0, 0.0))["exposed_ms"] is None


# -------------------------------------------------------------------------------------------- models and contestants


def test_gpt2_has_the_parameters_of_gpt2() -> None:
    with torch.device("meta"):
        model = models.Gpt2()
    # torch's linear weights are transposed, and the order differs within a block.
    assert sorted(sorted(p.shape) for p in model.parameters()) == sorted(sorted(shape) for shape in gpt2_shapes())


def test_resnet50_has_the_parameters_of_resnet50_in_their_order() -> None:
    with torch.device("meta"):
        model = models.ResNet50()
    assert [tuple(parameter.shape) for parameter in model.parameters()] == resnet50_shapes()


def test_a_case_trains_with_its_batch_made_before() -> None:
    case = models.resnet50(samples=2, size=32)
    model, batch_of = case.build(CPU)
    assert batch_of(0, 1) is batch_of(0, 4)
    assert not torch.equal(batch_of(0, 1)[0], batch_of(0, 2)[0])
    model(*batch_of(0, 0)).backward()
    convolution = next(p for p in model.parameters() if p.dim() == 4)
    assert convolution.grad.is_contiguous(memory_format=torch.channels_last)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_modes_have_a_plain_model_to_be_compared_with() -> None:
    names = {mode.name for mode in modes()}
    assert {mode.plain for mode in modes()} <= names
    assert {mode.name for mode in wire_modes()} <= names
    assert wire_modes()[0].name == "plain"


def test_a_mode_whose_option_torch_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class OlderDDP(nn.Module):
        def __init__(self, module: nn.Module, gradient_as_bucket_view: bool, static_graph: bool) -> None:
            super().__init__()

    monkeypatch.setattr("bench.contestants.TorchDDP", OlderDDP)
    names = {mode.name for mode in modes()}
    assert {"torch-view", "torch-static", "fastddp"} <= names
    assert not {"torch-batched", "torch-view-batched"} & names


def test_zeroed_gradients_keep_their_memory() -> None:
    for zeroed in (False, True):
        own = GpuStep(_Doubled(), zeroed)
        own.run((torch.ones(3),))
        (before,) = own.gradients()
        own.run((torch.ones(3),))
        assert torch.equal(own.gradients()[0], torch.full((3,), 2.0))
        assert (own.gradients()[0] is before) == zeroed


class _Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * (self.weight * values).sum()


# ---------------------------------------------------------------------------------------------------------- verdicts


def test_gradients_are_compared_by_the_spread_of_the_reference() -> None:
    own, batch = GpuStep(_Doubled(), zeroed=False), (torch.ones(3),)
    expected = gradients.Expected.of(own, batch)
    assert expected.spread == 0
    assert expected.verdict(own, batch) == ("equal", 0.0)
    assert expected.verdict(own, (torch.tensor([1.0, 1.0, 1.5]),)) == ("WRONG", 0.5)
    loose = gradients.Expected(expected.gradients, spread=0.2)
    assert loose.verdict(own, (torch.tensor([1.0, 1.0, 1.5]),))[0] == "within the spread"
    assert gradients.largest_difference([torch.tensor([math.nan])], [torch.ones(1)]) == math.inf
    assert gradients.largest_difference([], [torch.ones(1)]) == math.inf


@pytest.mark.parametrize(("gradient", "wire_dtype"), kernels.DTYPES, ids=str)
def test_all_ways_to_pack_and_unpack_agree(gradient: torch.dtype, wire_dtype: torch.dtype) -> None:
    entries = kernels.make_entries(0.05, gradient, wire_dtype, CPU)
    assert kernels.wrong_entries(entries) == set()


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("operation", low_rank.OPERATIONS)
@pytest.mark.parametrize("dtype", low_rank.DTYPES, ids=str)
def test_all_ways_to_compute_powersgds_steps_agree(operation: str, dtype: torch.dtype) -> None:
    assert low_rank.wrong_contestants(operation, 4, dtype, CPU) == set()


@pytest.mark.tier("nightly")
def test_a_step_of_powersgd_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "torch_call", lambda operation, matrices: None)
    for operation in low_rank.OPERATIONS:
        assert low_rank.wrong_contestants(operation, 4, torch.float32, CPU) == {"torch"}


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("operation", block8.OPERATIONS)
@pytest.mark.parametrize("number", block8.NUMBERS)
@pytest.mark.parametrize("dtype", block8.DTYPES, ids=str)
def test_all_ways_to_compute_block8_agree(operation: str, number: str, dtype: torch.dtype) -> None:
    assert block8.wrong_contestants(operation, number, dtype, CPU) == set()


@pytest.mark.parametrize("operation", block8.OPERATIONS)
def test_a_step_of_block8_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr(block8, "call", lambda kernels, operation, coded: None)
    assert block8.wrong_contestants(operation, "int8", torch.float32, CPU) == {"fastddp", "operators"}


def test_what_block8_moves_at_the_least() -> None:
    coded = block8.Coded.make(1.0, "int8", torch.float32, CPU)
    bytes_an_element = {operation: coded.payload_bytes(operation) / coded.elements for operation in block8.OPERATIONS}
    # 128 numbers and their scale, in each wire; a little more, since each gradient begins a block.
    scales = 132 / 128
    floor = {"encode": 16 + scales, "add": 8 + 9 * scales, "decode": 4 + scales}
    assert bytes_an_element == pytest.approx(floor, rel=5e-3)


def test_every_hook_is_beside_torchs() -> None:
    names = [mode.name for mode in hook_modes()]
    ours = {f"fastddp+{hook}" for hook in ("fp16", "bf16", "int8", "fp8", "powersgd1", "powersgd4")}
    assert {"plain", "torch", "fastddp", "torch+fp16", *ours} <= set(names)
    assert not {"torch+int8", "torch+fp8"} & set(names)
    assert ("torch+bf16" in names) == torch.distributed.is_nccl_available()


def test_an_unpack_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unpack_foreach_copy", lambda bucket: None)
    entries = kernels.make_entries(0.05, torch.float32, torch.float32, CPU)
    assert kernels.wrong_entries(entries) == {("unpack", "_foreach_copy_")}


# ------------------------------------------------------------------------------------------------- rows and profiles


def test_a_trace_is_counted_by_kind() -> None:
    events = [{"cat": "kernel"}] * 6 + [{"cat": "gpu_memcpy"}] * 3 + [{"cat": "cuda_runtime"}] * 9 + [{}]
    counts = alone.count_work(json.dumps({"traceEvents": events}), steps=3)
    assert counts == {"launches": 2.0, "memcpys": 1.0, "memsets": 0.0}
    assert alone.count_work('{"traceEvents": []}', 3) == {"launches": None, "memcpys": None, "memsets": None}


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results.Results(path, "ceilings").add("ceiling", what="copy", median=1 / 3)
    results.Results(path, "step").add("step", result="WRONG", largest_difference=math.inf)
    again = results.Results(path, "ceilings")  # this section's rows are measured anew, the others stay
    again.add("ceiling", what="matmul", median=2e-7 / 3)
    rows = results.read(path)
    assert [row["section"] for row in rows] == ["step", "ceilings"]
    assert rows[0]["largest_difference"] is None
    assert rows[1]["median"] == 6.66667e-8
    assert results.wrong(rows) == rows[:1]
    assert list(tmp_path.iterdir()) == [path]


def test_time_that_a_section_leaves_goes_to_those_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(main.time, "monotonic", lambda: now[0])
    shares = {}
    for section, seconds in main.time_shares(end=100.0):
        shares[section] = seconds
        now[0] += 1.0
    assert list(shares) == list(main.SECTIONS)
    assert shares["ceilings"] == pytest.approx(5)
    assert shares["wire"] == pytest.approx(92)


def test_the_last_section_ends_soon_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.time, "monotonic", lambda: 1000.0)
    assert main.limit(end=1300.0, share=60.0) == 105.0  # a section may take longer than its share
    assert main.limit(end=1060.0, share=60.0) == 75.0  # the last one hardly


def test_a_row_is_printed_when_it_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    results.Results(None, "kernels").add("kernel", direction="pack", gradient_mib=25.0, median_us=17.5, rounds=40)
    assert capsys.readouterr().out == "[kernels] kernel: direction=pack gradient_mib=25.0 median_us=17.5\n"


def test_nvml_is_read_without_what_the_driver_does_not_give() -> None:
    class NVMLError(Exception):
        pass

    def refuse(handle: object) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlClocksEventReasonSwPowerCap=4,
        nvmlClocksThrottleReasonAll=2047,
        nvmlSystemGetDriverVersion=lambda: "1.2",
        nvmlDeviceGetName=lambda handle: "GPU",
        nvmlDeviceGetClockInfo=lambda handle, clock: 1000 * clock,
        nvmlDeviceGetMaxClockInfo=lambda handle, clock: 1500 * clock,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4 + 64,
        nvmlDeviceGetPowerUsage=lambda handle: 123456,
        nvmlDeviceGetTemperature=lambda handle, sensor: 40,
        nvmlDeviceGetEccMode=refuse,
    )
    state = machine.read_nvml(nvml, "handle")
    assert state["throttle_reasons"] == ["SwPowerCap", "bit 6"]
    assert (state["sm_mhz"], state["memory_max_mhz"], state["power_w"], state["ecc"]) == (1000, 3000, 123.456, None)


def test_the_digest_names_what_is_wrong_and_what_is_missing() -> None:
    added = {"case": "gpt2", "median_ms": 10.0}
    of_block8 = {"operation": "encode", "number": "int8", "gradient_dtype": "float32"}
    of_block8 |= {"fraction_of_copy": 0.8, "fraction_of_ceiling": 0.75}
    used = {"used_before_mib": 400.0, "used_after_wrap_mib": None, "used_after_step_mib": 912.0}
    of_shards = {"wire_dtype": "bfloat16", "world_size": 8}
    rows = [
        {"section": "ceilings", "kind": "state", "when": "after"},
        {"section": "step", "kind": "step", "contestant": "plain", "added_ms": 0.0, **added},
        {"section": "step", "kind": "step", "contestant": "fastddp", "added_ms": 0.5, "result": "WRONG", **added},
        {"section": "wire", "kind": "skipped", "what": "resnet50"},
        {"section": "wire", "kind": "kernel given up", "kernel": "pack", "reason": "it is wrong", "result": "WRONG"},
        {"section": "facts", "kind": "facts", "supports_tensor_alloc": True, "model_mib": 8.0, **used},
        {"section": "sum_shards", "kind": "shards kernel", "contestant": "fastddp", "median_us": 9.0, **of_shards},
        *(
            {"section": "block8", "kind": "block8 kernel", "contestant": name, "median_us": us, **of_block8}
            for name, us in (("copy_", 40.0), ("fastddp", 50.0))
        ),
    ]
    assert digest.lines(rows) == [
        (
            "supports_tensor_alloc: True; MiB used before 400, after the first wrap not known, after its first step "
            "912; model 8"
        ),
        "given up: pack: it is wrong",
        "block8 encode int8 float32: copy_ 40.0 us, fastddp 50.0 us; 80 % of copy_, 75 % of the ceiling",
        "sum of 8 shards of bfloat16: fastddp 9.0 us",
        "gpt2: plain step 10.00 ms; added by fastddp +0.50",
        "not measured: resnet50",
        "WRONG: step, gpt2, fastddp",
        "WRONG: wire, pack",
    ]
