"""A kernel that is wrong, or cannot run, on the simulated device: gradients are right, and one warning names it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from fastddp.kernel_loading import proofs
from fastddp.kernel_loading.launching import load_kernels, load_sum_kernels
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
                if step == (BROKEN_FROM if fault == "launch" else 0):
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


# What is wrong or does not load is so from the beginning on; launches are refused from the third step on.
@pytest.mark.tier("slow", but_one_in=8)
@pytest.mark.timeout(700)
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
    actual = fresh_ranks.run(train, 2, DEVICE, case, kernel, fault, time_limit=300)
    for (ours, said, launches), (theirs, _, _) in zip(actual, expected, strict=True):
        case.compare(ours, theirs)
        (warning,) = said
        for part in (kernel, f"{DEVICE}:0", "Simulated, driver", "Triton 3.", reason, "fastddp doctor"):
            assert part in warning
        assert launches == 0


def all_kernels_at_once(rank: int, fault: str) -> tuple[list[str], set[str], set[str]]:
    """What the doctor finds wrong with results; kernels that were launched; those that are given up."""
    from fastddp.tools.doctor.kernel_checks import check_kernels

    device = torch.device(DEVICE, 0 if fault == "none" else 1)
    fake_cuda.reset_records()
    fake_cuda.break_kernels("fastddp_", fault)
    with stderr_of_the_process(), warnings.catch_warnings(action="ignore"):
        checks = check_kernels(device)
    fake_cuda.break_kernels("", "none")
    given_up = {name for where, name, _, _ in _C.kernels_given_up() if where == device}
    assert [name for name in given_up if name not in str([check.findings() for check in checks])] == []
    return (
        [text for check in checks for text in (*check.wrong, check.error) if text],
        set(fake_cuda.launches()),
        given_up,
    )


@pytest.mark.tier("nightly")
@pytest.mark.timeout(3000)
def test_every_kernel_is_tried_before_it_is_used(fresh_rank: RankPool) -> None:
    ((wrong, launched, given_up),) = fresh_rank.run(all_kernels_at_once, 1, "none", time_limit=1400)
    assert (wrong, given_up) == ([], set())
    ((wrong, also_launched, given_up),) = fresh_rank.run(all_kernels_at_once, 1, "program", time_limit=1400)
    assert wrong == [], "operators have done the work"
    assert given_up == also_launched | {"fastddp_write_words"}  # with which tables are sent: no launch of its own
    # The kernel that these work with was given up before they were tried.
    assert launched - given_up == {"fastddp_project_fp16_r4", "fastddp_project_bf16_r4"}


def packs_with_copied_tables(rank: int) -> tuple[list[str], list[float], int]:
    """Warnings, the wire, and copies to the device."""
    device = torch.device(DEVICE, 0)
    fake_cuda.schedule("in_order")
    fake_cuda.break_kernels("write_words", "program")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_kernels([(device, FP32, FP32)])
    kernels, wire = _C.Kernels(device), torch.zeros(2, device=device)
    gradient = torch.tensor([2.0, 4.0]).to(device)
    fake_cuda.reset_records()
    kernels.pack([gradient], [wire], 0.5)
    assert fake_cuda.launches() == ["fastddp_pack_fp32_to_fp32"]
    return [str(warning.message) for warning in caught], wire.tolist(), fake_cuda.uploads()


@pytest.mark.tier("slow")
def test_where_what_writes_tables_is_wrong_they_are_copied_and_no_other_kernel_is_blamed(fresh_rank: RankPool) -> None:
    (((warning,), wire, copies),) = fresh_rank.run(packs_with_copied_tables, 1, time_limit=300)
    assert "fastddp_write_words" in warning
    assert (wire, copies) == ([1, 2], 2)


def packs(rank: int, proof: str, device: str, fault: str = "none") -> tuple[Any, bool, list[str], list[str]]:
    """The wire after a call, and whether the host waited for it; what loading, and the call, launched; warnings."""
    here = torch.device(device)
    proofs.proof_of = lambda kernel, device: Path(proof + kernel.name)
    fake_cuda.schedule("in_order")
    fake_cuda.break_kernels("fastddp_pack_fp32_to_bf16", fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_kernels([(here, FP32, BF16)])
    tried = [name for name in fake_cuda.launches() if "_pack_" in name]
    kernels, wire = _C.Kernels(here), torch.zeros(3, dtype=BF16, device=here)
    gradient = torch.tensor([2, 4, 6], dtype=FP32).to(here)
    fake_cuda.reset_records()
    kernels.pack([gradient], [wire], 0.5)
    waited = bool(fake_cuda.host_waits())
    result = wire.tolist()
    fake_cuda.break_kernels("", "none")
    assert result == [1, 2, 3]
    return waited, bool(tried), fake_cuda.launches(), [str(warning.message) for warning in caught]


@pytest.mark.tier("slow")
def test_what_has_passed_is_remembered_and_not_tried_again(fresh_rank: RankPool, tmp_path: Path) -> None:
    ((waited, tried, launched, said),) = fresh_rank.run(packs, 1, f"{tmp_path}/", f"{DEVICE}:0")
    assert (waited, tried, launched, said) == (False, True, ["fastddp_pack_fp32_to_bf16"], [])
    proof = (tmp_path / "fastddp_pack_fp32_to_bf16").read_text()
    assert proof.startswith("fastddp_pack_fp32_to_bf16, Simulated, driver")
    # Another device of the kind is to this one what another job is: it loads the kernel anew.
    ((waited, tried, launched, said),) = fresh_rank.run(packs, 1, f"{tmp_path}/", f"{DEVICE}:1")
    assert (waited, tried, launched, said) == (False, False, ["fastddp_pack_fp32_to_bf16"], [])


@pytest.mark.tier("slow")
def test_a_pipe_is_no_proof_and_is_not_waited_for(fresh_rank: RankPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fastddp_pack_fp32_to_bf16")
    ((_, tried, launched, said),) = fresh_rank.run(packs, 1, f"{tmp_path}/", f"{DEVICE}:0")
    assert (tried, launched, said) == (True, ["fastddp_pack_fp32_to_bf16"], [])


def test_what_is_wrong_is_never_used(fresh_rank: RankPool, tmp_path: Path) -> None:
    ((_, tried, launched, said),) = fresh_rank.run(packs, 1, f"{tmp_path}/", f"{DEVICE}:0", "bit")
    assert (tried, launched) == (True, [])
    (warning,) = said
    for part in ("fastddp_pack_fp32_to_bf16", "are not those of torch's operators"):
        assert part in warning
    assert not (tmp_path / "fastddp_pack_fp32_to_bf16").exists()


@pytest.mark.tier("slow")
@on_ranks(1, pool="fresh_rank")
def test_in_a_graph_nothing_is_tried_and_a_later_load_does_it(rank: int) -> None:
    here = torch.device(DEVICE, 0)
    with torch.Stream(device=here):
        gradient, wire = torch.full((3,), 2.0, device=here), torch.zeros(3, dtype=FP16, device=here)
        kernels = _C.Kernels(here)
        with captured() as replays:
            with pytest.warns(UserWarning, match="could not be tried on .* a graph is being captured"):
                load_kernels([(here, FP32, FP16)])
            kernels.pack([gradient], [wire], 0.5)
        replays[0]()
        assert wire.tolist() == [1, 1, 1]
        assert fake_cuda.launches() == []
        load_kernels([(here, FP32, FP16)])
        fake_cuda.reset_records()
        kernels.pack([gradient], [wire], 0.5)
        assert fake_cuda.launches() == ["fastddp_pack_fp32_to_fp16"]


@pytest.mark.tier("slow")
@on_ranks(1, pool="fresh_rank")
def test_without_memory_nothing_is_tried_and_a_later_load_does_it(rank: int) -> None:
    here = torch.device(DEVICE, 0)
    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nMore.")
    with (
        mock.patch("fastddp.kernel_loading.trials.Trial.run", side_effect=no_memory),
        pytest.warns(
            UserWarning, match=r"fastddp_sum_shards_bf16 could not be tried on .*Tried to allocate 2 MiB\. Un"
        ),
    ):
        load_sum_kernels([here], BF16)
    assert _C.trust_in_kernel(here, "fastddp_sum_shards_bf16") == _C.Trust.untried
    load_sum_kernels([here], BF16)
    assert _C.trust_in_kernel(here, "fastddp_sum_shards_bf16") == _C.Trust.proven


@pytest.mark.tier("slow")
@on_ranks(1, pool="fresh_rank")
def test_a_kernel_that_writes_beside_its_sums_is_given_up(rank: int) -> None:
    here = torch.device(DEVICE, 0)
    fake_cuda.break_kernels("fastddp_measure_fp64", "after sums")
    with pytest.warns(UserWarning, match="memory beside partial sums was written"):
        load_kernels([(here, FP64, FP64)])
    fake_cuda.break_kernels("", "none")
    assert _C.trust_in_kernel(here, "fastddp_measure_fp64") == _C.Trust.given_up
    assert _C.trust_in_kernel(here, "fastddp_unpack_fp64_to_fp64") == _C.Trust.proven


def test_a_proof_holds_for_one_driver_and_for_these_cases_and_without_a_version_nothing_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel: Any = type("Kernel", (), {"cubin": b"1", "name": "fastddp_pack"})()
    monkeypatch.setattr(torch.cpu, "get_device_name", lambda device: "A device", raising=False)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))

    def proof(version: str, cases: str = "these") -> Path | None:
        monkeypatch.setattr(proofs, "driver_version", lambda: version)
        monkeypatch.setattr(proofs, "_digest_of_cases", lambda: cases)
        proofs.place_of.cache_clear()
        return proofs.proof_of(kernel, torch.device("cpu"))

    files = {proof("580.65"), proof("580.65"), proof("580.95"), proof("580.65", "others")}
    nothing = proof("")
    proofs.place_of.cache_clear()
    assert len(files) == 3
    assert {file and file.parent.parent for file in files} == {tmp_path}
    assert nothing is None
