"""Options of ``python -m fastddp`` and :func:`fastddp.patch`, for wrappers whose code says nothing about them.

They stand for arguments of the constructor that a script leaves out, and for a hook that it does not register. What the
script says itself wins. How options go together is checked where the constructor checks its arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict

from fastddp import comm_hooks
from fastddp.errors import see
from fastddp.ranks.listing import names_near
from fastddp.watch.corruption import OnCorruption
from fastddp.watch.options import Watch
from fastddp.watch.stall_report import OnStall
from fastddp.window.gradient_average import check_gradient_average


class JobOptions(TypedDict, total=False):
    """Each is optional, and named as the constructor's argument, unless something else is said here."""

    hook: str  # the hook that :func:`fastddp.comm_hooks.hook_named` knows by this name
    buckets: Literal["auto"] | str | os.PathLike[str]  # A plan's file, or "auto", which is ``bucket_cap_mb="auto"``
    hierarchy: Literal["node"]
    gradient_average: Literal["mean", "sum"]
    main_grads: Literal["grad", "main_grad"]
    wire_memory: Literal["registered", "symmetric"]
    on_stall: OnStall  # ``Watch(stall=...)``
    patience: float  # ``Watch(patience=...)``
    on_corruption: OnCorruption  # ``Watch(corruption=...)``
    audit_every: int | None  # ``Watch(audit_every=...)``


_OF_WATCH = {"on_stall": "stall", "patience": "patience", "on_corruption": "corruption", "audit_every": "audit_every"}
_SIZES = ("bucket_cap_mb", "bucket_cap_mb_list", "buckets")

in_force: JobOptions = {}
"""Those that wrappers get which are made now; :func:`fastddp.patch` changes it."""


def check_options(options: JobOptions) -> None:
    """Raise TypeError or ValueError if an option is unknown or has a value that no wrapper takes."""
    unknown = sorted(set(options) - set(JobOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"There is no option {unknown[0]!r}. {names_near(unknown[0], JobOptions.__annotations__)}" + see("FD024")
        )
    _watch(options)
    if "hook" in options:
        comm_hooks.hook_named(options["hook"])
    if "gradient_average" in options:
        check_gradient_average(options["gradient_average"])
    if options.get("hierarchy", "node") != "node":
        raise ValueError(f'hierarchy is "node" here, not {options["hierarchy"]!r}.' + see("FD024"))


def constructor_arguments(options: JobOptions, given: Collection[str]) -> dict[str, Any]:
    """What ``options`` say about arguments of the constructor that are not ``given``."""
    arguments: dict[str, Any] = {
        name: options[name]  # type: ignore[literal-required]
        for name in ("hierarchy", "gradient_average", "main_grads", "wire_memory")
        if name in options and name not in given
    }
    if "buckets" in options and not any(name in given for name in _SIZES):
        is_auto = options["buckets"] == "auto"
        arguments["bucket_cap_mb" if is_auto else "buckets"] = options["buckets"]
    if "watch" not in given and any(name in options for name in _OF_WATCH):
        arguments["watch"] = _watch(options)
    return arguments


def _watch(options: JobOptions) -> Watch:
    said = {of_watch: options[name] for name, of_watch in _OF_WATCH.items() if name in options}  # type: ignore[literal-required]
    return Watch(**said)


def hook_in_force() -> tuple[object, comm_hooks.Hook] | None:
    """The hook of a wrapper that is made now, and its state; None: no option says so."""
    return comm_hooks.hook_named(in_force["hook"]) if "hook" in in_force else None


def check_names_of_arguments(constructor: Callable[..., None], named: Collection[str]) -> None:
    """Raise TypeError if there is no argument of one of these names."""
    _, *known = inspect.signature(constructor).parameters
    for name in named:
        if name not in known:
            raise TypeError(f"There is no argument {name!r}. {names_near(name, known)}" + see("FD024"))


Of = ParamSpec("Of")


def with_job_options(constructor: Callable[Concatenate[Any, Of], None]) -> Callable[Concatenate[Any, Of], None]:
    """Decorate a wrapper's constructor: the options in force stand for arguments that its caller leaves out."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def construct(self: object, /, *args: Of.args, **kwargs: Of.kwargs) -> None:
        check_names_of_arguments(constructor, kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        constructor(self, *args, **(constructor_arguments(in_force, given) | kwargs))  # type: ignore[arg-type]

    return construct
