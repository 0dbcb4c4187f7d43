"""Which backend is chosen, and that every other one says why not."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from portamoe import registry
from portamoe.backend import Announcement
from portamoe.decision import Accepted, BackendRejected, Reason, Rejected
from portamoe.registry import choose, choose_or_explain, decide, select
from portamoe.spec import GPT_OSS, KIMI_K3
from tests.fake_backends import FakeBackend
from tests.host_recordings import device

WHY = Reason("arch", "gfx90a", "gfx950", "use another")


@pytest.fixture
def announce(monkeypatch):
    """Return a function that replaces all backends."""

    def install(*backends):
        ordered = sorted(backends, key=lambda b: (-getattr(b, "priority", 0), b.name))
        monkeypatch.setattr(registry, "backends", lambda: tuple(ordered))

    monkeypatch.delenv("PORTAMOE_BACKEND", raising=False)
    return install


@pytest.fixture
def fresh():
    """Look for backends anew, and forget what the test announced."""
    registry.backends.cache_clear()
    yield
    registry.backends.cache_clear()


def plug_in(site, monkeypatch, name, source, entry=None):
    """Install a distribution whose entry point announces a backend."""
    monkeypatch.syspath_prepend(site)
    (site / f"{name}.py").write_text(source)
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[portamoe.backends]\n{name} = {entry or name + ':BACKEND'}\n")


PLUG_IN = """
from portamoe.decision import Reason
class Backend:
    name, package, priority = {name!r}, "elsewhere", {priority}
    def check(self, spec, device): return []
    def only_on_request(self, spec, device): return None
