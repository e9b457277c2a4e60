"""PowerSGD's settings, memory and exchange (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

A gradient of two or more dimensions is read as a matrix M, [rows, columns]. The rows are the dimension that is
outermost in the parameter's memory; the columns are all others. Each window sends P = M Q and then Q = M^T P, both
thin, in place of M. What their product leaves out is the error, and is added to the next gradient.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.compression.power_sgd_loading import check_memory
from fastddp.compression.saved_state import SavedState, check_model, replace, warn_of_ranks
from fastddp.errors import see
from fastddp.exchange.descriptions import Pipelined, Setting
from fastddp.exchange.ways import for_shards
from fastddp.kernel_loading.launching import load_kernels, load_low_rank_kernels

logger = logging.getLogger("fastddp.power_sgd")

FORMAT = 1
MOST_VECTORS = 32
_SETTINGS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
)
_COMPRESSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class PowerSGDState:
    """Settings and memory of :func:`fastddp.comm_hooks.powerSGD_hook`, with torch's names.

    Torch's own hook runs with it too. That hook's memory, by bucket, is kept apart here, and only pickling saves it.

    Args:
        process_group: the ranks to average over; None: those of the model.
        matrix_approximation_rank: vectors in P and in Q, 1 to 32; fewer where a matrix has fewer rows or columns.
        start_powerSGD_iter: synchronisations with a plain allreduce before the first compressed one. At least 2 with
            error feedback or warm start, as under torch's DDP, which has its final buckets then.
        min_compression_rate: a gradient of n x m elements is compressed only if this many times (n + m) * rank is less.
        use_error_feedback: remember the error; without it, training may end at a higher loss.
        warm_start: begin with the Q of the step before; otherwise with a random Q.
        orthogonalization_epsilon: a vector counts as zero if no more than this is left after its share of the vectors
            before it is taken off. Zero vectors do not need this: they stay zero in P, and start anew in Q.
        random_seed: of the first Q, and of the vectors that replace zero vectors; the same on all ranks.
        compression_stats_logging_frequency: synchronisations between two lines of statistics in the log.
        batch_tensors_with_same_shape: accepted and ignored: one launch takes all matrices of a bucket.

    Raises:
        ValueError: it names a setting that is out of its range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        is_whole = isinstance(matrix_approximation_rank, int)
        if not is_whole or not 1 <= matrix_approximation_rank <= MOST_VECTORS:
            raise ValueError(
                f"matrix_approximation_rank must be an integer, 1 to {MOST_VECTORS}, got {matrix_approximation_rank}. "
                "For more, give powerSGD_hook a fastddp.comm_hooks.TorchPowerSGDState, torch's own, which has the same "
                "arguments: torch's hook is then called for each bucket." + see("FD024")
            )
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise ValueError(
                "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, got "
                f"{start_powerSGD_iter}: buckets are rebuilt after the first iteration, and what is remembered would "
                "not fit. Give 2 or more, or switch both off." + see("FD024")
            )
        if not orthogonalization_epsilon >= 0:
            raise ValueError(f"orthogonalization_epsilon must be >= 0, got {orthogonalization_epsilon}." + see("FD024"))
        if not min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be > 0, got {min_compression_rate}." + see("FD024"))
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._iter = 0
        self.was_changed = False  # whether ``iter`` was set, or a state loaded, since ranks compared their states
        self._windows: Callable[[], int] | None = None
        self._elements: Callable[[], tuple[int, int]] | None = None
        self._allocate: Callable[[], object] | None = None
        self._seen = 0
        self.total_numel_before_compression = 0
        """Elements of all compressed steps, before compression."""
        self.total_numel_after_compression = 0
        """The same after compression."""
        self.next_stats_report = 0
        """The iteration at which statistics are next in the log."""
        self.errors: dict[str, Tensor] = {}
        """This rank's errors of earlier steps by parameter name, [rows, columns], in the gradient's dtype."""
        self.qs: dict[str, Tensor] = {}
        """Q by parameter name (batched: by ``bucket i``), [rank, columns], fp32 or fp64; the same on all ranks."""
        self._model: dict[str, tuple[int, ...]] = {}  # names and shapes of the model's parameters
        self._dtypes: dict[str, torch.dtype] = {}  # their dtypes, once a model is known
        self.error_dict: dict[int, Tensor] = {}  # this and the next two are the memory of torch's hook
        self.p_memory_dict: dict[int, Tensor] = {}
        self.q_memory_dict: dict[int, Tensor] = {}

    # --------------------------------------------------------------------------------------------------- statistics

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after it) over all compressed steps."""
        self._catch_up()
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    @property
    def iter(self) -> int:
        """Synchronisations up to now. Setting it, on all ranks alike, moves the start of compression.

        Setting it to something else than an integer >= 0 raises TypeError or ValueError.
        """
        self._catch_up()
        return self._iter

    @iter.setter
    def iter(self, value: int) -> None:
        value = operator.index(value)
        if value < 0:
            raise ValueError(f"iter is a number of synchronisations, not {value}." + see("FD024"))
        self._catch_up()
        self._iter = value
        self.was_changed = True

    def follow(
        self, windows: Callable[[], int], elements: Callable[[], tuple[int, int]], allocate: Callable[[], object]
    ) -> None:
        """From now on, count a model's synchronisations as iterations.

        Args:
            windows: returns how many synchronisations there have been.
            elements: returns the elements of one, before and after compression.
            allocate: makes the memory for each of the model's gradients.
        """
        self._catch_up()
        self._windows, self._seen, self._elements, self._allocate = windows, windows(), elements, allocate
        memories = (self.error_dict, self.p_memory_dict, self.q_memory_dict)
        if any(memories):
            warnings.warn(
                "What torch's PowerSGD hook remembered in this state, by bucket, is of no use to fastddp's: errors and "
                "Q begin anew. Iterations are counted on.",
                stacklevel=2,
            )
        for memory in memories:
            memory.clear()

    def _catch_up(self) -> None:
        if self._windows is None or self._elements is None:
            return
        windows = self._windows() - self._seen
        self._seen += windows
        self._iter += windows
        compressed = min(windows, self._iter - self.start_powerSGD_iter)
        if compressed <= 0:
            return
        before, after = self._elements()
        self.total_numel_before_compression += compressed * before
        self.total_numel_after_compression += compressed * after
        if self._iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info(
                "PowerSGD, iteration %d: %d elements became %d, a rate of %.1f", self._iter, before, after, rate
            )
            self.next_stats_report = self._iter + self.compression_stats_logging_frequency

    # ------------------------------------------------------------------------------------------------- torch's hook

    @functools.cached_property
    def rng(self) -> Any:
        """The generator from which torch's hook draws its first Q."""
        import numpy as np  # here, as in torch's state, because training without PowerSGD does not need it

        return np.random.RandomState(self.random_seed)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count the synchronisation that ends with ``bucket``, if it is the last one. Torch's hook calls this."""
        if bucket.is_last():
            self._catch_up()
            self._iter += 1

    # ------------------------------------------------------------------------------------------------- the memory

    def belong_to(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Use the state for these parameters; ValueError: the state belongs to another model, or to other dtypes."""
        model = {name: tuple(parameter.shape) for name, parameter in zip(names, parameters, strict=True)}
        check_model(self, self._model, model)
        dtypes = {name: parameter.dtype for name, parameter in zip(names, parameters, strict=True)}
        check_memory(self.qs, self.errors, self.matrix_approximation_rank, model, dtypes)
        self._model, self._dtypes = model, dtypes

    def matrix(self, name: str, like: Tensor, rows: int, columns: int, seed: int) -> tuple[Tensor | None, Tensor]:
        """The error and Q of a gradient like ``like``: ``errors[name]`` and ``qs[name]``, made where they are missing.

        A new error is zero. A new Q is an orthonormal basis that depends on ``seed`` and ``random_seed`` alone.
        """
        rank = min(self.matrix_approximation_rank, rows, columns)
        q = self.qs.get(name)
        if q is None or q.shape != (rank, columns) or q.device != like.device:
            compute = torch.float64 if like.dtype == torch.float64 else torch.float32
            self.qs[name] = q = _basis(rank, columns, self.random_seed + seed, compute).to(like.device)
        if not self.use_error_feedback:
            return None, q
        error = self.errors.get(name)
        if error is None or error.shape != (rows, columns) or error.device != like.device:
            self.errors[name] = error = torch.zeros(rows, columns, dtype=like.dtype, device=like.device)
        return error, q

    # ------------------------------------------------------------------------------------------- in another group

    @property
    def settings(self) -> list[str]:
        """What all ranks must have alike, an argument each."""
        return [f"PowerSGDState({name}={getattr(self, name)!r})" for name in _SETTINGS]

    def hand_out(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What all ranks of another group take from the newest one: numbers, and the tensors that they have alike."""
        numbers = ("iter", "total_numel_before_compression", "total_numel_after_compression")
        return {name: getattr(self, name) for name in numbers}, dict(self.qs)

    def take_over(self, numbers: dict[str, Any], tensors: dict[str, Tensor], *, is_new: bool) -> None:
        """Go on with what another rank has handed out; ``is_new``: this rank was not there before, so has no errors."""
        self.iter = numbers.pop("iter")
        for name, number in numbers.items():
            setattr(self, name, number)
        replace(self.qs, tensors)
        for error in self.errors.values() if is_new else ():
            error.zero_()

    # ---------------------------------------------------------------------------------------------- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training needs to go on, as tensors, numbers and names.

        Errors are stored under this rank's number, so that DCP keeps those of all ranks. With torch.save each rank
        writes a file of its own. The tensors are the ones in use, not copies. Before the first compressed step they
        are made here, so that DCP has tensors to load into. To load on more ranks than have saved, give DCP a planner
        with ``allow_partial_load=True``.

        Raises:
            RuntimeError: torch's hook runs with this state.
        """
        if self.error_dict or self.p_memory_dict:
            raise RuntimeError(
                "Torch's PowerSGD hook was called with this PowerSGDState, and what it remembers, by bucket, is not in "
                "a state_dict(). Pickle the state instead, as you would torch's: torch.save(state, ...) on each rank."
                + see("FD036")
            )
        if self._allocate is not None:
            self._allocate()
        return {
            "format": FORMAT,
            "iter": self.iter,
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "world_size": self._group().size(),
            "total_numel_before_compression": self.total_numel_before_compression,
            "total_numel_after_compression": self.total_numel_after_compression,
            "shapes": {name: list(shape) for name, shape in self._model.items()},
            "qs": dict(self.qs),
            "errors": {f"rank {self._group().rank()}": dict(self.errors)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, of any rank, under any buckets.

        A rank that finds errors under its own number takes them. Other ranks begin with none, so their errors are lost
        once.

        The whole state is checked before any part is taken. If a model trains with this state, call this on all ranks
        between the same two steps: the next forward compares.

        Args:
            state: what it returned.

        Raises:
            ValueError: the state is of another model, matrix_approximation_rank or format; or it names a part that is
                missing, of another type, dtype or shape, or a number out of its range. Nothing has been changed.
        """
        group = self._group()
        saved = SavedState("PowerSGD", state, FORMAT)
        vectors = saved.count("matrix_approximation_rank", least=1)
        if vectors != self.matrix_approximation_rank:
            raise ValueError(
                f"The saved PowerSGD state has matrix_approximation_rank {vectors}, this one "
                f"{self.matrix_approximation_rank}. Make one of the same rank, or begin without the saved state."
                + see("FD036")
            )
        shapes, errors = saved.shapes(self._model), saved.of_rank("errors", group.rank())
        qs = saved.mapping(saved.part("qs"), "qs")
        check_memory(qs, errors or {}, vectors, shapes, self._dtypes)
        iterations, world_size = saved.count("iter"), saved.count("world_size", least=1)
        before, after = map(saved.count, ("total_numel_before_compression", "total_numel_after_compression"))
        if world_size != group.size() or (errors is None and self.use_error_feedback):
            warn_of_ranks("PowerSGD's errors", world_size, group, errors is not None)
        self._model, self.iter = shapes, iterations
        self.total_numel_before_compression, self.total_numel_after_compression = before, after
        replace(self.qs, qs)
        for name, error in self.errors.items():
            if name not in (errors or {}):
                error.zero_()
        replace(self.errors, errors or {})

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("A PowerSGDState is saved without its process group.")
        self._catch_up()
        return self.__dict__ | {"process_group": None, "_windows": None, "_elements": None, "_allocate": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # After fastddp.patch() torch's pickled states come here too. Their attributes have the same names.
        PowerSGDState.__init__(self, None, state["matrix_approximation_rank"])
        for name, value in state.items():
            setattr(self, name, value)
        self.process_group = dist.distributed_c10d._get_default_group()
        logger.warning("A loaded PowerSGDState uses the default process group; set process_group for another one.")

    def _group(self) -> dist.ProcessGroup:
        return self.process_group or dist.distributed_c10d._get_default_group()


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter's gradient as a matrix.

    >>> matrix_shape(torch.empty(8, 3, 5, 5))
    (8, 75)
    """
    outermost = max(range(parameter.dim()), key=lambda dim: (parameter.stride(dim), -dim), default=None)
    rows = 1 if outermost is None else parameter.shape[outermost]
    return rows, parameter.numel() // max(rows, 1)


def is_compressed(parameter: Tensor, rank: int, min_compression_rate: float) -> bool:
    """Whether a gradient travels as two factors: it is a dense matrix of reals, and that saves enough."""
    if parameter.dtype not in _COMPRESSED_DTYPES or not _is_dense(parameter):
        return False
    rows, columns = matrix_shape(parameter)
    return (rows + columns) * min(rank, rows, columns) * min_compression_rate < rows * columns


def _is_dense(parameter: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    extent = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != extent:
            return False
        extent *= size
    return True


@dataclass(frozen=True, eq=False)
class PowerSGD(Pipelined):
    """The exchange. Each registered hook has one object, which is equal only to itself."""

    state: PowerSGDState
    batched: bool
    wire: torch.dtype | None
    takes_whole_parameters: ClassVar[bool] = True

    def check(self, setting: Setting) -> None:
        """Raise ValueError if a gradient is complex, and the hook is the batched one."""
        for name, parameter in zip(setting.names, setting.parameters, strict=True):
            if self.batched and parameter.is_complex():
                raise ValueError(
                    f"batched_powerSGD_hook takes real gradients only, and {name} is complex; use powerSGD_hook, which "
                    "sends those uncompressed." + see("FD037")
                )

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`."""
        return setting.group_for(self.state.process_group)

    def make(self, setting: Setting) -> _C.Way:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`."""
        state = self.state
        self._load_kernels(setting)
        matrices = self.allocate(setting)
        codec = _C.Codec.low_rank(
            [] if self.batched else matrices,
            matrices if self.batched else [],
            error_feedback=state.use_error_feedback,
            warm_start=state.warm_start,
            epsilon=state.orthogonalization_epsilon,
            seed=state.random_seed,
            first_window=state.iter,
            wire=self.wire,
        )
        return _C.Way(codec, [setting.carrier_of(self.group(setting))])

    def _load_kernels(self, setting: Setting) -> None:
        setting.load_kernels(self.wire)
        if self.batched:
            setting.load_kernels()  # for unpack, from the result to the gradients
        real = {(tensor.device, tensor.dtype) for tensor in setting.parameters if not tensor.is_complex()}
        load_low_rank_kernels(real, self.state.matrix_approximation_rank)
        factors = {(device, torch.promote_types(dtype, torch.float32), self.wire or dtype) for device, dtype in real}
        load_kernels(factors)

    def allocate(self, setting: Setting) -> list[tuple[Tensor | None, Tensor | None]]:
        """Error and Q of each parameter, or of each bucket. In two levels, of those that this rank exchanges."""
        setting = for_shards(setting, whole=self.takes_whole_parameters)
        return self._of_buckets(setting) if self.batched else self._of_parameters(setting)

    def elements(self, setting: Setting) -> tuple[int, int]:
        """The number of elements of all gradients that it carries, and of what travels in their place."""
        setting = for_shards(setting, whole=self.takes_whole_parameters)
        carried = [parameter for index, parameter in enumerate(setting.parameters) if setting.carries(index)]
        before = sum(parameter.numel() for parameter in carried)
        rank = self.state.matrix_approximation_rank
        if self.batched:
            sides = [_side(setting, bucket) for bucket in setting.plan]
            return before, sum(2 * side * min(rank, side) for side in sides)
        after = 0
        for parameter in carried:
            rows, columns = matrix_shape(parameter)
            factors = (rows + columns) * min(rank, rows, columns)
            after += factors if self._compresses(parameter) else parameter.numel()
        return before, after

    def _of_parameters(self, setting: Setting) -> list[tuple[Tensor | None, Tensor | None]]:
        return [
            self.state.matrix(name, parameter, *matrix_shape(parameter), index)
            if self._compresses(parameter) and setting.carries(index)
            else (None, None)
            for index, (name, parameter) in enumerate(zip(setting.names, setting.parameters, strict=True))
        ]

    def _compresses(self, parameter: Tensor) -> bool:
        return is_compressed(parameter, self.state.matrix_approximation_rank, self.state.min_compression_rate)

    def _of_buckets(self, setting: Setting) -> list[tuple[Tensor | None, Tensor | None]]:
        """One square of memory for each bucket; a parameter's error is a view of a part of it."""
        state = self.state
        matrices: list[tuple[Tensor | None, Tensor | None]] = []
        for index, bucket in enumerate(setting.plan):
            side = _side(setting, bucket)
            like = setting.parameters[bucket[0]]
            square = torch.zeros(side * side, dtype=like.dtype, device=like.device)
            offset = 0
            for member in filter(setting.carries, bucket):
                name, count = setting.names[member], setting.parameters[member].numel()
                part = square[offset : offset + count]
                if state.use_error_feedback and count > 0:
                    if name in state.errors:
                        part.copy_(state.errors[name].view(-1))
                    state.errors[name] = part
                offset += count
            own_name = f"bucket {index}{setting.place}"
            _, q = state.matrix(own_name, like, side, side, index)
            state.errors.pop(own_name, None)
            matrices.append((square.view(side, side), q))
        return matrices


def _side(setting: Setting, bucket: Sequence[int]) -> int:
    elements = sum(setting.parameters[index].numel() for index in bucket if setting.carries(index))
    return math.isqrt(max(0, elements - 1)) + 1


def _basis(rank: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(columns, rank, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(vectors).Q.T.to(dtype).contiguous()
