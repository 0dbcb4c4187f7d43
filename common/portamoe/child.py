"""Python in a child process that may crash or hang: started apart, waited for, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

#: Lines of a child's stderr that go into a report.
_TAIL = 3
#: Seconds between two looks at what the child has printed.
_PAUSE = 0.05


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: a signal), None if its time was up, and what it printed."""

    code: int | None
    lines: tuple[str, ...]
    stderr: tuple[str, ...]

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of stderr."""
        return self.stderr[-_TAIL:]

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended the child, None if none did."""
        return signal.Signals(-self.code).name if self.code is not None and self.code < 0 else None


def run_module(
    module: str,
    arguments: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    *,
    on_line: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Ended:
    """Run `python -m module arguments` for at most `timeout` seconds.

    env:      set in the child beside this process's environment
    on_line:  is called with every line that the child prints, soon after it did
    stop:     ends the child, as if its time were up, when it is set

    The child finds what this process finds, and no module of the current folder beside it. When it has ended, or its
    time is up, its whole process group is killed: a compiler may outlive the process that started it.
    """
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)  # noqa: PTH100
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **(env or {})},
            start_new_session=True,
        )
        lines = _Lines(out.fileno(), on_line)
        code: int | None = None
        until = time.monotonic() + timeout
        try:
            while code is None and time.monotonic() < until and not (stop is not None and stop.is_set()):
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(min(_PAUSE, max(0.0, until - time.monotonic())))
                lines.read()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        lines.read(rest=True)
        err.seek(0)
        stderr = err.read().decode(errors="replace").strip().splitlines()
    return Ended(code, tuple(lines.all), tuple(stderr))


class _Lines:
    """The lines of a file that another process is writing."""

    def __init__(self, file: int, on_line: Callable[[str], None] | None) -> None:
        self.all: list[str] = []
        self._file, self._on_line = file, on_line
        self._offset, self._part = 0, b""

    def read(self, *, rest: bool = False) -> None:
        """Take what is new; `rest`: also a last line that has no end."""
        while data := os.pread(self._file, 1 << 20, self._offset):
            self._offset += len(data)
            self._part += data
        whole, end, self._part = self._part.rpartition(b"\n")
        if rest and self._part:
            whole, end, self._part = whole + end + self._part, b"\n", b""
        if end:
            for line in whole.decode(errors="replace").splitlines():
                self.all.append(line)
                if self._on_line is not None:
                    self._on_line(line)
