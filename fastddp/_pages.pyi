"""What ``csrc/bindings/page_bindings.cpp`` binds: ranks' pages, without torch."""

from typing import Literal, TypeAlias

State: TypeAlias = Literal["idle", "accumulating", "armed", "reducing", "partial", "finished", "failed"]
Doing: TypeAlias = Literal[
    "nothing",
    "forward",
    "after_forward",
    "backward",
    "tick",
    "finish",
    "closing",
    "after_backward",
    "optimizer",
    "gather",
    "after_optimizer",
    "agree",
]

Life: TypeAlias = Literal["runs", "stopped", "uninterruptible", "gone", "unknown"]

class BucketCollectives:
    lane: int
    first: int
    last: int

class BucketProgress:
    started: float | None
    bytes: int
    collectives: list[BucketCollectives]
    members: list[int]

class Snapshot:
    pid: int
    start: int  # of the process, in ticks of the kernel's clock since the machine started
    life: Life
    host: str
    number: int
    rank: int
    ranks: int
    job: int
    generation: int
    script: str
    names: list[str]
    doing: Doing
    seconds: float
    bucket: int | None
    state: State
    windows: int
    tick: int
    finished: int
    gradients: int
    last_parameter: int | None
    sequence: int | None
    runs_user_code: bool
    process_ends: bool
    error: str
    buckets: list[BucketProgress]
    came: list[bool]
    step_seconds: list[float]
    def missing(self, bucket: int) -> list[int]: ...

def read_page(path: str) -> Snapshot: ...
def life_of_owner(path: str) -> Life: ...
def shared_pages(pid: int = 0) -> list[str]: ...
def remove_left_pages() -> None: ...
def remove_page(path: str) -> None: ...
