"""Every backend says what a caller may rely on: capture, repeatability, roundings."""

from __future__ import annotations

import importlib

import pytest

import cuda_moe
import rocm_moe
from portamoe.backend import Announcement
from portamoe.torch_backend import BACKEND as TORCH


def _backend(named):
    module, _, attribute = (named.target if isinstance(named, Announcement) else named).partition(":")
    return getattr(importlib.import_module(module), attribute)


EVERY = [TORCH, *(_backend(named) for package in (rocm_moe, cuda_moe) for named in package.BACKENDS)]


@pytest.mark.parametrize("backend", EVERY, ids=lambda backend: backend.name)
def test_it_says_whether_it_can_be_captured_and_repeats(backend):
    """Nothing is left to what a reader of the attribute takes for granted."""
    assert isinstance(backend.graph_safe, bool)
    assert isinstance(backend.deterministic, bool)
    assert backend.roundings in (1, 2, 4)


def test_atomics_and_foreign_tables_promise_no_repeatability():
    unsure = {backend.name for backend in EVERY if not backend.deterministic}
    assert unsure == {"aiter", "flashinfer_cutedsl_atomic"}


@pytest.mark.parametrize("named", [n for p in (rocm_moe, cuda_moe) for n in p.BACKENDS if isinstance(n, Announcement)])
def test_an_announcement_is_what_the_backend_says(named):
    backend = _backend(named)
    assert (named.name, named.priority) == (backend.name, backend.priority)
