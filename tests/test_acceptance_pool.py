"""The parent of `portamoe verify`: shares that cover the set, children that crash, hang or break the device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from portamoe.acceptance import checklist, pool
from portamoe.acceptance.checklist import Subject
from portamoe.acceptance.pool import Pool
from portamoe.acceptance.shares import BEGIN, BROKEN, CHECK, GROUPS, Share, shares
from portamoe.activations import SiTU
from portamoe.child import Ended, run_module
from portamoe.spec import MoESpec
from tests import faulty_backends as faulty
from tests.host_recordings import device, recorded

SPEC = MoESpec(
    hidden_size=64, intermediate_size=64, num_experts=8, top_k=3, activation=SiTU(beta=4.0, linear_beta=25.0)
)
HERE = device("cpu", "cpu")
CASES = [("canary", "spec"), ("tokens", "1"), ("tokens", "9"), ("graph", "1 tokens")]


@pytest.mark.parametrize("jobs", [1, 2, 4, 8, 16])
def test_every_check_is_in_one_share(jobs):
    seen = Counter()
    planned = []
    for group, case, _ in checklist.plan(Subject(faulty.Right(), SPEC, SPEC, HERE, quick=False)):
        number = seen[group]
        seen[group] += 1
        planned.append((group, case, sum(share.has(group, number) for share in shares(jobs))))
    assert {times for _, _, times in planned} == {1}
    assert {group for group, _, _ in planned} | {"process"} == set(GROUPS)


def test_what_is_measured_is_measured_last_and_alone():
    assert shares(16)[-1] == shares(2)[-1] == Share(("timing",))
    assert all("timing" not in share.groups for share in shares(16)[:-1])
    assert Share.from_dict(json.loads(json.dumps(shares(16)[1].to_dict()))) == shares(16)[1]


class Children:
    """Stands for `run_module`: `ends` says of each check how the child that reaches it goes on."""

    def __init__(self, **ends):
        self.ends = {key.replace("_", " "): value for key, value in ends.items()}
        self.asked = []

    def __call__(self, module, arguments, timeout, env, *, on_line, stop):
        asked = json.loads(arguments[0])
        self.asked.append(asked)
        share, numbers = Share.from_dict(asked["share"]), Counter()
        for group, case in CASES:
            number = numbers[group]
            numbers[group] += 1
            if not share.has(group, number) or [group, case] in asked["done"]:
                continue
            on_line(BEGIN + json.dumps({"group": group, "case": case}))
            end = self.ends.get(f"{group} {case}")
            if end in ("crash", "hang"):
                return Ended(-11 if end == "crash" else None, (), ("a line", "segfault at 0"))
            check = {
                "backend": asked["backend"],
                "group": group,
                "case": case,
                "detail": "",
                "seconds": 0,
                "figures": {},
            }
            on_line(CHECK + json.dumps(check | {"status": "failed" if end else "passed"}))
            if end == "broken":
                return Ended(BROKEN, (), ())
        return Ended(0, (), ())


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the pool with such children and gives status by check, and the children."""

    def go(jobs=1, backends=("one",), **ends):
        children, said = Children(**ends), []
        monkeypatch.setattr(pool, "run_module", children)
        work = Pool(jobs=jobs, timeout=5, tell=said.append)
        work.run(backends, SPEC, HERE, quick=False)
        return {(c["backend"], c["group"], c["case"]): c for c in work.checks(backends)}, children, said

    return go


def test_all_passes_in_one_child(run):
    found, children, said = run()
    assert [c["status"] for c in found.values()] == ["passed"] * 4
    assert len(children.asked) == 1
    assert said[0].endswith("one all: 4 passed")


def test_a_crash_costs_its_own_check_only(run):
    found, children, _ = run(tokens_1="crash")
    assert {key[1:]: c["status"] for key, c in found.items()} == dict.fromkeys(CASES, "passed") | {
        ("tokens", "1"): "failed"
    }
    assert found["one", "tokens", "1"]["detail"] == "child process: ended by SIGSEGV; a line; segfault at 0"
    assert children.asked[1]["done"] == [["canary", "spec"], ["tokens", "1"]]


def test_a_device_that_a_failed_check_broke_gets_a_new_process(run):
    found, children, _ = run(tokens_1="broken")
    assert [c["status"] for c in found.values()] == ["passed", "failed", "passed", "passed"]
    assert len(children.asked) == 2


