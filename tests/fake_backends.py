"""Backends that only decide, to test the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from portamoe.decision import Reason


class FakeBackend:
    """Accepts, or rejects for the reasons given, or raises what it was given."""

    def __init__(
        self,
        name: str,
        priority: int = 0,
        reasons: Sequence[Reason] = (),
        *,
        on_request: Reason | None = None,
        error: Exception | None = None,
    ) -> None:
        self.name = name
        self.package = f"{name}_package"
        self.priority = priority
        self.reasons = reasons
        self.on_request = on_request
        self.error = error

    def check(self, *_: Any) -> list[Reason]:
        if self.error:
            raise self.error
        return list(self.reasons)

    def only_on_request(self, *_: Any) -> Reason | None:
        return self.on_request
