"""What was measured of a run: enough to plan its buckets again, for this network or another one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from fastddp.documents import DocumentFormat
from fastddp.planning.model import Gradient, Link

_FILE = DocumentFormat(
    "fastddp profile", 1, "profile", 'Write it anew: train with bucket_cap_mb="auto" and call model.save_profile(path).'
)


@dataclass(frozen=True)
class ProfiledGradient:
    """One gradient of a step."""

    name: str
    """Its parameter, as the module calls it."""
    ready: float
    """Seconds from the beginning of forward until the gradient was ready on the last rank; a median over steps."""
    bytes: int
    """That travel."""
    dtype: str
    """Of the parameter, as torch calls it without ``torch.``; with the device it decides who may share a bucket."""
    device: str


@dataclass(frozen=True)
class Profile:
    """A step of a model as it was measured: when gradients were ready, and what its process group's collectives cost.

    Raises:
        ValueError: there is no gradient, or a number that cannot be one.
    """

    gradients: tuple[ProfiledGradient, ...]
    ranks: int
    backend: str
    lanes: int
    """Over how many groups collectives are dealt (:mod:`fastddp.lanes`)."""
    link: Link

    def __post_init__(self) -> None:
        sensible = (
            self.gradients
            and self.ranks > 0
            and self.link.latency >= 0
            and self.link.bandwidth > 0
            and all(gradient.ready >= 0 and gradient.bytes >= 0 for gradient in self.gradients)
        )
        if not sensible:
            raise ValueError("there are no gradients, or times or sizes that cannot be")

    def model_gradients(self) -> list[Gradient]:
        """As :mod:`fastddp.planning.model` wants them, in the same order."""
        return [Gradient(g.ready, g.bytes, (g.dtype, g.device)) for g in self.gradients]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path`` as JSON; all ranks may do so at the same time, since they write the same."""
        _FILE.save(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` has written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not JSON, or was cut short; it holds something else, or a profile of another version of
                this format; or what it holds is no profile.
        """
        content = _FILE.load(path)
        try:
            return cls(
                gradients=tuple(ProfiledGradient(**entry) for entry in content["gradients"]),
                ranks=int(content["ranks"]),
                backend=str(content["backend"]),
                lanes=int(content["lanes"]),
                link=Link(**content["link"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} holds no valid profile: {what}.") from None
