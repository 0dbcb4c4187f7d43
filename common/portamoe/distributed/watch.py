"""Who is missing: every rank tells the group's store where it is, and survivors of a failed step read it.

A thread writes one short record a `interval`, so that a call costs nothing: it only changes two attributes. A rank
whose record no longer changes is dead (or its whole process is stopped); one that lives, but is behind, is slow.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from typing import Any

#: Share of the time-out that a step may take; the rest is for finding out who is missing.
_WAIT_SHARE = 0.7
_INTERVALS_A_TIMEOUT = 12
_LONGEST_INTERVAL = 1.0
#: Intervals between the two readings of the records.
_LOOK_INTERVALS = 2.5


class RankError(RuntimeError):
    """Ranks did not take part in a step.

    ranks:  their numbers in the group; empty where all were there and the transport failed
    step:   the step that they did not reach
    """

    def __init__(self, message: str, ranks: tuple[int, ...], step: str) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.step = step


@dataclass
class Position:
    """Where a rank is: records written, steps begun, call and step by name, and whether it has given up."""

    beat: int = 0
    count: int = 0
    call: int = 0
    step: str = "before the first call"
    failed: bool = False


class Watch:
    """This rank's records in the store, and the look at those of the others.

    store:    a torch.distributed store that all ranks of the group reach
    prefix:   of the keys, the same on all ranks and used by no other watch
    timeout:  seconds; a missing rank is named before they have passed
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.interval = min(_LONGEST_INTERVAL, timeout / _INTERVALS_A_TIMEOUT)
        self.position = Position()
        self._store, self._prefix = store, prefix
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=_write_records,
            args=(store, self._key(rank), self.position, self.interval, self._end),
            name="portamoe-watch",
            daemon=True,
        )
        self._thread.start()
        self.close = weakref.finalize(self, _stop, self._end, self._thread)

    @property
    def wait_seconds(self) -> float:
        """Seconds after which a step counts as failed."""
        return self.timeout * _WAIT_SHARE

    def begin(self, call: int, step: str) -> None:
        """Note that this rank begins a step."""
        self.position.call = call
        self.position.step = step
        self.position.count += 1

    def blame(self, error: BaseException) -> RankError:
        """Return the error that names who is missing at the present step, after a look at the records.

        error:  what the transport said
        """
        here = self.position
        here.failed = True
        where = f"step '{here.step}' of call {here.call}"
        try:
            self._store.set(self._key(self.rank), json.dumps(asdict(here)))
            before = self._read()
            time.sleep(_LOOK_INTERVALS * self.interval)
            after = self._read()
        except RuntimeError as lost:
            return RankError(
                f"{where} failed on rank {self.rank}, and the store is gone, so the process that hosted it (rank 0, "
                f"unless torchrun hosts it) has ended: {_first_line(lost)}; the step said: {_first_line(error)}",
                (0,),
                here.step,
            )
        missing = {r: why for r in before if (why := self._missing(before[r], after[r]))}
        if not missing:
            text = f"{where} failed on rank {self.rank} although no rank is behind: {_first_line(error)}"
            return RankError(text, (), here.step)
        listed = "; ".join(f"rank {r} {why}" for r, why in sorted(missing.items()))
        return RankError(
            f"{where} failed on rank {self.rank}: {listed}. The step said: {_first_line(error)}. The group cannot be "
            "used any more; end all ranks and start again",
            tuple(sorted(missing)),
            here.step,
        )

    def _missing(self, before: Position | None, after: Position | None) -> str:
        if after is None:
            return "has never been heard of"
        if after.failed:  # it waits for somebody else, as this rank did, or has ended after that
            return ""
        last = f"step '{after.step}' of call {after.call}"
        if before is None or after.beat == before.beat:
            return f"is dead or stopped, last seen at {last}"
        if after.count < self.position.count:
            return f"is alive but slow, still at {last}"
        return ""

    def _read(self) -> dict[int, Position | None]:
        out: dict[int, Position | None] = {}
        for rank in range(self.size):
            if rank != self.rank:
                key = self._key(rank)
                out[rank] = Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None
        return out

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _write_records(store: Any, key: str, position: Position, interval: float, end: threading.Event) -> None:
    while True:
        position.beat += 1
        try:
            store.set(key, json.dumps(asdict(position)))
        except RuntimeError:  # the store is gone: nobody is left to read it, and `blame` says so
            return
        if end.wait(interval):
            return


def _stop(end: threading.Event, thread: threading.Thread) -> None:
    end.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
