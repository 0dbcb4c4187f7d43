"""Many child processes that run the acceptance set together; imports no torch.

Compiling takes most of the time, so every backend's checks are split into shares that run at once. Times are measured
after that, one backend at a time. A check that crashes or hangs costs its child: the next one goes on behind it.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.acceptance.shares import BEGIN, BROKEN, CHECK, GROUPS, Share, shares
from portamoe.child import Ended, run_module

if TYPE_CHECKING:
    from portamoe.device import Device
    from portamoe.spec import MoESpec

Json = dict[str, Any]

#: Children that one share may use up.
_CHILDREN = 4
#: More compile no faster together; a context of a GPU takes up to a gigabyte beside the problem.
_MOST_JOBS, _JOB_BYTES = 16, 3e9
#: With fewer, the children that wait for their turn to measure would keep the others from running.
_LEAST_FOR_TURNS = 4


@dataclass(frozen=True)
class Job:
    """A share of one backend's checks."""

    backend: str
    share: Share
    device: str
    spec: Json
    quick: bool
    turn: str | None

    def argument(self, done: Sequence[tuple[str, str]]) -> str:
        """Return what the child is started with; `done`: checks that it leaves out."""
        return json.dumps(
            {
                "backend": self.backend,
                "share": self.share.to_dict(),
                "device": self.device,
                "spec": self.spec,
                "quick": self.quick,
                "turn": self.turn if self.share.groups == ("timing",) else None,
                "done": list(done),
            }
        )


def default_jobs(device: Device) -> int:
    """Return how many children run at once: one on a CPU, else what cores and memory allow."""
    if device.vendor == "cpu":
        return 1
    cores = len(os.sched_getaffinity(0))
    memory = device.memory_free_bytes or device.memory_bytes or 0
    return max(1, min(_MOST_JOBS, cores, int(memory / _JOB_BYTES) or 1))


class _Heard:
    """What the children of one share have said."""

    def __init__(self, keep: Callable[[Json], None]) -> None:
        self.current: tuple[str, str] | None = None
        self.checks: list[Json] = []
        self._keep = keep

    @property
    def done(self) -> list[tuple[str, str]]:
        """Group and case of the checks that need not be run again."""
        return [(check["group"], check["case"]) for check in self.checks]

    def line(self, line: str) -> None:
        """Take a line of a child's output."""
        if line.startswith(BEGIN):
            begun = json.loads(line.removeprefix(BEGIN))
            self.current = (begun["group"], begun["case"])
        elif line.startswith(CHECK):
            self.check(json.loads(line.removeprefix(CHECK)))

    def check(self, check: Json) -> None:
        """Take a check that has ended."""
        self.checks.append(check)
        self.current = None
        self._keep(check)


class Pool:
    """Runs the acceptance set of several backends; `found` collects the checks as they come.

    jobs:     children at once, beside those that measure times
    timeout:  seconds that a child may take
    tell:     is called with a line of text for the user whenever a share has ended
    """

    def __init__(self, *, jobs: int, timeout: float, tell: Callable[[str], None]) -> None:
        self.found: list[Json] = []
        self._jobs, self._timeout, self._tell = jobs, timeout, tell
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._start = time.monotonic()

    def run(self, backends: Sequence[str], spec: MoESpec, device: Device, *, quick: bool) -> None:
        """Run everything; what ends this early, KeyboardInterrupt for one, ends all children first."""
        every = shares(self._jobs)
        timed = [share for share in every if share.groups == ("timing",) and not quick]
        plain = [share for share in every if share.groups != ("timing",)]
        with (
            _turns() as (file, free),
            ThreadPoolExecutor(self._jobs) as workers,
            ThreadPoolExecutor(max(1, len(backends))) as measuring,
        ):

            def job(backend: str, share: Share) -> Job:
                return Job(backend, share, device.torch_name, spec.to_dict(), quick, file)

            try:
                early = self._jobs >= _LEAST_FOR_TURNS
                submit = measuring.submit if early else workers.submit
                waiting = [submit(self._one, job(b, s)) for s in timed for b in backends] if early else []
                working = [workers.submit(self._one, job(b, s)) for s in plain for b in backends]
                self._wait(working)
                free()
                if not early:
                    for share in timed:
                        for backend in backends:
                            self._wait([submit(self._one, job(backend, share))])
                self._wait(waiting)
            except BaseException:
                self._stop.set()
                raise

    def _wait(self, futures: Sequence[Future[None]]) -> None:
        pending = set(futures)
        while pending:  # in pieces, so that a signal is seen
            done, pending = wait(pending, timeout=0.2)
            for future in done:
                future.result()

    def checks(self, backends: Sequence[str]) -> list[Json]:
        """Return what was found so far, by backend and group."""
        with self._lock:
            known = list(self.found)
        order = {name: at for at, name in enumerate(backends)}
        return sorted(known, key=lambda c: (order[c["backend"]], GROUPS.index(c["group"])))

    def _one(self, job: Job) -> None:
        """Run a share in as many children as its crashes need."""
        heard = _Heard(self._keep)
        for _ in range(_CHILDREN):
            if self._stop.is_set():
                return
            heard.current = None
            start = time.monotonic()
            child = run_module(
                "portamoe.acceptance.child",
                [job.argument(heard.done)],
                self._timeout,
                _environment(self._jobs),
                on_line=heard.line,
                stop=self._stop,
            )
            if self._stop.is_set():
                return
            if child.code == 0:
                break
            if child.code == BROKEN and heard.current is None:
                continue
            heard.check(_crash(job, child, heard, time.monotonic() - start, self._timeout))
            if child.code is None or heard.checks[-1]["group"] == "process":
                break
        else:
            why = f"{_CHILDREN} children ended early; the checks behind {' '.join(heard.done[-1])} were not run"
            heard.check(_said(job, ("process", str(job.share)), "not run", why))
        self._say(job, heard.checks)

    def _keep(self, check: Json) -> None:
        with self._lock:
            self.found.append(check)

    def _say(self, job: Job, mine: Sequence[Json]) -> None:
        counts = {status: sum(c["status"] == status for c in mine) for status in ("passed", "failed", "not run")}
        text = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing"
        self._tell(f"[{time.monotonic() - self._start:4.0f} s] {job.backend} {job.share}: {text}")


def _environment(jobs: int) -> dict[str, str]:
    # Verdicts of the parent's cache, but a mode set outside must not skip the canary.
    env = {"PORTAMOE_CANARY": "auto"}
    if jobs > 1:
        env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return env


def _crash(job: Job, child: Ended, heard: _Heard, seconds: float, timeout: float) -> Json:
    """Return a failed check: the one that was running, or the process itself."""
    if child.code is None:
        how = f"no end within {timeout:g} s"
    else:
        how = f"ended by {child.signal}" if child.signal else f"exit code {child.code}"
    group, case = heard.current or ("process", str(job.share))
    if heard.current is None:
        how += f" after {' '.join(heard.done[-1]) if heard.checks else 'nothing'}"
    return _said(job, (group, case), "failed", "; ".join([f"child process: {how}", *child.last_words]), seconds)


def _said(job: Job, what: tuple[str, str], status: str, detail: str, seconds: float = 0.0) -> Json:
    """Return a check that the parent adds."""
    group, case = what
    facts = {"backend": job.backend, "group": group, "case": case, "status": status, "detail": detail}
    return facts | {"seconds": seconds, "figures": {}}


@contextmanager
def _turns() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a file that is locked until the second value is called: then children take their turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turn"
        with path.open("a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield str(path), lambda: fcntl.flock(lock, fcntl.LOCK_UN)
