"""Device facts and the predicates on them."""

from __future__ import annotations

import pytest

from portamoe.device import Device, gfx_arch, has_native_fp4, is_cdna, is_rdna
from tests.host_recordings import FACTS, device

ARCHS = [("amd", arch) for _, arch in FACTS["kfd_decode"]["cases"]]
ARCHS += [("nvidia", f"sm_{n['cc'][0]}{n['cc'][1]}") for n in FACTS["nvidia"]]
ARCHS += [("cpu", "cpu"), ("nvidia", "unknown"), ("amd", "gfx1300"), ("nvidia", "sm_130")]

# Every arch not named here must be refused by the predicate, so that an open range cannot creep in.
TABLE = {
    is_cdna: {("amd", a) for a in ("gfx908", "gfx90a", "gfx942", "gfx950")},
    is_rdna: {("amd", a) for a in (
        "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200", "gfx1201")},
    has_native_fp4: {("amd", "gfx950"), ("amd", "gfx1250")} | {
        ("nvidia", f"sm_{n}") for n in (100, 103, 107, 120, 121, 130)},
}  # fmt: skip


@pytest.mark.parametrize("predicate", TABLE, ids=lambda p: p.__name__)
def test_predicates_hold_for_exactly_these_archs(predicate):
    assert {key for key in ARCHS if predicate(device(*key))} == TABLE[predicate]


def test_the_vendor_is_part_of_every_comparison():
    # ROCm calls gfx90a (9, 0) as CUDA calls Hopper; a name that crosses over must match nothing.
    assert device("nvidia", "sm_90").capability == (9, 0)
    assert device("amd", "gfx90a").capability is None
    assert not is_cdna(device("nvidia", "gfx90a"))
    assert not has_native_fp4(device("amd", "sm_100"))


@pytest.mark.parametrize(
    ("arch", "capability"),
    [("sm_80", (8, 0)), ("sm_103", (10, 3)), ("sm_107", (10, 7)), ("sm_121", (12, 1)), ("unknown", None)],
)
def test_capability(arch, capability):
    assert device("nvidia", arch).capability == capability


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx942:xnack+", "gfx942"),
        ("gfx950", "gfx950"),
        (" GFX90A ", "gfx90a"),
        ("gfx9-4-generic", "gfx9-4-generic"),
        ("gfx1100", "gfx1100"),
    ],
)
def test_gfx_arch(text, arch):
    assert gfx_arch(text) == arch


@pytest.mark.parametrize("text", ["", "sm_90", "gfx", ":xnack-", "90a", "gfx90a gfx942"])
def test_gfx_arch_refuses_what_is_no_target(text):
    with pytest.raises(ValueError, match="AMD target"):
        gfx_arch(text)


def test_torch_name():
    host = device().host
    assert Device("amd", "gfx90a", 3, "", host).torch_name == "cuda:3"
    assert Device("nvidia", "sm_90", 0, "", host).torch_name == "cuda:0"
    assert Device("cpu", "cpu", 0, "", host).torch_name == "cpu"
