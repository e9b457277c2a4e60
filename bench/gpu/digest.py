"""The few lines that say how it went; they come last, where a log that is cut off still has them."""

from __future__ import annotations

from collections.abc import Sequence

from bench import harness
from bench.gpu.contestants import REFERENCE
from bench.gpu.kernels import FASTDDP, by_bucket


def lines(rows: Sequence[harness.Row]) -> list[str]:
    """A summary of all sections' rows."""
    return [
        *(_state(row) for row in rows if row["kind"] == "state" and row.get("sm_mhz") is not None),
        *(_facts(row) for row in rows if row["kind"] == "facts"),
        *(f"{row['what']}: {row['median']:.0f} {row['unit']}" for row in rows if row["kind"] == "ceiling"),
        *(f"given up: {row['kernel']}: {row['reason']}" for row in rows if row["kind"] == "kernel given up"),
        *_kernels([row for row in rows if row["kind"] == "kernel"]),
        *_low_rank([row for row in rows if row["kind"] == "low-rank kernel"]),
        *_block8([row for row in rows if row["kind"] == "block8 kernel"]),
        *_shards([row for row in rows if row["kind"] == "shards kernel"]),
        *_host([row for row in rows if row["kind"] == "host"]),
        *_steps([row for row in rows if row["kind"] == "step"]),
        *_hooks([row for row in rows if row["kind"] == "step with hooks"]),
        *_wire([row for row in rows if row["kind"] == "emulated step"]),
        *(f"not measured: {row['what']}" for row in rows if row["kind"] == "skipped"),
        *(f"WRONG: {_where(row)}" for row in rows if row.get("result") == "WRONG"),
    ]


def _state(row: harness.Row) -> str:
    clocks = f"SM {row['sm_mhz']} of {row['sm_max_mhz']} MHz, memory {row['memory_mhz']} MHz"
    reasons = ", ".join(row["throttle_reasons"] or ["nothing"])
    heat = f"{row['power_w']} W, {row['temperature_c']} °C"
    return f"{row['section']} {row['when']}: {clocks}, {heat}, held down by: {reasons}"


def _facts(row: harness.Row) -> str:
    moments = {"before": "before", "after the first wrap": "after_wrap", "after its first step": "after_step"}
    used = {when: row[f"used_{name}_mib"] for when, name in moments.items()}
    told = ", ".join(f"{when} {'not known' if mib is None else f'{mib:.0f}'}" for when, mib in used.items())
    return f"supports_tensor_alloc: {row['supports_tensor_alloc']}; MiB used {told}; model {row['model_mib']:.0f}"


def _kernels(rows: Sequence[harness.Row]) -> list[str]:
    """How near fastddp is to a plain copy of as many bytes, and to what the device can do."""
    result = []
    for group in by_bucket(rows):
        row = group[FASTDDP]
        torch_us = group["torch DDP"]["median_us"]
        operators = "" if row["launches_per_call"] else " (torch's operators, not the kernel!)"
        result.append(
            f"{row['direction']} {row['gradient_dtype']} to {row['wire_dtype']}, {row['gradient_mib']:g} MiB: "
            f"{row['median_us']:.1f} us{operators}, {100 * row['fraction_of_copy']:.0f} % of copy_, "
            f"{100 * row['fraction_of_ceiling']:.0f} % of the ceiling; torch DDP {torch_us:.1f} us"
        )
    return result


def _low_rank(rows: Sequence[harness.Row]) -> list[str]:
    """Each kernel of PowerSGD: its time, and torch's."""
    result = []
    for key in dict.fromkeys((row["operation"], row["gradient_dtype"], row["rank"]) for row in rows):
        group = [row for row in rows if (row["operation"], row["gradient_dtype"], row["rank"]) == key]
        times = ", ".join(f"{row['contestant']} {row['median_us']:.1f} us" for row in group)
        result.append(f"{key[0]} {key[1]} rank {key[2]}: {times}")
    return result


def _block8(rows: Sequence[harness.Row]) -> list[str]:
    """Each kernel of block8: its time, that of torch's operators, and how near it comes to a plain copy."""
    result = []
    for key in dict.fromkeys((row["operation"], row["number"], row["gradient_dtype"]) for row in rows):
        group = [row for row in rows if (row["operation"], row["number"], row["gradient_dtype"]) == key]
        times = ", ".join(f"{row['contestant']} {row['median_us']:.1f} us" for row in group)
        (fast,) = (row for row in group if row["contestant"] == FASTDDP)
        near = (
            f"{100 * fast['fraction_of_copy']:.0f} % of copy_, {100 * fast['fraction_of_ceiling']:.0f} % of the ceiling"
        )
        result.append(f"block8 {key[0]} {key[1]} {key[2]}: {times}; {near}")
    return result


def _shards(rows: Sequence[harness.Row]) -> list[str]:
    """The sum of shards: its time, that of torch's operators, and that of a plain copy."""
    result = []
    for key in dict.fromkeys((row["wire_dtype"], row["world_size"]) for row in rows):
        group = [row for row in rows if (row["wire_dtype"], row["world_size"]) == key]
        times = ", ".join(f"{row['contestant']} {row['median_us']:.1f} us" for row in group)
        result.append(f"sum of {key[1]} shards of {key[0]}: {times}")
    return result


def _hooks(rows: Sequence[harness.Row]) -> list[str]:
    """What each hook adds to a step without a DDP."""
    result = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case and not _is_plain(row)]
        added = [f"{row['contestant']} {row['added_ms']:+.2f}" for row in of_case]
        result.append(f"{case} with hooks: added ms by {', '.join(added)}")
    return result


def _host(rows: Sequence[harness.Row]) -> list[str]:
    costs = [f"{row['contestant']} {row['added_us_per_gradient']:.2f}" for row in rows]
    return [f"host's us a gradient: {', '.join(costs)}"] if costs else []


def _steps(rows: Sequence[harness.Row]) -> list[str]:
    result = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        plain = of_case[0]
        added = [f"{row['contestant']} {row['added_ms']:+.2f}" for row in of_case if not _is_plain(row)]
        result.append(f"{case}: plain step {plain['median_ms']:.2f} ms; added by {', '.join(added)}")
    return result


def _wire(rows: Sequence[harness.Row]) -> list[str]:
    """For each network: what torch's best mode and fastddp's best one add to the step."""
    result = []
    for case, network, ranks in dict.fromkeys((row["case"], row["network"], row["world_size"]) for row in rows):
        here = [row for row in rows if (row["case"], row["network"], row["world_size"]) == (case, network, ranks)]
        parts = []
        for engine in (REFERENCE, FASTDDP):
            candidates = [row for row in here if row["contestant"].startswith(engine)]
            if candidates:
                best = min(candidates, key=lambda row: row["added_ms"])
                parts.append(f"{best['contestant']} {best['added_ms']:+.2f}")
        result.append(f"EMULATED {network}, {ranks} ranks, {case}: added ms by {', '.join(parts)}")
    return result


def _is_plain(row: harness.Row) -> bool:
    return str(row["contestant"]).startswith("plain")


def _where(row: harness.Row) -> str:
    names = (
        "section",
        "direction",
        "gradient_dtype",
        "wire_dtype",
        "gradient_mib",
        "case",
        "network",
        "contestant",
        "kernel",
    )
    return ", ".join(str(row[name]) for name in names if name in row)
