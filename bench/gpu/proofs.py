"""Every kernel, on all of its paths, against torch's operators, with nothing remembered of earlier proofs."""

from __future__ import annotations

from unittest import mock

from bench.gpu.results import Run
from fastddp.kernel_loading import proofs
from fastddp.tools.doctor import kernel_checks


def measure(run: Run) -> None:
    """Adds a row for each family of kernels; quick: for the smallest."""
    with mock.patch.object(proofs, "proof_of", return_value=None):
        if run.quick:
            checks = [kernel_checks._check(run.device, "sums of 16 bits", kernel_checks._sums)]
        else:
            checks = kernel_checks.check_kernels(run.device)
    for check in checks:
        said = [finding.what for finding in check.findings()]
        right = check.made_of == "Triton" and not said
        run.results.add(
            "proof",
            what=check.kernels,
            made_of=check.made_of,
            given_up=len(check.given_up),
            error="; ".join(said) or None,
            result="right" if right else "WRONG",
        )
