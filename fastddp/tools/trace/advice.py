"""Sentences on what would make the step shorter, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from fastddp.times.split import Split
from fastddp.tools.trace.names import GATHER, STATUS
from fastddp.tools.trace.report import BucketReport, CollectiveReport, Idle
from fastddp.tools.trace.wording import percent

HIDDEN = 0.02  # of a step: exposed communication below this is not worth a change
MOST = 3  # sentences on communication
IDLE = 0.2  # of a step: less is no problem
BEHIND = 0.1  # of a bucket's duration: one that begins so soon after another collective waited for it
MOST_KINDS = 3  # of collectives that are named

Advice = tuple[float, str]  # what may be gained, ms, and the sentence
NO_COMMUNICATION = (
    "No communication was recorded: no collective of gloo's, and no kernel of NCCL's or RCCL's. If there are several "
    "ranks, the steps that were recorded did not synchronise gradients, or were replays of a CUDA graph as a whole."
)


def advise(
    split: Split,
    buckets: Sequence[BucketReport],
    halves: dict[int, float],
    waiting: float = 0.0,
    collectives: Sequence[CollectiveReport] = (),
    idle: Idle | None = None,
    is_torch: bool = False,
) -> tuple[str, ...]:
    """Sentences, the most profitable first; the one on idle time is last.

    ``halves``: by bucket, how many ms before its last gradient half of its gradients had come. ``waiting``: ms a step
    that a rank's collectives wait for the last rank, mean over ranks. ``is_torch``: only launches of buckets are known.
    """
    on_idle = _on_idle(split, idle)
    if split.communication == 0.0:
        return (NO_COMMUNICATION, *on_idle)
    if split.exposed < HIDDEN * split.step:
        of = f"of {split.communication:.2f} ms a step, {split.exposed:.2f} ms are exposed"
        return (f"Communication is hidden: {of}. There is nothing to gain there.", *on_idle)
    worth = [bucket for bucket in buckets if bucket.exposed >= HIDDEN * split.step]
    found = [
        _on_delay(bucket, buckets) or _on_queue(bucket, buckets) or _on_cap(bucket, halves.get(bucket.bucket), is_torch)
        for bucket in worth
    ]
    found += [_on_waiting(split, waiting), _on_bytes(split, buckets, waiting)]
    unknown = [bucket for bucket in worth if bucket.bucket not in halves]
    if not any(found) and unknown:
        found = [_on_unknown_arrivals(max(unknown, key=lambda bucket: bucket.exposed))]
    found.append(_on_no_bucket(split, buckets, collectives))
    ordered = sorted((advice for advice in found if advice is not None), key=lambda advice: -advice[0])
    return (*(sentence for _, sentence in ordered[:MOST]), *on_idle)


def _on_no_bucket(
    split: Split, buckets: Sequence[BucketReport], collectives: Sequence[CollectiveReport]
) -> Advice | None:
    """If exposed communication belongs to no bucket."""
    rest = split.exposed - sum(bucket.mean_exposed for bucket in buckets)
    if rest < HIDDEN * split.step:
        return None
    others = sorted((one for one in collectives if not one.of_buckets), key=lambda one: -one.exposed)
    named = ", ".join(f"{one.kind} {one.exposed:.2f} ms" for one in others[:MOST_KINDS] if one.exposed > 0)
    status = f"{STATUS} ends each step with a few bytes: ranks wait there for the last one"
    gather = f'{GATHER} brings what a ShardedOptimizer has stepped: gather="forward" lets it overlap the next forward'
    unknown = "sparse gradients, which parameters were used, or collectives of the script's own"
    what = {STATUS: status, GATHER: gather}.get(others[0].kind, unknown) if others else unknown
    told = f"{named} ({what})" if named else what
    return rest, f"{rest:.2f} ms of exposed communication belong to no bucket: {told}."


def _on_unknown_arrivals(bucket: BucketReport) -> Advice:
    """If the trace does not say when the bucket's gradients came."""
    return bucket.exposed, (
        f"{_exposed(bucket)}, and the trace does not say when its gradients came, as it does under fastddp. If most of "
        f"them came long before {bucket.start:.2f} ms, when its collective began, a smaller bucket_cap_mb starts it "
        "earlier."
    )


def _on_delay(bucket: BucketReport, buckets: Sequence[BucketReport]) -> Advice | None:
    """If a bucket is exposed because its collective began late."""
    if bucket.delay is None or bucket.delay < 0.5 * bucket.exposed:
        return None
    is_behind = _end_of_those_before(bucket, buckets) >= bucket.start - bucket.delay / 2
    why = (
        "behind other collectives. Smaller buckets would not help; fewer bytes would."
        if is_behind
        else "with no other collective before it: the host launched it late, or waited for a core."
    )
    ready = f"{_exposed(bucket)}: it was ready {bucket.delay:.2f} ms before its collective began, {why}"
    return min(bucket.delay, bucket.exposed), ready


