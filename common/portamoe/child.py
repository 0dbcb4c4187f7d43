"""Python in a child process that may crash or hang: started apart, waited for, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

#: Lines of a child's stderr that go into a report.
_TAIL = 3


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


def run_module(module: str, arguments: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run `python -m module arguments` for at most `timeout` seconds.

    env:  set in the child beside this process's environment

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
        code: int | None = None
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        err.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
        stderr = err.read().decode(errors="replace").strip().splitlines()
    return Ended(code, tuple(lines), tuple(stderr))
