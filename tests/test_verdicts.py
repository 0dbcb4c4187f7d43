"""Verdicts: what a key distinguishes, and files that survive crashes, other ranks and homes that cannot be written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from portamoe import verdicts
from portamoe.activations import SiTU, SwiGLU
from portamoe.decision import Accepted, Reason, Rejected
from portamoe.spec import GPT_OSS, KIMI_K3
from portamoe.verdicts import Verdict, VerdictStore, canary_spec, key_of
from tests.fake_backends import FakeBackend
from tests.host_recordings import device, recorded

BACKEND = FakeBackend("some")
GPU = device(
    distributions={"torch": "2.11.0", "triton": "3.6.0", "tqdm": "4.60"},
    env={"AITER_SITUV2_A4W4": "0", "TRITON_CACHE_DIR": "/scratch/a"},
    rocm={"version": "7.2", "driver": "6.16"},
    vendor={"aiter": {"version": "0.1.20"}},
)
REASON = Reason("canary", "computed SwiGLU instead of SiTU", "the reference's numbers", "use another")
PASSED = Verdict(True, None, ((None, 1), ("two_cta", 64)), ("GeGLU",), 0.5, "2026-11-30T12:00:00+00:00")
FAILED = Verdict(False, REASON, ((None, 1),))


def small(**changes):
    return canary_spec(BACKEND, replace(KIMI_K3, **changes), GPU)


def key(backend=BACKEND, gpu=GPU, spec=None):
    return key_of(backend, spec or small(), gpu)


def with_host(**changes):
    return replace(GPU, host=replace(GPU.host, **changes))


# --- keys -------------------------------------------------------------------------------------------------------------

ANOTHER_KEY = {
    "backend": lambda: key(FakeBackend("other")),
    "arch": lambda: key(gpu=replace(GPU, arch="gfx942")),
    "version of a package": lambda: key(gpu=with_host(distributions={"torch": "2.11.0", "triton": "3.6.1"})),
    "vendor's facts": lambda: key(gpu=with_host(vendor={"aiter": {"version": "0.1.21"}})),
    "driver": lambda: key(gpu=with_host(rocm={"version": "7.2", "driver": "6.17"})),
    "variable that switches kernels": lambda: key(gpu=with_host(env={"AITER_SITUV2_A4W4": "1"})),
    "own tiles": lambda: key(gpu=with_host(env=dict(GPU.host.env) | {"PORTAMOE_TUNED_DIR": "/scratch/tiles"})),
    "beta": lambda: key(spec=small(activation=SiTU(beta=4.5, linear_beta=25.0))),
    "linear_beta": lambda: key(spec=small(activation=SiTU(beta=4.0))),
    "activation": lambda: key(spec=small(activation=SwiGLU())),
    "weight format": lambda: key(spec=small(weight_format="nvfp4")),
    "activation format": lambda: key(spec=small(activation_format="mxfp8")),
    "biases": lambda: key(spec=small(bias=True)),
    "a rank": lambda: key(spec=small(local_experts=range(112))),
    "remainder of a size": lambda: key(spec=small(hidden_size=2880)),
}


@pytest.mark.parametrize("what", ANOTHER_KEY)
def test_another_key_for_another(what):
    """In the text, by which this process remembers, and in the file's name."""
    assert ANOTHER_KEY[what]().text != key().text
    assert ANOTHER_KEY[what]().file != key().file


def test_the_backends_own_files_are_part_of_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(verdicts, "_fingerprint", lambda _: "edited")
    assert key().text != before.text
    assert key().file != before.file


def test_what_no_kernel_depends_on_is_in_no_key():
    assert key(gpu=with_host(distributions=dict(GPU.host.distributions) | {"tqdm": "4.70"})) == key()
    assert key(gpu=with_host(env=dict(GPU.host.env) | {"TRITON_CACHE_DIR": "/scratch/b"})) == key()
    assert key(gpu=replace(GPU, index=3)) == key()
    assert key(spec=small(hidden_size=7168)) == key()


