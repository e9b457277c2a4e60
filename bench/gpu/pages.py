"""The tables of docs/gpu.md, made of every row under bench/results/gpu: `python -m bench.gpu.pages` prints them.

Numbers of one run are divided by numbers of the same run. A cell is the mean of all runs, with the least and the
greatest.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.gpu import results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
PLACE = re.compile(r"(<!-- python -m bench.gpu.pages --write: (\w+) -->\n).*?(<!-- so far -->\n)", re.DOTALL)
TODAY = "2026-11-27T13"  # from when on runs are of the driver that there is today
NO_LONGER = {("11-26 second", "project")}  # a kernel that another took the place of before the run that came next

TORCH, AGAIN, FASTDDP = "torch", "torch-again", ("fastddp", "fastddp-view")
EAGER, HOOKS, SELDOM, GRAPH, GLOO = "step", "step with hooks", "step, seldom used", "graph", "two ranks"
STEPS = {
    (EAGER, "gpt2"): "GPT-2, autocast",
    (EAGER, "gpt2-bf16"): "GPT-2, parameters in bf16",
    (EAGER, "gpt2-fp32"): "GPT-2, fp32",
    (EAGER, "resnet50"): "ResNet-50, autocast",
    (SELDOM, "gpt2"): "GPT-2, gradients set to zero",
    (GRAPH, "gpt2"): "GPT-2, captured",
    (GRAPH, "500x32sq"): "500 small parameters, captured",
    (GLOO, "gpt2"): "two ranks over gloo, GPT-2's shapes",
    (GLOO, "resnet50"): "two ranks over gloo, ResNet-50's shapes",
    (GLOO, "gpt"): "two ranks over gloo, a GPT of 4.8 M",
}
COMPRESSED = ("", "+bf16", "+fp16", "+powersgd4", "+powersgd1", "+int8", "+fp8")


def read() -> list[harness.Row]:
    """All rows, each with its `run`, and whether it had `today`'s driver. Ratios are of pairs within a round."""
    rows: list[harness.Row] = []
    for path in (ROOT / "bench/results/gpu").glob("*/gpu.json"):
        own, two = results.read(path), results.read(path.with_name("two_ranks.json"))
        for row in two:
            row |= {name: row[f"paired_{name}"] for name in ("ratio_to_torch", "ratio_to_best_torch")}
            row |= {"section": GLOO, "kind": GLOO}
        date = str(own[0]["date"])
        common = {"run": path.parent.name[5:].replace("-h200-", " "), "date": date, "today": date >= TODAY}
        rows += [row | common for row in (*own, *two)]
    return sorted(rows, key=lambda row: str(row["date"]))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Their mean, with the least and the greatest where these differ."""
    if not values:
        return "–"
    least, greatest = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if least == greatest else f"{mean} ({least} to {greatest})"


def table(*rows: Sequence[str]) -> Iterator[str]:
    """The first row is the heading."""
    for place, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if place == 0:
            yield "|" + "---|" * len(row)
    yield ""


@dataclass
class Group:
    """The rows of one run that took their steps in turns, by contestant."""

    today: bool
    by_name: dict[str, harness.Row]

    def ratio(self, name: str, other: str) -> float:
        """Of their steps. By way of torch's default, unless they were compared round by round."""
        mine, theirs = self.by_name[name], self.by_name[other]
        if mine.get("best_torch") == other:
            return float(mine["ratio_to_best_torch"])
        return float(mine["ratio_to_torch"] / theirs["ratio_to_torch"])

    def fastest_torch(self, zeroed: str) -> str:
        """Torch's fastest setting, by its median."""
        settings = [name for name in (f"{TORCH}{zeroed}", f"{TORCH}-view{zeroed}") if name in self.by_name]
        return min(settings, key=lambda name: float(self.by_name[name]["median_ms"]))


def groups(rows: Sequence[harness.Row], kind: str, case: str) -> list[Group]:
    """One a run."""
    mine = [row for row in rows if (row["kind"], row.get("case")) == (kind, case)]
    return [
        Group(own[0]["today"], {row["contestant"]: row for row in own}) for own in harness.grouped(mine, "run").values()
    ]


