"""The visibility variables of both vendors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portamoe.detection.visibility import amd_visible, nvidia_visible
from tests.host_recordings import FACTS, recorded

AMD_UUIDS = [f"GPU-{0x124D13CCD7B050E0 + i:016x}" for i in range(8)]
NVIDIA_UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f938-0000-0000-0000-000000000000",
    "GPU-11111111-0000-0000-0000-000000000000",
    "GPU-22222222-0000-0000-0000-000000000000",
]
# Words of the fixtures for what a list of indices cannot say.
EXPECTED = {
    "error": [],
    "uuid prefix match": [0],
    "one MIG slice": [],  # none of these devices is in MIG mode
    "index and UUID may be mixed": [0, 5],
}


@pytest.mark.parametrize("case", FACTS["visible_devices"], ids=lambda c: f"{c['vendor']}-{c['env']}")
def test_public_cases(case):
    expect = EXPECTED[case["expect"]] if isinstance(case["expect"], str) else case["expect"]
    if case["vendor"] == "amd":
        visible = amd_visible(AMD_UUIDS[: case["n"]], case["env"])
    else:
        visible = nvidia_visible(NVIDIA_UUIDS[: case["n"]], case["env"])
    assert list(visible.order) == expect
    assert bool(visible.problems) or case["expect"] not in ("error", "one MIG slice")
    for name, value in case["env"].items():
        assert f"{name}={value}" in visible.because


@pytest.mark.parametrize(
    ("env", "order"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2"}, [6]),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"GPU_DEVICE_ORDINAL": "3,1"}, [3, 1]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "CUDA_VISIBLE_DEVICES": "1,0"}, [1, 2]),
        ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": AMD_UUIDS[4]}, [4]),
        ({"ROCR_VISIBLE_DEVICES": AMD_UUIDS[4].upper()}, [4]),
        ({"ROCR_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}, []),
    ],
)
def test_amd(env, order):
    assert list(amd_visible(AMD_UUIDS, env).order) == order


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        (" 2 , 0", [2, 0]),
        ("4", []),
        ("0,4,1", [0]),
        ("GPU-1111,GPU-2222", [2, 3]),
        ("GPU-8932", []),  # fits two devices
        ("GPU-1111,GPU-11111111", []),  # twice the same
        ("GPU-ffff", []),
        ("gpu0", []),
        ("+1", [1]),
    ],
)
def test_nvidia(value, order):
    assert list(nvidia_visible(NVIDIA_UUIDS, {"CUDA_VISIBLE_DEVICES": value}).order) == order


def test_variables_that_contradict_each_other_are_a_problem():
    visible = amd_visible(AMD_UUIDS, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"})
    assert visible.order == (1,)
    assert "HIP obeys" in str(visible.problems[0])
    longer = amd_visible(AMD_UUIDS, {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0"})
    assert longer.order == ()
    assert "refuses to start" in str(longer.problems[0])


def test_variables_of_the_other_vendor_do_nothing():
    assert nvidia_visible(NVIDIA_UUIDS, {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}).order == (0, 1, 2, 3)
    assert len(recorded("h200", {"ROCR_VISIBLE_DEVICES": ""}).devices) == 2
    assert recorded("h200", {"ROCR_VISIBLE_DEVICES": ""}).host.problems == ()


@given(st.text(alphabet="0123456789,-+ GPUMIabcdef", max_size=20), st.integers(0, 4))
def test_any_text_gives_distinct_devices_that_are_there(value, count):
    for visible in (
        nvidia_visible(NVIDIA_UUIDS[:count], {"CUDA_VISIBLE_DEVICES": value}),
        amd_visible(AMD_UUIDS[:count], {"ROCR_VISIBLE_DEVICES": value, "HIP_VISIBLE_DEVICES": value}),
    ):
        assert len(set(visible.order)) == len(visible.order)
        assert set(visible.order) <= set(range(count))


def test_torch_ordinals_follow_the_variables():
    detection = recorded("lumi-g", {"ROCR_VISIBLE_DEVICES": "6,2"})
    assert [(d.torch_name, d.uuid[-1]) for d in detection.devices[:-1]] == [("cuda:0", "6"), ("cuda:1", "2")]
    assert detection.host.visibility["amd"] == {
        "present": 8,
        "unreadable": 0,
        "visible": [6, 2],
        "because": "ROCR_VISIBLE_DEVICES=6,2",
    }
    hidden = recorded("b300", {"CUDA_VISIBLE_DEVICES": "5,GPU-00000000-0000-0000-0000-000000000002"})
    assert [d.uuid[-1] for d in hidden.devices[:-1]] == ["5", "2"]