def _on_queue(bucket: BucketReport, buckets: Sequence[BucketReport]) -> Advice | None:
    """If a bucket begins as soon as the one before it ends: with a smaller cap it would only wait longer."""
    if _end_of_those_before(bucket, buckets) < bucket.start - BEHIND * bucket.duration:
        return None
    return min(bucket.duration / 2, bucket.exposed), (
        f"{_exposed(bucket)}, and its collective begins as the one before it ends: the wire is busy. Smaller buckets "
        "would not help; fewer bytes would."
    )


def _end_of_those_before(bucket: BucketReport, buckets: Sequence[BucketReport]) -> float:
    """When the last collective of the buckets that start earlier ends; minus infinity without any."""
    ends = (other.start + other.duration for other in buckets if other.start < bucket.start)
    return max(ends, default=float("-inf"))


def _on_cap(bucket: BucketReport, half: float | None, is_torch: bool) -> Advice | None:
    """If half of a bucket could have left earlier."""
    if half is None or half < 0.1 * bucket.exposed:
        return None
    cap = f"a cap of {_mebibytes(bucket.bytes / 2)}" if bucket.bytes else "half its cap"
    # A trace does not say whether caps or a plan made the buckets.
    cap += " (bucket_cap_mb)" if is_torch else ' (bucket_cap_mb; under "auto", a plan of your own: buckets=)'
    condition = "they came evenly since the bucket before was launched" if is_torch else "they are of equal size"
    # The duration counts from when all ranks have joined: waiting for the last has nothing to do with size.
    return min(half, bucket.exposed, bucket.duration), (
        f"{_exposed(bucket)}: with {cap} its first half would start "
        f"{half:.2f} ms earlier, when half of its gradients had come, if {condition}."
    )


def _exposed(bucket: BucketReport) -> str:
    return f"Bucket {bucket.bucket} is exposed {bucket.exposed:.2f} ms"


def _on_waiting(split: Split, waiting: float) -> Advice | None:
    """If communication is mostly the wait for a rank."""
    if waiting < 0.5 * split.exposed:
        return None
    return min(waiting, split.exposed), (
        f"Of {split.exposed:.2f} ms of exposed communication a step, {waiting:.2f} ms are waits for the last rank, on "
        "the mean over all ranks: let ranks get there at the same time before anything else."
    )


def _on_bytes(split: Split, buckets: Sequence[BucketReport], waiting: float) -> Advice | None:
    """If there is more communication than compute to hide it behind."""
    compute = split.compute + split.overlapped
    wide = [bucket for bucket in buckets if bucket.wire in ("float32", "float64")]
    travelling = split.communication - waiting
    if travelling <= compute or not wide:
        return None
    sizes = [bucket.bytes for bucket in wide]
    total = f"{_mebibytes(sum(size or 0 for size in sizes))} in" if all(sizes) else "gradients in"
    return min(travelling / 2, split.exposed), (
        f"Communication takes {travelling:.2f} ms a step and compute {compute:.2f} ms: no order hides all "
        f"of it. The wires carry {total} fp32 or fp64: fastddp.comm_hooks.bf16_compress_hook sends "
        "half of that, or less."
    )


def _on_idle(split: Split, idle: Idle | None) -> tuple[str, ...]:
    """A sentence on idle time, if there is much of it."""
    if idle is None or split.idle < IDLE * split.step:
        return ()
    launched = "larger batches, torch.compile and CUDA graphs launch less for the same work; .item() stops the host"
    begun = "it waits for another stream or for the driver: small kernels cost that each"
    outside = "Python, the optimizer's bookkeeping, or a thread that had no core"
    kinds = [(idle.data, "for the next batch", "load with more workers, or further ahead")]
    if idle.on_device:
        kinds.append((idle.host, "for the host to launch what comes next", launched))
        kinds.append((idle.launched, "between the launch of what comes next and its start", begun))
    else:
        kinds.append((idle.host, "outside operators", outside))
    kinds.sort(reverse=True)
    remedy = kinds[0][2]
    kinds.append((idle.unknown, "for what the trace does not tell", ""))
    listed = ", ".join(f"{time:.2f} ms {what}" for time, what, _ in kinds if time > 0)
    whose = "The device" if idle.on_device else "The CPU"
    return (f"{whose} is idle {percent(split.idle, split.step)} of a step: {listed}. Of the largest part: {remedy}.",)


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:.3g} MiB"