@pytest.mark.parametrize("edited", ["backend.py", "deeper/kernel.py", "tuned/gfx90a.json"])
def test_an_edited_source_is_another_key(tmp_path, monkeypatch, edited):
    """Kernels and tables lie in folders of their own, so every file of the package counts."""
    for file in ("package/__init__.py", "package/backend.py", "package/deeper/kernel.py", "package/tuned/gfx90a.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    package = ModuleType("package")
    package.__file__ = str(tmp_path / "package/__init__.py")
    monkeypatch.setitem(sys.modules, "package", package)
    backend = type("Backend", (), {"__module__": "package.deeper.backend"})()

    def fingerprint():
        verdicts._files_fingerprint.cache_clear()
        return verdicts._fingerprint(backend)

    before = fingerprint()
    (tmp_path / "package/notes.txt").write_text("no code")
    assert fingerprint() == before
    (tmp_path / "package" / edited).write_text("no beta")
    assert fingerprint() != before


def test_a_backend_of_one_file_has_only_that(tmp_path, monkeypatch):
    for file in ("single.py", "stranger.py"):
        (tmp_path / file).write_text("")
    single = ModuleType("single")
    single.__file__ = str(tmp_path / "single.py")
    monkeypatch.setitem(sys.modules, "single", single)
    backend = type("Backend", (), {"__module__": "single"})()
    before = verdicts._fingerprint(backend)
    (tmp_path / "stranger.py").write_text("edited")
    verdicts._files_fingerprint.cache_clear()
    assert verdicts._fingerprint(backend) == before


def test_the_small_spec_keeps_what_chooses_kernels():
    kimi = small()
    assert (kimi.hidden_size, kimi.intermediate_size) == (512, 512)
    assert (kimi.num_experts, kimi.top_k, kimi.activation) == (16, 16, KIMI_K3.activation)
    oss = canary_spec(BACKEND, GPT_OSS, GPU)
    assert (oss.hidden_size, oss.intermediate_size, oss.bias) == (832, 832, True)  # 2880 = 5·512 + 320
    rank = small(local_experts=range(112, 224))
    assert (rank.num_experts, rank.local_experts) == (20, range(2, 18))
    first = small(local_experts=range(112))
    assert first.local_experts == range(16)
    tiny = replace(KIMI_K3, hidden_size=64, intermediate_size=96, num_experts=3, top_k=2, local_experts=range(3))
    assert canary_spec(BACKEND, tiny, GPU) == tiny


def test_a_backend_that_refuses_the_small_sizes_gets_the_full_ones():
    class Picky(FakeBackend):
        def check(self, spec, _):
            return [] if spec.hidden_size == 3584 else [Reason("hidden_size", spec.hidden_size, 3584)]

    assert canary_spec(Picky("picky"), KIMI_K3, GPU).hidden_size == 3584
    assert canary_spec(FakeBackend("none", reasons=[REASON]), KIMI_K3, GPU) is None


def test_a_backend_may_bring_its_own_small_spec():
    backend = FakeBackend("own")
    backend.canary_spec = lambda spec: replace(spec, hidden_size=1024)
    assert canary_spec(backend, KIMI_K3, GPU) == replace(KIMI_K3, hidden_size=1024)


# --- files ------------------------------------------------------------------------------------------------------------


def test_round_trip_between_processes(tmp_path):
    for verdict in (PASSED, FAILED):
        VerdictStore(tmp_path).write(key(), verdict)
        assert VerdictStore(tmp_path).read(key()) == verdict
    assert [path.name for path in tmp_path.iterdir()] == [key().file]  # nothing temporary is left
    assert VerdictStore(tmp_path).read(key(FakeBackend("other"))) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"key": {}, "verdict": {}}',
        json.dumps({"key": json.loads(key().text), "verdict": {"passed": True}}),
        json.dumps({"key": json.loads(key().text), "verdict": PASSED.to_dict() | {"passed": False}}),
        json.dumps({"key": json.loads(key().text), "verdict": FAILED.to_dict() | {"passed": True}}),
        json.dumps({"key": json.loads(key(FakeBackend("x")).text), "verdict": PASSED.to_dict()}),
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_file_is_ignored_and_rewritten(tmp_path, content, caplog):
    path = tmp_path / key().file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    store = VerdictStore(tmp_path)
    with caplog.at_level(logging.DEBUG, "portamoe"):
        assert store.read(key()) is None
    assert "ignoring the verdict in" in caplog.text
    store.write(key(), PASSED)
    assert VerdictStore(tmp_path).read(key()) == PASSED


