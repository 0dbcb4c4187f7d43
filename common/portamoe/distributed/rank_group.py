"""A torch.distributed group with what every step needs: bytes on the wire, a limit in time, and names of steps."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from portamoe.distributed.watch import RankError, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Seconds between two looks at a collective on a GPU that the host waits for.
_POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class StepRecord:
    """One step of a recorded call: its name, seconds, and bytes that this rank sent to others."""

    step: str
    seconds: float
    sent_bytes: int


class RankGroup:
    """The ranks of one torch.distributed group, for any number of `ExpertParallel` layers.

    group:    default: all ranks
    device:   where the layers' tensors are. With gloo, GPU tensors go through host memory.
    timeout:  seconds until a dead or slow rank is named; default: the group's own

    Everything travels as uint8, or as int32 where numbers are added, so no transport refuses a dtype. Creating it is a
    collective operation. Close it, or let it go, before `destroy_process_group`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str, *, timeout: float | None = None
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive seconds, got {timeout}")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        members: Any = self.group
        backend = members._get_backend(device if _has_backend(self.group, device) else torch.device("cpu"))
        self.backend = str(backend.name()).lower()
        self.staged = device.type != "cpu" and self.backend == "gloo"
        self.timeout = backend.options._timeout.total_seconds() if timeout is None else timeout
        self.calls = 0
        self._layers = 0
        self.records: list[StepRecord] | None = None
        self._broken: RankError | None = None
        prefix = self.gather_objects(uuid.uuid4().hex)[0]
        #: The same on all ranks and of no other RankGroup: int64.
        self.identity = int(prefix[:15], 16)
        store: Any = distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store  # a connection that only the records use
        self.watch = Watch(store, f"portamoe/{prefix}", self.rank, self.size, self.timeout)

    def close(self) -> None:
        """End the thread that writes this rank's records."""
        self.watch.close()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in order of ranks; for construction only."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def add_layer(self) -> int:
        """Return the number of a new layer: the same on all ranks that make their layers in the same order."""
        self._layers += 1
        return self._layers

    def begin_call(self) -> None:
        """Count a call; raises what broke the group before."""
        if self._broken is not None:
            raise RankError(f"the group is broken: {self._broken}", self._broken.ranks, self._broken.step)
        self.calls += 1

    @contextmanager
    def step(self, name: str, sent_bytes: int = 0) -> Iterator[None]:
        """Name what is done inside; recorded where `records` is a list, which waits for the device."""
        self.watch.begin(self.calls, name)
        if self.records is None:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.records.append(StepRecord(name, time.perf_counter() - start, sent_bytes))

    def all_gather(self, step: str, out: torch.Tensor, x: torch.Tensor, *, host: bool = False) -> None:
        """Bring every rank's equal-sized x (n, …) into out (ranks·n, …), in order of ranks.

        host:  the host needs the result at once, so it waits for it here, no longer than the time-out
        """
        with self.step(step, _bytes(x) * (self.size - 1)):
            self._run(_named("all_gather_single", "all_gather_into_tensor"), out, x, host=host)

    def all_to_all(
        self, step: str, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> None:
        """Send `in_splits[r]` rows of x to rank r and receive `out_splits[r]` rows from it, in order of ranks."""
        sent = (len(x) - in_splits[self.rank]) * (_bytes(x) // max(1, len(x)))
        with self.step(step, sent):
            self._run(
                dist.all_to_all_single, out, x, output_split_sizes=list(out_splits), input_split_sizes=list(in_splits)
            )

    def reduce_scatter(self, step: str, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add x (ranks·n, …) over the ranks and keep this rank's part in out (n, …)."""
        with self.step(step, _bytes(out) * (self.size - 1)):
            self._run(_named("reduce_scatter_single", "reduce_scatter_tensor"), out, x)

    def _run(
        self, collective: Callable[..., Any], out: torch.Tensor, x: torch.Tensor, *, host: bool = False, **kwargs: Any
    ) -> None:
        if self._capturing():
            collective(out, x, group=self.group, **kwargs)
            return
        target, source = (out, x) if not self.staged else (torch.empty_like(out, device="cpu"), x.cpu())
        try:
            work = collective(target, source, group=self.group, async_op=True, **kwargs)
            self._wait(work, host=host)
        except RuntimeError as error:
            self._broken = self.watch.blame(error)
            raise self._broken from error
        if self.staged:
            out.copy_(target)

    def _wait(self, work: Any, *, host: bool) -> None:
        from datetime import timedelta

        if self.device.type == "cpu" or self.staged:
            work.wait(timedelta(seconds=self.watch.wait_seconds))
            return
        if host:
            end = time.monotonic() + self.watch.wait_seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError(f"not complete after {self.watch.wait_seconds:.1f} s")
                time.sleep(_POLL_SECONDS)
        work.wait()  # the stream waits, not the host

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self.device.type == "cuda" and not self._capturing():
            torch.cuda.synchronize(self.device)


def _named(new: str, old: str) -> Callable[..., Any]:
    """Return a collective by the name it has had since torch 2.13, or the one before."""
    collective: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return collective


def _has_backend(group: Any, device: torch.device) -> bool:
    return device.type in {d.type for d in group._device_types}


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
