"""Recording a host and replaying it elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat

import pytest

from portamoe import detection as detection_module
from portamoe.detection import Detection, DetectionError, Files, build, detect, kfd, record, recording
from portamoe.detection.recording import load, save
from tests.host_recordings import HOST_NAMES, HOSTS, ONE_GCD_UNREADABLE


def facts_of(result: Detection):
    """Return what must survive a recording; the comparison of devices leaves their host out.

    Free memory changes from one moment to the next.
    """
    host = result.host
    devices = [dataclasses.replace(device, memory_free_bytes=None) for device in result.devices]
    return devices, host.env, host.torch, host.distributions, host.ptxas, host.visibility, host.problems


@pytest.mark.parametrize("name", HOST_NAMES)
def test_every_recorded_host_replays(name):
    result = detect(HOSTS / name)
    assert result.devices[-1].vendor == "cpu"
    assert result.host.recorded == str(HOSTS / name)
    assert result.host.live == ("caches",)


def test_this_machine_replays_as_it_is(tmp_path):
    record(tmp_path / "here")
    assert facts_of(detect(tmp_path / "here")) == facts_of(detect(toolchain=True))
    assert detect(tmp_path / "here").host.live == ()


def test_a_recording_of_a_recorded_node_is_the_same(tmp_path):
    """Save what was read of LUMI's shared node, hidden GPUs included, and replay that."""
    files = Files(HOSTS / "lumi-g-one-gcd", ONE_GCD_UNREADABLE)
    facts = {**load(HOSTS / "lumi-g-one-gcd"), "caches": {}}
    first = build(facts, files)
    save(tmp_path / "copy", facts, files)
    again = detect(tmp_path / "copy")
    assert facts_of(again) == facts_of(first)
    assert len(again.devices) == 2
    assert not (tmp_path / "copy/sys/class/kfd/kfd/topology/nodes/5/properties").exists()


def test_unreadable_modes_of_a_copied_tree_mean_the_same(tmp_path):
    shutil.copytree(HOSTS / "lumi-g-one-gcd", tmp_path / "copy")
    for path in ONE_GCD_UNREADABLE:
        (tmp_path / f"copy{path}").chmod(0)
    if os.access(tmp_path / f"copy{ONE_GCD_UNREADABLE[0]}", os.R_OK):
        pytest.skip("root reads whatever the modes say")
    assert len(detect(tmp_path / "copy").devices) == 2


def test_the_live_machine_is_not_looked_at(monkeypatch):
    def live(*_):
        raise AssertionError("looked at the live machine")

    monkeypatch.setattr("portamoe.detection.nvml.read_nvml", live)
    monkeypatch.setattr(kfd, "access", live)
    monkeypatch.setattr(detection_module, "live_facts", live)
    assert len(detect(HOSTS / "lumi-g").devices) == 9
    assert len(detect(HOSTS / "h200").devices) == 2


def test_what_is_missing_comes_from_here_and_is_named(tmp_path):
    shutil.copytree(HOSTS / "lumi-g/sys", tmp_path / "sys")
    result = detect(tmp_path)
    assert [d.arch for d in result.devices] == ["gfx90a"] * 8 + ["cpu"]
    assert set(result.host.live) == {"machine", "python", "env", "torch", "distributions", "ptxas", "vendor", "caches"}
    assert result.host.torch == detect().host.torch
    # Devices, drivers and memory never come from here.
    assert result.host.nvml is None
    assert result.devices[-1].memory_bytes is None


def test_permissions_do_not_depend_on_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        record(tmp_path / "new")
    finally:
        os.umask(before)
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    assert {"sys", "proc", "host.json"} <= {path.name for path in (tmp_path / "new").iterdir()}


