"""Order of what is captured and timed, on a stand-in for torch.cuda: no GPU is needed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from portamoe.gpu_timing import capture, median_ms


@pytest.fixture
def said(monkeypatch):
    """What happened, in order; an event's time is the number of `action` before it, in steps of 2 ms."""
    said: list[str] = []

    class Stream:
        def wait_stream(self, other):
            said.append("wait")

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(said)
            said.append("event")

        def synchronize(self):
            said.append("synchronize")

        def elapsed_time(self, end):
            return float(said[self.at : end.at].count("action") * 2 * said.count("action"))

    @contextmanager
    def within(name):
        said.append(f"{name} begins")
        yield
        said.append(f"{name} ends")

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "synchronize": lambda: said.append("synchronize"),
        "CUDAGraph": object,
        "stream": lambda _: within("stream"),
        "graph": lambda _: within("graph"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return said


def test_a_call_runs_once_on_another_stream_before_it_is_captured(said):
    assert type(capture(lambda: said.append("action"))) is object
    first = ["wait", "stream begins", "action", "stream ends", "wait", "synchronize"]
    assert said == [*first, "graph begins", "action", "graph ends"]


def test_the_median_leaves_out_two_runs_and_what_happens_before_each(said):
    assert median_ms(lambda: said.append("action"), 3, before=lambda: said.append("before")) == 2 * 4
    assert said == ["before", "event", "action", "event", "synchronize"] * 5
    assert said.count("action") == 5
    assert median_ms(lambda: said.append("action"), 1) == 2 * 8
