"""A backend's verdict on a spec and device, and the reasons behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: Has the backend computed the right numbers for this spec on this device before?
Verification = Literal["verified", "unverified"]


@dataclass(frozen=True)
class Reason:
    """Why something is refused: what was looked at, what was found, what it takes, what to do.

    what:    the thing that was checked ("matrix instructions", "triton", "activation")
    value:   what was found ("gfx90a", "not installed", 384)
    limit:   what is needed ("gfx950", ">= 3.4", "a multiple of 128"); None if nothing would do
    remedy:  what the user can do ("use triton_unfused"); None if nothing is known
    """

    what: str
    value: str | int | float | None
    limit: str | int | float | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        text = f"{self.what}: {self.value}"
        if self.limit is not None:
            text += f" (needs {self.limit})"
        return text + (f"; {self.remedy}" if self.remedy else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Accepted:
    """The backend would serve the spec on the device."""

    backend: str
    package: str
    verification: Verification = "unverified"
    #: Why the automatic choice passes over it although it would work; None if it does not.
    only_on_request: Reason | None = None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Nothing speaks against it."""
        return ()


@dataclass(frozen=True)
class Rejected:
    """The backend cannot serve the spec on the device, for every reason listed."""

    backend: str
    package: str
    reasons: tuple[Reason, ...]

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError(f"a rejection of {self.backend} needs at least one reason")


Decision = Accepted | Rejected


class BackendRejected(RuntimeError):
    """The backend that was asked for by name, or every backend, is rejected; says why."""

    def __init__(self, message: str, decisions: tuple[Decision, ...]) -> None:
        super().__init__(message)
        self.decisions = decisions
