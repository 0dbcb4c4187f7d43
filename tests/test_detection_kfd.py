"""AMD devices from KFD's topology."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from portamoe.detection import kfd
from portamoe.detection.files import Files
from portamoe.detection.kfd import NODES, Topology, decode_target, read_topology
from tests.host_recordings import CPU_NODE, FACTS, amd, recorded, write_node


@pytest.mark.parametrize(("version", "arch"), FACTS["kfd_decode"]["cases"])
def test_decode_target(version, arch):
    assert decode_target(version) == arch


@pytest.mark.parametrize("node", [n for n in FACTS["amd_nodes"] if "properties" in n], ids=lambda n: n["id"])
def test_public_node_properties(tmp_path, node):
    banks = [{"heap_type": 1, "size_in_bytes": node["vram_bytes"]}] if "vram_bytes" in node else []
    write_node(tmp_path, 0, CPU_NODE)
    write_node(tmp_path, 1, node["properties"], banks)
    gpus = read_topology(Files(tmp_path), {}).gpus
    if not node["properties"]["gfx_target_version"]:
        assert gpus == ()
        return
    (gpu,) = gpus
    expect = node["expect"]
    assert gpu.arch == expect["arch"]
    if "cu" in expect:
        assert gpu.compute_units == expect["cu"]
    assert gpu.memory_bytes == node.get("vram_bytes", node["properties"].get("local_mem_size"))
    if node.get("marketing_name"):
        assert gpu.name == node["marketing_name"]


def test_nodes_count_in_numeric_order(tmp_path):
    # As text "10" and "11" come before "2"; HIP counts by number.
    targets = {1: 90010, 2: 90402, 10: 90500, 11: 110000}
    for node, target in targets.items():
        write_node(tmp_path, node, amd(target))
    gpus = read_topology(Files(tmp_path), {}).gpus
    assert [gpu.node for gpu in gpus] == [1, 2, 10, 11]
    assert [gpu.arch for gpu in gpus] == ["gfx90a", "gfx942", "gfx950", "gfx1100"]


def test_other_vendors_and_cpus_are_no_gpus(tmp_path):
    write_node(tmp_path, 0, CPU_NODE)
    write_node(tmp_path, 1, amd() | {"vendor_id": 4318})
    write_node(tmp_path, 2, {})
    assert read_topology(Files(tmp_path), {}) == Topology()


def test_memory_is_the_sum_of_frame_buffer_banks(tmp_path):
    banks = [
        {"heap_type": 0, "size_in_bytes": 1 << 40},
        {"heap_type": 1, "size_in_bytes": 3 << 30},
        {"heap_type": 2, "size_in_bytes": 5 << 30},
    ]
    write_node(tmp_path, 1, amd(), banks)
    write_node(tmp_path, 2, amd(local_mem_size=7 << 30))
    write_node(tmp_path, 3, amd())
    assert [gpu.memory_bytes for gpu in read_topology(Files(tmp_path), {}).gpus] == [8 << 30, 7 << 30, None]


def test_free_memory_is_what_drm_says_is_not_used(tmp_path):
    write_node(tmp_path, 1, amd(drm_render_minor=128, local_mem_size=64 << 30))
    used = tmp_path / "sys/class/drm/renderD128/device/mem_info_vram_used"
    used.parent.mkdir(parents=True)
    used.write_text(f"{5 << 30}\n")
    assert read_topology(Files(tmp_path), {}).gpus[0].memory_free_bytes == 59 << 30


def test_an_unreadable_node_is_another_jobs_gpu():
    detection = recorded("lumi-g-one-gcd")
    assert [d.torch_name for d in detection.devices] == ["cuda:0", "cpu"]
    assert detection.devices[0].uuid == "GPU-1000000000000000"
    assert detection.host.visibility["amd"]["unreadable"] == 7
    assert detection.host.problems == ()


def test_no_gpu_left_by_the_control_group_is_said():
    every = tuple(f"{NODES}/{node}/properties" for node in range(4, 12))
    detection = recorded("lumi-g", unreadable=every)
    assert [d.vendor for d in detection.devices] == ["cpu"]
    (problem,) = detection.host.problems
    assert "8 there, none given to this job" in str(problem)
    absent = recorded("lumi-g", unreadable=every, rocm={"version": None, "kfd": "absent"})
    assert "--device /dev/kfd" in str(absent.host.problems[0])


def test_a_node_that_fails_to_read_is_a_problem_and_the_rest_is_used(tmp_path):
    class Failing(Files):
        def text(self, path: str, limit: int = -1) -> str | None:
            if path.startswith(f"{NODES}/2/"):
                raise OSError(errno.EIO, "Input/output error")
            return super().text(path, limit)

    for node in (1, 2, 3):
        write_node(tmp_path, node, amd())
    topology = read_topology(Failing(tmp_path), {})
    assert [gpu.node for gpu in topology.gpus] == [1, 3]
    assert "KFD node 2" in str(topology.problems[0])


@pytest.mark.parametrize(
    ("state", "text"),
    [("permission denied", "render"), ("absent", "--device /dev/kfd"), ("openable", None), (None, None)],
)
def test_dev_kfd(state, text):
    detection = recorded("lumi-g", rocm={"version": "6.4.4", "kfd": state})
    if text is None:
        assert len(detection.devices) == 9
        assert detection.host.problems == ()
    else:
        assert [d.vendor for d in detection.devices] == ["cpu"]
        (problem,) = detection.host.problems
        assert problem.what == "/dev/kfd"
        assert text in problem.remedy
        assert "8 AMD GPUs" in problem.value


def test_access_looks_at_the_device_file(monkeypatch, tmp_path):
    monkeypatch.setattr(kfd, "DEVICE_FILE", tmp_path / "kfd")
    assert kfd.access() == "absent"
    (tmp_path / "kfd").touch()
    assert kfd.access() == "openable"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert kfd.access() == "permission denied"


# The runtime numbers the nodes it can read, CPUs included; lumi-g has four CPU nodes before its GPUs.
@pytest.mark.parametrize(
    ("env", "archs", "problems"),
    [
        ({"HSA_OVERRIDE_GFX_VERSION": "9.0.8"}, ["gfx908"] * 8, 8),
        ({"HSA_OVERRIDE_GFX_VERSION": "9.0.10"}, ["gfx90a"] * 8, 0),
        ({"HSA_OVERRIDE_GFX_VERSION_5": "9.4.2"}, ["gfx90a", "gfx942"] + ["gfx90a"] * 6, 1),
        (
            {"HSA_OVERRIDE_GFX_VERSION": "11.0.0", "HSA_OVERRIDE_GFX_VERSION_4": "9.0.10"},
            ["gfx90a"] + ["gfx1100"] * 7,
            7,
        ),
        ({"HSA_OVERRIDE_GFX_VERSION": "gfx908"}, ["gfx90a"] * 8, 8),
        ({"HSA_OVERRIDE_GFX_VERSION": "9.0"}, ["gfx90a"] * 8, 8),
    ],
)
def test_override_is_applied_and_said(env, archs, problems):
    detection = recorded("lumi-g", env)
    assert [d.arch for d in detection.devices[:-1]] == archs
    assert len(detection.host.problems) == problems
    assert all(p.what.startswith("HSA_OVERRIDE_GFX_VERSION") for p in detection.host.problems)


def test_override_counts_only_readable_nodes(tmp_path: Path):
    for node in range(3):
        write_node(tmp_path, node, amd())
    files = Files(tmp_path, [f"{NODES}/0/properties"])
    archs = [gpu.arch for gpu in read_topology(files, {"HSA_OVERRIDE_GFX_VERSION_0": "9.4.2"}).gpus]
    assert archs == ["gfx942", "gfx90a"]


def test_recorded_lumi_node():
    gpus = recorded("lumi-g").devices[:-1]
    assert [(d.arch, d.compute_units, d.memory_bytes) for d in gpus] == [("gfx90a", 110, 68702699520)] * 8
    assert [d.index for d in gpus] == list(range(8))
    assert {d.found_by for d in gpus} == {"kfd"}