def test_a_folder_that_cannot_be_written_leaves_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    store = VerdictStore(tmp_path / "file" / "verdicts")
    with caplog.at_level(logging.DEBUG, "portamoe"):
        store.write(key(), PASSED)
    assert "verdicts stay in this process" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert store.read(key()) == PASSED


def test_a_failing_rename_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("stale file handle")))
    store = VerdictStore(tmp_path)
    store.write(key(), PASSED)
    assert list(tmp_path.iterdir()) == []
    assert store.read(key()) == PASSED


def test_without_a_home_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("PORTAMOE_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    store = verdicts.store(GPU.host)
    store.write(key(), PASSED)
    assert store.read(key()) == PASSED
    assert list(tmp_path.iterdir()) == []
    verdicts._store.cache_clear()


def test_the_folder_follows_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path))
    assert verdicts.store(GPU.host).folder == tmp_path / "verdicts"


def test_what_is_not_durable_stays_in_this_process(tmp_path):
    store = VerdictStore(tmp_path)
    store.write(key(), FAILED, durable=False)
    assert store.read(key()) == FAILED
    assert VerdictStore(tmp_path).read(key()) is None


WRITER = """
import sys
from pathlib import Path
from types import ModuleType
from portamoe.verdicts import Key, Verdict, VerdictStore
folder, mark = Path(sys.argv[1]), sys.argv[2]
assert "torch" not in sys.modules
key = Key('{"one": "key"}', "one.json")
for turn in range(200):
    VerdictStore(folder).write(key, Verdict(True, None, tuple((mark * 200, t) for t in range(50)), (), float(turn)))
    read = VerdictStore(folder).read(key)
    assert read is not None, "a file that is not whole"
    assert len(read.cases) == 50 and len({tactic for tactic, _ in read.cases}) == 1, "a mixture of two"
"""


def test_ranks_that_write_at_once_leave_one_whole_file(tmp_path):
    path = os.pathsep.join(["common", "."])
    env = {**os.environ, "PYTHONPATH": path}
    root = Path(verdicts.__file__).parents[2]
    children = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), mark], env=env, cwd=root) for mark in "ab"
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


# --- decisions --------------------------------------------------------------------------------------------------------


def test_a_verdict_turns_a_decision():
    accepted = Accepted("some", "package", only_on_request=REASON)
    assert verdicts.applied(accepted, None) == accepted
    assert verdicts.applied(accepted, PASSED) == replace(accepted, verification="verified")
    assert verdicts.applied(accepted, FAILED) == Rejected("some", "package", (REASON,))
    assert verdicts.applied(accepted, FAILED, "skip") == accepted


def test_a_replayed_host_has_its_caches_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path))
    gpu = recorded("mi300x").devices[0]
    backend = FakeBackend("some")
    verdicts.store(gpu.host).write(key_of(backend, canary_spec(backend, KIMI_K3, gpu), gpu), PASSED)
    assert verdicts.cached(backend, KIMI_K3, gpu) is None


def test_a_warning_is_said_once(tmp_path, caplog):
    store = VerdictStore(tmp_path)
    for _ in range(3):
        store.say_once("one", "it computed SwiGLU")
    assert [record.message for record in caplog.records] == ["it computed SwiGLU"]