def from_itself(rows: Sequence[harness.Row], kind: str, case: str) -> list[float]:
    """Ratios of torch's DDP to itself, measured twice; models over gloo ran too seldom to be told apart."""
    same = {GRAPH: (GRAPH,), GLOO: (GLOO,)}.get(kind, (EAGER, HOOKS))
    again = [row for row in rows if row.get("contestant") == AGAIN and row["kind"] in same]
    return [row["ratio_to_torch"] for row in again if kind == GLOO or row["case"] == case]


def verdict(ratios: Sequence[float], noise: Sequence[float]) -> str:
    """Ahead or behind: in all runs, and by more in the mean than torch's DDP ever was from itself."""
    mean, least = statistics.fmean(ratios), max(abs(1 - ratio) for ratio in noise)
    if max(ratios) < 1 and mean < 1 - least:
        return "ahead"
    return "behind" if min(ratios) > 1 and mean > 1 + least else "level"


def compared(rows: Sequence[harness.Row]) -> Iterator[tuple[str, list[Group], str, str, list[float], list[float]]]:
    """What is compared, runs, contestant, torch's default there, ratios to torch's fastest, and the noise."""
    for (kind, case), label in STEPS.items():
        runs, zeroed = groups(rows, kind, case), "-zeroed" if kind == SELDOM else ""
        for name in (f"{engine}{zeroed}" for engine in FASTDDP):
            fastest = [run.ratio(name, run.fastest_torch(zeroed)) for run in runs]
            title = label + ", views" * ("view" in name)
            yield title, runs, name, f"{TORCH}{zeroed}", fastest, from_itself(rows, kind, case)


def steps(rows: Sequence[harness.Row]) -> Iterator[str]:
    lines: dict[str, list[list[str]]] = {"ahead": [], "level": [], "behind": []}
    for label, runs, name, default, fastest, noise in compared(rows):
        today = [ratio for run, ratio in zip(runs, fastest, strict=True) if run.today]
        said = verdict(fastest, noise)
        ratios = [run.ratio(name, default) for run in runs], fastest, today, noise
        lines[said].append([said, label, str(len(runs)), *map(spread, ratios)])
    heading = ["", "a step", "runs", "of torch's default", "of its fastest", "with today's driver", "torch of itself"]
    yield from table(heading, *(line for some in lines.values() for line in some))


def added(rows: Sequence[harness.Row]) -> Iterator[str]:
    """What a DDP adds to a step of GPT-2, autocast, and to the host's time of a small gradient."""
    names = (TORCH, f"{TORCH}-view", *FASTDDP)
    runs = groups(rows, EAGER, "gpt2")
    hosts = groups(rows, "host", "500x32sq")
    body = [
        [label, str(len(of)), *(spread([run.by_name[name][column] for run in of], digits) for name in names)]
        for label, of, column, digits in (
            ("ms of a step", runs, "added_ms", 1),
            ("kernels", runs, "added_launches", 0),
            ("copies", runs, "added_memcpys", 0),
            ("MiB of tensors between steps", runs, "added_steady_mib", 0),
            ("MiB of tensors at most", runs, "added_peak_mib", 0),
            ("host's µs a small gradient", hosts, "added_us_per_gradient", 1),
        )
    ]
    yield from table(["added", "runs", "torch's default", "its views", "fastddp", "its views"], *body)


def hooks(rows: Sequence[harness.Row]) -> Iterator[str]:
    """Steps with a hook, of torch's default without one, and of torch's with the hook of that name."""
    body, noise = [], from_itself(rows, HOOKS, "gpt2")
    for hook in COMPRESSED:
        runs = [run for run in groups(rows, HOOKS, "gpt2") if f"fastddp{hook}" in run.by_name]
        having = [run for run in runs if f"torch{hook}" in run.by_name]
        both = [run.ratio(f"fastddp{hook}", f"torch{hook}") for run in having]
        theirs = [run.ratio(f"torch{hook}", TORCH) for run in having]
        cells = theirs, [run.ratio(f"fastddp{hook}", TORCH) for run in runs], both
        body.append([hook[1:] or "no hook", str(len(runs)), *map(spread, cells), verdict(both, noise) if both else "–"])
    yield from table(["GPT-2 with", "runs", "torch's hook", "fastddp's", "fastddp's of torch's", ""], *body)


