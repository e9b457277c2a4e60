"""A kernel that is wrong, or cannot run, on the simulated device: gradients are right, and one warning names it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from fastddp.exchange import proofs
from fastddp.exchange.launching import load_kernels
from on_device import DEVICE, Case, batch, captured
from on_ranks import on_ranks
from ranks import RankPool
from waiting import stderr_of_the_process

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STEPS, BROKEN_FROM = 5, 2


def prepare() -> None:
    fake_cuda.install()
    proofs.proof_of = lambda kernel, device: None


def fresh_pool(simulated_device: None) -> Iterator[RankPool]:
    """Ranks in which no kernel has passed."""
    pool = RankPool(prepare=prepare, backend=DEVICE)
    yield pool
    pool.stop()


fresh_rank = pytest.fixture(fresh_pool)
fresh_ranks = pytest.fixture(fresh_pool, scope="module")  # what is given up stays so: each test has kernels of its own


def train(rank: int, device: str, case: Case, broken: str = "", fault: str = "") -> tuple[list[Tensor], list[str], int]:
    """Gradients of each step; what is said of kernels; how often the broken one was launched in the last step."""
    model: Any = None
    found: list[Tensor] = []
    # Python's warnings, and stderr, where C++ writes what backward's end has to say.
    with stderr_of_the_process() as stderr, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if device == DEVICE:
                fake_cuda.schedule("random", step)
                if (fault == "load" and step == 0) or (fault and step == BROKEN_FROM):
                    fake_cuda.break_kernels(broken, fault)
            model = model or case.wrapped(rank, device)
            model.zero_grad()
            case.backward(model, batch(rank, step).to(device))
            found += [gradient.cpu() for gradient in case.gradients(model)]
        texts = [*(str(warning.message) for warning in caught), *stderr().splitlines()]
    launches = 0
    if device == DEVICE:
        fake_cuda.break_kernels("", "none")
        launches = sum(broken in name for name in fake_cuda.launches())
    return found, [text for text in texts if "is not used any more" in text], launches


LAUNCH, LOAD = "launching a kernel failed with CUDA error 701", "loading a kernel failed with CUDA error 200"


# Kernels break in the third step, in which PowerSGD's run for the first time; what does not load does not from the
# beginning on.
@pytest.mark.parametrize(
    ("case", "kernel", "fault", "reason"),
    [
        (Case(), "fastddp_pack_fp32_to_fp32", "launch", LAUNCH),
        (Case(dtype=FP64), "fastddp_pack_fp64_to_fp64", "load", LOAD),
        (Case("fp16, sums in fp32"), "fastddp_unpack_fp16_to_fp32", "launch", LAUNCH),
        (Case("int8"), "fastddp_block8_add_int8", "launch", LAUNCH),
        (Case("int8", BF16), "fastddp_block8_encode_bf16_int8", "load", LOAD),
        (Case("e4m3, drawn"), "fastddp_block8_decode_fp32_e4m3", "launch", LAUNCH),
        (Case("PowerSGD", tolerance=1e-4), "fastddp_compress_fp32_r2", "program", "are not those of torch's operators"),
        (Case("PowerSGD", BF16, tolerance=2e-2), "fastddp_reconstruct_bf16_r2", "launch", LAUNCH),
    ],
    ids=str,
)
def test_training_goes_on_by_operators(
    ranks: RankPool, fresh_ranks: RankPool, case: Case, kernel: str, fault: str, reason: str
) -> None:
    expected = ranks.run(train, 2, "cpu", case)
    actual = fresh_ranks.run(train, 2, DEVICE, case, kernel, fault)
    for (ours, said, launches), (theirs, _, _) in zip(actual, expected, strict=True):
        case.compare(ours, theirs)
        (warning,) = said
        for part in (kernel, f"{DEVICE}:0", "Simulated, driver", "Triton 3.", reason, "fastddp doctor"):
            assert part in warning
        assert launches == 0


def all_kernels_at_once(rank: int, fault: str) -> tuple[list[str], set[str], set[str]]:
    """What the doctor finds wrong with results; kernels that were launched; those that are given up."""
    from fastddp.tools.doctor.kernel_checks import check_kernels, findings

    device = torch.device(DEVICE, 0 if fault == "none" else 1)
    fake_cuda.reset_records()
    fake_cuda.break_kernels("fastddp_", fault)
    with stderr_of_the_process(), warnings.catch_warnings(action="ignore"):
        checks = check_kernels(device)
        wrong = [text for check in checks for text in (*check.wrong, check.error) if text]
        wrong += wrong_measures(device)
    fake_cuda.break_kernels("", "none")
    given_up = {name for where, name, _, _ in _C.kernels_given_up() if where == device}
    assert [name for name in given_up if "measur" not in name and name not in str(findings(checks))] == []
    return wrong, set(fake_cuda.launches()), given_up


def wrong_measures(device: torch.device) -> list[str]:
    """Of kernels that the doctor does not run."""
    load_kernels([(device, FP32, FP16)], measuring_gradients=True)
    kernels, wire = _C.Kernels(device), torch.zeros(5000, dtype=FP16, device=device)
    gradients = [torch.full((5000,), 2.0, device=device)]
    measured = {
        "pack_measuring": kernels.pack_measuring(gradients, [wire], 0.5),
        "measure_gradients": kernels.measure_gradients(gradients),
        "measure": [tuple(kernels.measure(wire).mul(4).tolist())],
    }
    return [name for name, found in measured.items() if found != [(20_000.0, 0)]]


@pytest.mark.tier("slow")
def test_every_kernel_is_compared_in_its_first_call(fresh_rank: RankPool) -> None:
    ((wrong, launched, given_up),) = fresh_rank.run(all_kernels_at_once, 1, "none")
    assert (wrong, given_up) == ([], set())
    ((wrong, also_launched, given_up),) = fresh_rank.run(all_kernels_at_once, 1, "program")
    assert wrong == [], "what operators have written does not stand"
    assert given_up == also_launched
    # Theirs is a second kernel, which has been given up with the first that it follows.
    assert launched - given_up == {"fastddp_project_fp16_r4", "fastddp_project_bf16_r4"}


def packs(rank: int, proof: str, device: str, gradients: list[list[float]], fault: str) -> tuple[list[Any], Any]:
    """The wire after each call, and whether the host waited for it; what is given up."""
    here = torch.device(device)
    proofs.proof_of = lambda kernel, device: Path(proof)
    fake_cuda.break_kernels("fastddp_pack_fp32_to_bf16", fault)
    load_kernels([(here, FP32, BF16)])
    kernels, wire, found = _C.Kernels(here), torch.zeros(3, dtype=BF16, device=here), []
    for values in gradients:
        gradient = torch.tensor(values, dtype=FP32).to(here)
        fake_cuda.reset_records()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernels.pack([gradient], [wire], 0.5)
        waited = bool(fake_cuda.host_waits())
        found.append((wire.tolist(), waited))
    fake_cuda.break_kernels("", "none")
    return found, [(str(where), reason) for where, _, _, reason in _C.kernels_given_up()]


@pytest.mark.tier("slow")
def test_what_has_passed_is_remembered_and_asks_nothing_again(fresh_rank: RankPool, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    ((found, given_up),) = fresh_rank.run(packs, 1, str(proof), f"{DEVICE}:0", [[2, 4, 6], [2, 4, 8]], "none")
    assert found == [([1, 2, 3], True), ([1, 2, 4], False)]
    assert proof.read_text().startswith("fastddp_pack_fp32_to_bf16, Simulated, driver")
    # Another device of the kind is to this one what another job is: it loads the kernel anew.
    ((found, given_up),) = fresh_rank.run(packs, 1, str(proof), f"{DEVICE}:1", [[2, 4, 6]], "none")
    assert (found, given_up) == ([([1, 2, 3], False)], [])


@pytest.mark.tier("slow")
def test_what_is_zero_or_not_finite_proves_nothing(fresh_rank: RankPool, tmp_path: Path) -> None:
    gradients = [[0, 0, 0], [1, float("nan"), 1], [2, 4, 6], [4, 4, 4]]
    ((found, given_up),) = fresh_rank.run(packs, 1, str(tmp_path / "proof"), f"{DEVICE}:0", gradients, "bit")
    assert [waited for _, waited in found] == [True, True, True, False]
    assert [wire for wire, _ in (found[0], *found[2:])] == [[0, 0, 0], [1, 2, 3], [2, 2, 2]]
    ((where, reason),) = given_up
    assert where == f"{DEVICE}:0"
    assert "1 of 3 numbers are not those of torch's operators, the first is 1.0078" in reason
    assert not (tmp_path / "proof").exists()


@pytest.mark.tier("slow")
@on_ranks(1, pool="fresh_rank")
def test_a_graph_has_operators_in_place_of_a_kernel_that_nobody_has_tried(rank: int) -> None:
    here = torch.device(DEVICE, 0)
    fake_cuda.break_kernels("fastddp_pack_fp32_to_fp16", "bit")
    load_kernels([(here, FP32, FP16)])
    with torch.Stream(device=here):
        gradient, wire = torch.full((3,), 2.0, device=here), torch.zeros(3, dtype=FP16, device=here)
        with captured() as replays:
            _C.Kernels(here).pack([gradient], [wire], 0.5)
        replays[0]()
        assert wire.tolist() == [1, 1, 1]
    assert fake_cuda.launches() == []


def test_without_a_version_of_the_driver_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel: Any = type("Kernel", (), {"cubin": b"1", "name": "fastddp_pack"})()
    here = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_device_name", lambda device: "A device", raising=False)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    files = []
    for version in ("580.65", "580.95", ""):
        monkeypatch.setattr(proofs, "driver_version", lambda version=version: version)
        proofs.place_of.cache_clear()
        files.append(proofs.proof_of(kernel, here))
    proofs.place_of.cache_clear()
    assert files[0] is not None
    assert files[0].parent.parent == tmp_path
    assert files[0] != files[1]
    assert files[2] is None