BACKEND = Backend()
"""


def test_the_highest_priority_that_accepts_is_chosen(announce):
    announce(FakeBackend("low", 1), FakeBackend("high", 9, [WHY]), FakeBackend("middle", 5))
    selection = choose(KIMI_K3, device())
    assert selection.name == "middle"
    assert [d.backend for d in selection.decisions] == ["high", "middle", "low"]
    assert select(KIMI_K3, device()).name == "middle"
    rejected = selection.decisions[0]
    assert isinstance(rejected, Rejected)
    assert rejected.reasons == (WHY,)


def test_ties_are_broken_by_name(announce):
    announce(FakeBackend("b"), FakeBackend("a"), FakeBackend("c"))
    assert choose(KIMI_K3, device()).name == "a"


def test_a_named_backend_is_obeyed(announce):
    announce(FakeBackend("high", 9), FakeBackend("low", 1))
    assert select(KIMI_K3, device(), "low").name == "low"
    assert choose(KIMI_K3, device(), "low").why == "asked for by backend='low'"


def test_a_named_backend_that_is_rejected_raises_and_nothing_replaces_it(announce):
    announce(FakeBackend("high", 9, [WHY, Reason("triton", "3.2", ">= 3.4")]), FakeBackend("low", 1))
    with pytest.raises(BackendRejected, match=r"gfx90a.*use another.*triton: 3\.2") as error:
        select(KIMI_K3, device(), "high")
    assert [d.backend for d in error.value.decisions] == ["high", "low"]
    assert choose(KIMI_K3, device(), "high").name is None


def test_the_environment_is_obeyed_and_an_argument_goes_before_it(announce, monkeypatch):
    announce(FakeBackend("high", 9), FakeBackend("low", 1), FakeBackend("no", 0, [WHY]))
    monkeypatch.setenv("PORTAMOE_BACKEND", "low")
    assert select(KIMI_K3, device()).name == "low"
    assert select(KIMI_K3, device(), "high").name == "high"
    monkeypatch.setenv("PORTAMOE_BACKEND", "no")
    with pytest.raises(BackendRejected, match="PORTAMOE_BACKEND=no"):
        select(KIMI_K3, device())
    monkeypatch.setenv("PORTAMOE_BACKEND", "")
    assert select(KIMI_K3, device()).name == "high"


def test_a_recording_brings_its_own_environment(announce, monkeypatch):
    announce(FakeBackend("high", 9), FakeBackend("low", 1))
    monkeypatch.setenv("PORTAMOE_BACKEND", "high")
    replayed = device(env={"PORTAMOE_BACKEND": "low"}, recorded="/somewhere")
    assert choose(KIMI_K3, replayed).name == "low"
    assert choose(KIMI_K3, device(recorded="/somewhere")).why == "first in order of those that accept"


def test_an_unknown_name_lists_the_known_ones(announce, monkeypatch):
    announce(FakeBackend("a"), FakeBackend("b"))
    with pytest.raises(ValueError, match="unknown backend 'c'; known: a, b"):
        select(KIMI_K3, device(), "c")
    monkeypatch.setenv("PORTAMOE_BACKEND", "c")
    with pytest.raises(ValueError, match="PORTAMOE_BACKEND=c: unknown backend 'c'; known: a, b"):
        select(KIMI_K3, device())
    explained = choose_or_explain(KIMI_K3, device(), decide(KIMI_K3, device()))
    assert explained.name is None
    assert "known: a, b" in explained.why


def test_on_request_only_is_passed_over_unless_named(announce):
    slow = Reason("speed", "interpreted", None, "name it")
    announce(FakeBackend("high", 9, on_request=slow), FakeBackend("low", 1))
    assert choose(KIMI_K3, device()).name == "low"
    assert choose(KIMI_K3, device(), "high").name == "high"
    assert decide(KIMI_K3, device())[0].only_on_request == slow


def test_when_none_accepts_every_reason_is_given(announce):
    announce(FakeBackend("a", 2, [WHY]), FakeBackend("b", 1, on_request=Reason("speed", "slow")))
    with pytest.raises(BackendRejected, match=r"every backend is rejected: b: only on request: speed: slow \| a: arch"):
        select(KIMI_K3, device())


def test_a_check_that_raises_is_a_reason(announce):
    announce(FakeBackend("broken", 9, error=KeyError("gfx1300")), FakeBackend("fine"))
    selection = choose(KIMI_K3, device("amd", "gfx1300"))
    assert selection.name == "fine"
    (reason,) = selection.decisions[0].reasons
    assert reason.value == "KeyError: 'gfx1300'"
    assert "broken_package" in reason.remedy


def test_decisions_start_unverified(announce):
    announce(FakeBackend("a"))
    assert decide(KIMI_K3, device()) == (Accepted("a", "a_package", "unverified"),)


def test_plug_ins_are_found_by_entry_point(fresh, tmp_path, monkeypatch):
    plug_in(tmp_path, monkeypatch, "faster", PLUG_IN.format(name="faster", priority=10_000))
    decisions = decide(KIMI_K3, device())
    assert decisions[0] == Accepted("faster", "elsewhere")
    assert "torch" in [d.backend for d in decisions]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no ROCm')", "RuntimeError: no ROCm"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyError('gfx')", "KeyError: 'gfx'"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("x = (", "SyntaxError"),
        ("raise OSError(30, 'Read-only file system')", "Read-only file system"),
        ("", "AttributeError"),
    ],
)
def test_a_plug_in_may_raise_anything_at_import(fresh, tmp_path, monkeypatch, source, text):
    plug_in(tmp_path, monkeypatch, "broken_plug_in", source)
    decisions = {d.backend: d for d in decide(KIMI_K3, device("cpu", "cpu"))}
    (reason,) = decisions["broken_plug_in"].reasons
    assert reason.what == "broken_plug_in"
    assert reason.value.startswith("import failed: ")
    assert text in reason.value
    assert "torch" in decisions


def test_a_plug_in_that_is_no_backend(fresh, tmp_path, monkeypatch):
    plug_in(tmp_path, monkeypatch, "half", "class B:\n    name = 'half'\n    priority = 'high'\nBACKEND = B()\n")
    decisions = {d.backend: d for d in decide(KIMI_K3, device())}
    assert decisions["half"].reasons[0].value == "lacks package, priority, check, only_on_request"


def test_a_plug_in_may_not_take_a_name(fresh, tmp_path, monkeypatch):
    plug_in(tmp_path, monkeypatch, "impostor", PLUG_IN.format(name="torch", priority=10_000))
    decisions = {d.backend: d for d in decide(KIMI_K3, device("cpu", "cpu"))}
    assert decisions["torch"].package == "portamoe"
    assert "no other backend" in str(decisions["impostor"].reasons[0])


def test_an_announced_backend_is_imported_only_for_its_vendors(fresh, tmp_path, monkeypatch):
    source = PLUG_IN.format(name="late", priority=7)
    for name, text in (("late_package", source), ("late_broken", "raise RuntimeError('no ROCm')")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    announcements = tuple(
        Announcement(f"{module}:BACKEND", name, 7, ("amd", "nvidia"))
        for module, name in (("late_package", "late"), ("late_broken", "broken"))
    )
    monkeypatch.setitem(sys.modules, "late_vendor", types.SimpleNamespace(BACKENDS=announcements))
    monkeypatch.setattr(registry, "VENDOR_PACKAGES", ("late_vendor",))
    on_cpu = {d.backend: d for d in decide(KIMI_K3, device("cpu", "cpu"))}
    for name in ("late", "broken"):
        assert str(on_cpu[name].reasons[0]).startswith("device: cpu (needs vendor amd or nvidia); run where")
    assert "late_package" not in sys.modules
    on_gpu = {d.backend: d for d in decide(KIMI_K3, device("amd", "gfx90a"))}
    assert isinstance(on_gpu["late"], Accepted)
    assert "RuntimeError: no ROCm" in str(on_gpu["broken"].reasons[0])
    assert registry.named("late").name == "late"
    assert registry.named("broken") is None


def test_a_vendor_package_that_cannot_be_imported_is_a_reason(fresh, monkeypatch):
    monkeypatch.setattr(registry, "VENDOR_PACKAGES", ("no_such_vendor",))
    decisions = {d.backend: d for d in decide(KIMI_K3, device())}
    assert "No module named" in str(decisions["no_such_vendor"].reasons[0])


def test_every_announced_backend_of_this_library_loads(fresh):
    for backend in registry.backends():
        loaded = registry.named(backend.name)
        assert loaded is not None, backend
        # What is announced without an import is what the module says.
        assert (loaded.name, loaded.package, loaded.priority) == (backend.name, backend.package, backend.priority)
    assert len({b.name for b in registry.backends()}) == len(registry.backends())
    assert {b.package for b in registry.backends()} <= {"portamoe", "rocm_moe", "cuda_moe"}


@pytest.mark.parametrize("spec", [KIMI_K3, GPT_OSS, dataclasses.replace(KIMI_K3, weight_format="nvfp4")])
@pytest.mark.parametrize(
    "where",
    [
        ("amd", "gfx1300"),
        ("amd", "gfx906"),
        ("nvidia", "sm_130"),
        ("nvidia", "unknown"),
        ("nvidia", "sm_75"),
        ("cpu", "cpu"),
    ],
)
def test_an_arch_that_nobody_listed_is_an_answer_not_an_exception(spec, where):
    hip_and_cuda = {"version": "2.11.0", "hip": "7.2", "cuda": "13.0"}
    for decision in decide(spec, device(*where, torch=hip_and_cuda)):
        assert not any(reason.what == "check" for reason in decision.reasons), decision
        if decision.backend == "torch":
            assert isinstance(decision, Accepted)


def test_every_reason_can_be_acted_on():
    """A rejection has the value that was found, and a limit or a remedy."""
    for where in (("amd", "gfx90a"), ("amd", "gfx950"), ("nvidia", "sm_90"), ("nvidia", "sm_103"), ("cpu", "cpu")):
        for decision in decide(KIMI_K3, device(*where)):
            for reason in decision.reasons:
                assert reason.value is not None, decision
                assert reason.limit is not None or reason.remedy, decision