def test_after_a_hang_no_more_time_is_spent(run):
    found, children, said = run(tokens_1="hang")
    assert [c["status"] for c in found.values()] == ["passed", "failed"]
    assert found["one", "tokens", "1"]["detail"].startswith("child process: no end within 5 s")
    assert len(children.asked) == 1
    assert said[0].endswith("1 passed, 1 failed")


def test_children_are_not_started_for_ever(run, monkeypatch):
    monkeypatch.setattr(pool, "_CHILDREN", 2)
    found, _, _ = run(canary_spec="crash", tokens_1="crash")
    assert [(c["group"], c["status"]) for c in found.values()] == [
        ("canary", "failed"),
        ("tokens", "failed"),
        ("process", "not run"),
    ]


@pytest.mark.parametrize("jobs", [2, 4, 16])
def test_several_backends_and_jobs_give_the_same_in_order(run, jobs):
    found, children, _ = run(jobs, ("one", "two"))
    assert list(found) == [(backend, *case) for backend in ("one", "two") for case in CASES]
    turns = [asked["turn"] for asked in children.asked if asked["share"]["groups"] == ["timing"]]
    assert len(turns) == 2
    assert None not in turns
    assert {asked["turn"] for asked in children.asked if asked["share"]["groups"] != ["timing"]} == {None}


def test_times_are_measured_when_all_else_has_ended(monkeypatch):
    """The child that measures takes the lock; the parent has it until the other shares have ended."""
    import fcntl

    running, met = threading.Event(), []

    def child(module, arguments, timeout, env, *, on_line, stop):
        asked = json.loads(arguments[0])
        if asked["turn"] is None:
            time.sleep(0.05)
            met.append("other")
        else:
            with Path(asked["turn"]).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                assert not running.is_set()
                running.set()
                met.append("timing")
                time.sleep(0.02)
                running.clear()
        return Ended(0, (), ())

    monkeypatch.setattr(pool, "run_module", child)
    Pool(jobs=4, timeout=5, tell=lambda _: None).run(("one", "two"), SPEC, HERE, quick=False)
    assert met[-2:] == ["timing"] * 2
    assert set(met[:-2]) == {"other"}


def test_jobs_follow_cores_and_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    gpu = recorded("h200").devices[0]
    assert pool.default_jobs(HERE) == 1
    assert pool.default_jobs(gpu) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert pool.default_jobs(gpu) == 6


# --- a real process -------------------------------------------------------------------------------------------------

SLOW = "import sys, time\nprint('first', flush=True)\nprint('second')\nsys.stdout.flush()\ntime.sleep(60)\n"


def test_lines_come_while_the_child_runs_and_stop_ends_it(tmp_path, monkeypatch):
    (tmp_path / "slow_child.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    stop, heard = threading.Event(), []

    def on_line(line):
        heard.append(line)
        if len(heard) == 2:
            stop.set()

    start = time.monotonic()
    ended = run_module("slow_child", [], 60, on_line=on_line, stop=stop)
    assert heard == ["first", "second"]
    assert ended.code is None
    assert time.monotonic() - start < 20


#: Makes a child of `verify` pause ahead of each check that it reports, so that some are left when the first is known.
SLOW_CHILD = """
import sys, time
class Slow:
    def __init__(self, out):
        self.out = out
    def write(self, text):
        if "portamoe-check:" in text:
            time.sleep(0.1)
        return self.out.write(text)
    def __getattr__(self, name):
        return getattr(self.out, name)
if "portamoe.acceptance.child" in sys.orig_argv:
    sys.stdout = Slow(sys.stdout)
"""


def test_what_was_found_survives_a_cut(tmp_path):
    """SIGTERM, as batch systems send it: children end, the report so far is printed and written."""
    spec, results = tmp_path / "small.json", tmp_path / "results.json"
    spec.write_text(json.dumps(SPEC.to_dict()))
    command = [sys.executable, "-m", "portamoe", "verify", "--device", "cpu", "--spec", str(spec), "--json"]
    (tmp_path / "sitecustomize.py").write_text(SLOW_CHILD)
    path = os.pathsep.join(str(Path(p).resolve()) for p in (tmp_path, "common", "."))
    env = {**os.environ, "PYTHONPATH": path, "PORTAMOE_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*command, "--backend", "torch", "--results", str(results)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (results.exists() and json.loads(results.read_text()).get("checks")):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    report = json.loads(out)
    assert process.returncode == 1
    assert (report["complete"], report["passed"]) == (False, False)
    assert report["counts"]["passed"] >= 1
    assert report == json.loads(results.read_text())
    assert "ended early by SIGTERM" in err
