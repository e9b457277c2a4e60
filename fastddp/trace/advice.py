"""What would make the step shorter, by how much, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fastddp.trace.report import BucketReport, Split

HIDDEN = 0.02  # of a step: exposed communication below this is not worth a change
MOST = 3  # buckets that are spoken of


def advise(
    split: Split, buckets: Sequence[BucketReport], halves: dict[int, float], waiting: float = 0.0
) -> tuple[str, ...]:
    """Sentences, the most profitable first.

    Args:
        split: the run's.
        buckets: the run's.
        halves: by bucket, how many ms before its last gradient half of its gradients had come.
        waiting: ms a step in which a rank's collectives wait for the last rank, the mean over ranks.
    """
    if split.communication == 0.0:
        return ("No communication was recorded, so there is nothing to advise on.",)
    if split.exposed < HIDDEN * split.step:
        of = f"of {split.communication:.2f} ms a step, {split.exposed:.2f} ms are exposed"
        return (f"Communication is hidden: {of}. There is nothing to gain.",)
    worth = [bucket for bucket in buckets if bucket.exposed >= HIDDEN * split.step]
    found = [_on_delay(bucket, buckets) or _on_cap(bucket, halves.get(bucket.bucket)) for bucket in worth]
    found += [_on_waiting(split, waiting), _on_bytes(split, buckets, waiting)]
    unknown = [bucket for bucket in worth if bucket.ready is None]
    if not any(found) and unknown:
        found = [_on_unknown_arrivals(max(unknown, key=lambda bucket: bucket.exposed))]
    found.append(_on_no_bucket(split, buckets))
    ordered = sorted((advice for advice in found if advice is not None), key=lambda advice: -advice[0])
    return tuple(sentence for _, sentence in ordered[:MOST])


def _on_no_bucket(split: Split, buckets: Sequence[BucketReport]) -> tuple[float, str] | None:
    """Where communication is exposed that is no bucket's."""
    known = [bucket.mean_exposed for bucket in buckets if bucket.mean_exposed is not None]
    rest = split.exposed - sum(known)
    if len(known) < len(buckets) or rest < HIDDEN * split.step:
        return None
    return rest, (
        f"{rest:.2f} ms of exposed communication belong to no bucket: sparse gradients, which parameters were used, or "
        "collectives of the script's own."
    )


def _on_unknown_arrivals(bucket: BucketReport) -> tuple[float, str]:
    """Where the trace does not say when the bucket's gradients came."""
    return bucket.exposed, (
        f"{_exposed(bucket)}, and the trace does not say when its gradients came, as it does under fastddp. If most of "
        f"them came long before {bucket.start:.2f} ms, when its collective began, a smaller bucket_cap_mb starts it "
        "earlier."
    )


def _on_delay(bucket: BucketReport, buckets: Sequence[BucketReport]) -> tuple[float, str] | None:
    """The gain in ms, and the sentence, where a bucket is exposed because its collective began late."""
    if bucket.delay is None or bucket.delay < 0.5 * bucket.exposed:
        return None
    others = (other.start + other.duration for other in buckets if other.start < bucket.start)
    is_behind = max(others, default=0.0) >= bucket.start - bucket.delay / 2
    why = (
        "behind other collectives. Smaller buckets would not help; fewer bytes would."
        if is_behind
        else "with no other collective before it: the host launched it late, or waited for a core."
    )
    ready = f"{_exposed(bucket)}: it was ready {bucket.delay:.2f} ms before its collective began, {why}"
    return min(bucket.delay, bucket.exposed), ready


def _on_cap(bucket: BucketReport, half: float | None) -> tuple[float, str] | None:
    """Where half of a bucket could have left earlier."""
    if half is None or not bucket.bytes or half < 0.1 * bucket.exposed:
        return None
    # Once all ranks have joined: what one of them waits for the last is no matter of size.
    return min(half, bucket.exposed, bucket.duration), (
        f"{_exposed(bucket)}: with a cap of {_mebibytes(bucket.bytes / 2)} (bucket_cap_mb) its first half would start "
        f"{half:.2f} ms earlier, when half of its gradients had come, if they are of equal size."
    )


def _exposed(bucket: BucketReport) -> str:
    return f"Bucket {bucket.bucket} is exposed {bucket.exposed:.2f} ms"


def _on_waiting(split: Split, waiting: float) -> tuple[float, str] | None:
    """Where communication is mostly the wait for a rank."""
    if waiting < 0.5 * split.exposed:
        return None
    return min(waiting, split.exposed), (
        f"On the mean over all ranks, the last one included, collectives wait {waiting:.2f} ms a step for the last "
        f"rank to join them, and {split.exposed:.2f} ms of communication are exposed: even out what ranks compute "
        "before anything else."
    )


def _on_bytes(split: Split, buckets: Sequence[BucketReport], waiting: float) -> tuple[float, str] | None:
    """Where there is more communication than compute to hide it behind."""
    compute = split.compute + split.overlapped
    wide = [bucket for bucket in buckets if bucket.wire in ("float32", "float64")]
    travelling = split.communication - waiting
    if travelling <= compute or not wide:
        return None
    carried = sum(bucket.bytes or 0 for bucket in wide)
    return min(travelling / 2, split.exposed), (
        f"Communication takes {travelling:.2f} ms a step and compute {compute:.2f} ms: no order hides all "
        f"of it. The wires carry {_mebibytes(carried)} in fp32 or fp64: fastddp.comm_hooks.bf16_compress_hook sends "
        "half of that, or less."
    )


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:.3g} MiB"
