"""Settings in the environment that silently slow a job down."""

from __future__ import annotations

from collections.abc import Mapping

from fastddp.tools.doctor.findings import Finding, remark, wrong

_OFF = ("", "0")
_NCCL = "Unset it, if nobody remembers why it is there."


def findings(environment: Mapping[str, str]) -> list[Finding]:
    """Findings on what a job would inherit.

    Args:
        environment: ``os.environ``, or a stand-in.
    """
    found = []

    def is_on(name: str) -> bool:
        return environment.get(name, "") not in _OFF

    if is_on("CUDA_LAUNCH_BLOCKING"):
        what = "CUDA_LAUNCH_BLOCKING makes the host wait for each kernel: nothing overlaps backward."
        found.append(wrong("environment", what, "Unset it."))
    for name, what in (
        ("NCCL_P2P_DISABLE", "keeps NCCL from NVLink and from PCIe between GPUs"),
        ("NCCL_SHM_DISABLE", "keeps NCCL from memory that processes share"),
        ("NCCL_IB_DISABLE", "keeps NCCL from InfiniBand and RoCE"),
    ):
        if is_on(name):
            found.append(remark("environment", f"{name}={environment[name]} {what}.", _NCCL))
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL lets ranks compare each collective before it runs."
        found.append(remark("environment", what, "Unset it when you look for no hang."))
    return found
