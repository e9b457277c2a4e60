"""The few lines that say how it went; they come last, where a log that is cut off still has them."""

from __future__ import annotations

from collections.abc import Sequence

from bench import harness
from bench.gpu import results
from bench.jobs import FASTDDP, Family
from bench.kernels import FAMILIES

_CEILINGS = {"fraction_of_copy": "copy_", "fraction_of_ceiling": "the ceiling"}
_OF_STEPS = ("step rows", "step", "step, seldom used", "step with hooks")
_AS_THEY_ARE = ("asleep", "two_ranks", "memory", "compiled", "addresses")


def lines(rows: Sequence[harness.Row]) -> list[str]:
    """A summary of all sections' rows."""
    return [
        *(_state(row) for row in rows if row["kind"] == "state" and row.get("sm_mhz") is not None),
        *(_facts(row) for row in rows if row["kind"] == "facts"),
        *(f"{row['what']}: {row['median']:.0f} {row['unit']}" for row in rows if row["kind"] == "ceiling"),
        *(
            f"proof of {row['what']}: {row['result']}, made of {row['made_of']}"
            for row in rows
            if row["kind"] == "proof"
        ),
        *(f"given up: {row['kernel']}: {row['reason']}" for row in rows if row["kind"] == "kernel given up"),
        *(line for family in FAMILIES for line in _kernels(family, rows)),
        *_host([row for row in rows if row["kind"] == "host"]),
        *_graphs([row for row in rows if row["kind"] == "graph"]),
        *(line for kind in _OF_STEPS for line in _steps(kind, rows)),
        *(results.line(row) for row in rows if row["kind"] in _AS_THEY_ARE),
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
    compiled = f"{row['kernels_in_cache']} kernels in Triton's cache, {row['kernels_compiled']} compiled"
    tells = f"supports_tensor_alloc: {row['supports_tensor_alloc']}"
    return f"{compiled}; {tells}; MiB used {told}; model {row['model_mib']:.0f}"


def _kernels(family: Family, rows: Sequence[harness.Row]) -> list[str]:
    """How long everyone takes, and how near fastddp is to a plain copy and to what the device can do."""
    result = []
    mine = [row for row in rows if row["kind"] == family.kind]
    for key, group in harness.grouped(mine, *family.keys).items():
        (fast,) = (row for row in group if row["contestant"] == FASTDDP)
        times = ", ".join(f"{row['contestant']} {row['median_us']:.1f} us" for row in group)
        operators = " (torch's operators, not the kernel!)" if fast.get("launches_per_call") == 0 else ""
        near = [f"{100 * fast[of]:.0f} % of {what}" for of, what in _CEILINGS.items()]
        result.append(f"{family.name} {' '.join(map(str, key))}: {times}; {', '.join(near)}{operators}")
    return result


def _host(rows: Sequence[harness.Row]) -> list[str]:
    costs = [
        f"{row['contestant']} {row['added_us_per_gradient']:.2f} ({row['median_from_first_us']:.0f} from the first on)"
        for row in rows
    ]
    return [f"host's us a gradient: {', '.join(costs)}"] if costs else []


def _graphs(rows: Sequence[harness.Row]) -> list[str]:
    """How long replays take."""
    found = []
    for (case,), group in harness.grouped(rows, "case").items():
        times = [f"{row['contestant']} {row['median_ms']:.3f}" for row in group]
        found.append(f"captured step of {case}, ms: {', '.join(times)}")
    return found


def _steps(kind: str, rows: Sequence[harness.Row]) -> list[str]:
    """What each DDP, or each hook, adds to a step without a DDP."""
    result = []
    for (case,), group in harness.grouped([row for row in rows if row["kind"] == kind], "case").items():
        added = [f"{row['contestant']} {row['added_ms']:+.2f}" for row in group if not _is_plain(row)]
        result.append(f"{case}, {kind}: {group[0]['median_ms']:.2f} ms plain; added by {', '.join(added)}")
    return result


def _is_plain(row: harness.Row) -> bool:
    return str(row["contestant"]).startswith("plain")


def _where(row: harness.Row) -> str:
    names = "section what operation gradient_dtype wire_dtype gradient_mib case contestant kernel"
    return ", ".join(str(row[name]) for name in names.split() if name in row)