def test_nothing_that_is_there_is_touched(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("there", "file"):
        with pytest.raises(FileExistsError, match="name a new folder"):
            record(tmp_path / name)
    assert (tmp_path / "there/mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
    (tmp_path / "empty").mkdir()
    record(tmp_path / "empty")
    assert (tmp_path / "empty/host.json").is_file()


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def full(path, text):
        if path.name != "host.json":
            raise OSError("No space left on device")
        path.write_text(text)

    monkeypatch.setattr(recording, "_write", full)
    with pytest.raises(OSError, match="No space"):
        record(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "has schema 'list'"),
        ("{}", "has schema None"),
        ('{"schema": 2}', "has schema 2, this version reads 1"),
        ('{"schema": 1, "env": []}', r"env is \[\], expected object"),
        ('{"schema": 1, "nvml": 1}', "nvml is 1, expected object or null"),
    ],
)
def test_a_damaged_recording_is_an_error(tmp_path, text, message):
    (tmp_path / "host.json").write_text(text)
    with pytest.raises(DetectionError, match=message):
        detect(tmp_path)


#: Key -> a value that no recording has, and what is said of it.
ODD = {
    "env.HOME": (3, "env.HOME is 3, expected text"),
    "nvml.driver": (..., "nvml.driver is missing"),
    "nvml.devices": ({}, r"nvml.devices is \{\}, expected list"),
    "nvml.devices.0": ("H200", r"nvml.devices\[0\] is 'H200', expected object"),
    "nvml.devices.0.name": (..., r"nvml.devices\[0\].name is missing"),
    "nvml.devices.0.compute_capability": ("9.0", r"compute_capability is '9.0', expected list or null"),
    "nvml.devices.0.memory_bytes": (True, r"memory_bytes is True, expected integer or null"),
    "torch.version": (2.11, "torch.version is 2.11, expected text or null"),
    "distributions.torch": (None, "distributions.torch is None, expected text"),
    "ptxas.targets": ("sm_90a", "ptxas.targets is 'sm_90a', expected list"),
    "ptxas.targets.1": (90, r"ptxas.targets\[1\] is 90, expected text"),
    "vendor.triton": (3.6, "vendor.triton is 3.6, expected text or null"),
    "vendor.aiter": ({"is_amd": "yes"}, "vendor.aiter.is_amd is 'yes', expected true or false"),
    "vendor.flashinfer": ({"nvcc": "13"}, "vendor.flashinfer.nvcc is '13', expected object or null"),
    "rocm": ({"version": "6.4"}, "rocm.kfd is missing"),
    "problems": ([{"what": "x"}], r"problems\[0\].value is missing"),
    "caches": ({"A": {"path": "/", "writable": 1, "set": True}}, "caches.A.writable is 1, expected true or false"),
    "unreadable": ([1], r"unreadable\[0\] is 1, expected text"),
    "python": (["a" * 99], "python is list, expected text"),
}


@pytest.mark.parametrize("key", ODD)
def test_a_value_of_another_type_is_named(tmp_path, key):
    """Anywhere: a TypeError from deep inside would not say which line of the file to look at."""
    facts = load(HOSTS / "h200")
    value, message = ODD[key]
    *outer, last = (int(part) if part.isdigit() else part for part in key.split("."))
    target = facts
    for part in outer:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    (tmp_path / "host.json").write_text(json.dumps(facts))
    with pytest.raises(DetectionError, match=f"host.json: .*{message}$"):
        detect(tmp_path)


def test_a_folder_that_is_no_recording_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DetectionError, match="is no recording"):
            detect(folder)


def test_other_variables_than_the_recorded_ones(tmp_path):
    assert len(detect(HOSTS / "lumi-g", env={"ROCR_VISIBLE_DEVICES": "3"}).devices) == 2
    record(tmp_path / "here", env={"PORTAMOE_BACKEND": "torch", "HOME": "/secret"})
    assert json.loads((tmp_path / "here/host.json").read_text())["env"] == {"PORTAMOE_BACKEND": "torch"}


def test_detection_is_cached():
    assert detect() is detect()


def test_device_by_name():
    result = detect(HOSTS / "lumi-g")
    assert result.device("cpu").vendor == "cpu"
    assert result.device("cuda").index == 0
    assert result.device("cuda:7").uuid == "GPU-1000000000000007"
    with pytest.raises(ValueError, match=r"no device 'cuda:8'; visible here: cuda:0 \(AMD Instinct MI250X\)"):
        result.device("cuda:8")