def packs(rows: Sequence[harness.Row]) -> Iterator[str]:
    """Pack and unpack: µs in fp32, and the share of a copy's speed over all pairs of types."""
    body = []
    for operation in ("pack", "unpack"):
        for name in ("fastddp", "fastddp moved", "_foreach_copy_", "torch DDP"):
            mine = [row for row in rows if row["kind"] == "kernel" and row["contestant"] == name]
            cells = []
            for mib in (1, 25, 256):
                of = [row for row in mine if (row["operation"], row["gradient_mib"]) == (operation, mib)]
                fp32 = [row["median_us"] for row in of if row["gradient_dtype"] == row["wire_dtype"] == "float32"]
                shares = [row["fraction_of_copy"] for row in of]
                cells.append(f"{spread(fp32, 1)}; {min(shares):.2f} to {max(shares):.2f}")
            body.append([f"{operation}, {name}", *cells])
    yield from table(["µs in fp32; share of a copy, all types", "1 MiB", "25 MiB", "256 MiB"], *body)


def others(rows: Sequence[harness.Row]) -> Iterator[str]:
    """Kernels of 8 bits and of PowerSGD, for ranks 1 and 4, beside the same in torch's operators."""
    body = []
    kinds = ("block8 kernel", "low-rank kernel")
    mine = [row for row in rows if row["kind"] in kinds and (row["run"], row["operation"]) not in NO_LONGER]
    for (operation, dtype), of in harness.grouped(mine, "operation", "gradient_dtype").items():
        cells: list[list[str]] = [[], [], []]
        runs = 0
        for same in harness.grouped(of, "rank").values():
            fast = [row for row in same if row["contestant"] == "fastddp"]
            slow = [row["median_us"] for row in same if row["contestant"] in ("torch", "operators")]
            runs = len(fast)
            columns = ("median_us", 1), ("fraction_of_copy", 2)
            for place, (column, digits) in enumerate(columns):
                cells[place].append(spread([row[column] for row in fast], digits))
            cells[2].append(spread(slow, 0))
        number = "8 bits" if of[0]["kind"] == kinds[0] else str(dtype).replace("float", "fp").replace("bfp", "bf")
        body.append([f"*{operation}*, {number}", str(runs), *("; ".join(cell) for cell in cells)])
    yield from table(["kernel; PowerSGD of rank 1; of rank 4", "runs", "µs", "share of a copy", "torch, µs"], *body)


def ran(rows: Sequence[harness.Row]) -> Iterator[str]:
    """Which run is of which commit, and what it measured."""
    body = []
    for (run,), of in harness.grouped(rows, "run").items():
        sections = []
        for (section,), own in harness.grouped(of, "section").items():
            measured = len([row for row in own if row["kind"] not in ("header", "state", "skipped", "failed")])
            whole = section == GLOO or any(row["kind"] == "state" for row in own)
            if measured:
                sections.append(section + " (cut)" * (not whole))
        commit = of[0]["commit"][:7] + ", changed" * bool(of[0]["dirty"])
        driver = "today's" if of[0]["today"] else "earlier"
        body.append([run, commit, driver, ", ".join(sections)])
    yield from table(["run", "commit", "driver", "measured"], *body)


def headline(rows: Sequence[harness.Row]) -> Iterator[str]:
    """What READMEs say of GPT-2, eager and captured: of torch's default, and of its fastest setting."""
    for label, runs, name, default, fastest, _ in compared(rows):
        if label in (STEPS[EAGER, "gpt2"], STEPS[GRAPH, "gpt2"]):
            ratios = [run.ratio(name, default) for run in runs], fastest
            yield from (spread(some, 2).replace(" to ", "–") for some in ratios)


PARTS = {"runs": ran, "steps": steps, "added": added, "hooks": hooks, "packs": packs, "others": others}


def page(text: str, rows: Sequence[harness.Row]) -> str:
    """The page with tables of these rows between its markers."""
    return PLACE.sub(lambda found: "\n".join([found[1], *PARTS[found[2]](rows), found[3]]), text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.pages", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md, between its markers")
    rows = read()
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(), rows))
        return
    for part in PARTS.values():
        print("\n".join(part(rows)))
    print(*headline(rows), sep="; ")


if __name__ == "__main__":
    main()
