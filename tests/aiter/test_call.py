"""The call: AITER's mode in the environment, whatever an import raises, parameters of other releases."""

import threading
import time

import pytest

from rocm_moe.aiter.call import (
    AiterEnvironmentError,
    AiterUnavailableError,
    ModeGate,
    load_aiter,
)
from rocm_moe.aiter.support import support
from tests.aiter import trees

MODES = support().modes


def test_the_gate_sets_and_restores():
    env = {"HOME": "/root"}
    gate = ModeGate(env)
    for name, variable in (("a8w4", "AITER_SITUV2_A8W4"), ("a4w4", "AITER_SITUV2_A4W4"), ("a16w4", None)):
        with gate.hold(MODES[name]):
            assert {k: v for k, v in env.items() if k.startswith("AITER")} == ({variable: "1"} if variable else {})
        assert env == {"HOME": "/root"}


def test_the_gate_restores_what_was_there():
    env = {"AITER_SITUV2_A8W4": "0", "AITER_SITUV2_A4W4": ""}
    with ModeGate(env).hold(MODES["a8w4"]):
        assert env["AITER_SITUV2_A8W4"] == "1"
    assert env == {"AITER_SITUV2_A8W4": "0", "AITER_SITUV2_A4W4": ""}


def test_the_gate_restores_after_an_exception():
    env = {}
    gate = ModeGate(env)

    def fail():
        with gate.hold(MODES["a8w4"]):
            raise RuntimeError("device_gemm does not support this GEMM problem")

    with pytest.raises(RuntimeError, match="device_gemm"):
        fail()
    assert env == {}
    with gate.hold(MODES["a16w4"]):
        pass


@pytest.mark.parametrize(
    ("mode", "variable"),
    [
        ("a16w4", "AITER_SITUV2_A8W4"),
        ("a16w4", "AITER_SITUV2_A4W4"),
        ("a8w4", "AITER_SITUV2_A4W4"),
        ("a4w4", "AITER_SITUV2_A8W4"),
        ("a4w4", "AITER_MXFP4_INTERMEDIATE"),
        ("a16w4", "AITER_MOE_A8W4_BYPASS_QUANT"),
        ("a16w4", "AITER_FORCE_A8W4"),
    ],
)
def test_a_contradiction_is_refused_and_left_alone(mode, variable):
    env = {variable: "1"}
    gate = ModeGate(env)
    with pytest.raises(AiterEnvironmentError, match=variable), gate.hold(MODES[mode]):
        pass
    assert env == {variable: "1"}


def test_threads_of_two_modes_never_meet():
    env = {}
    gate, seen, together = ModeGate(env), [], []
    inside = {"a16w4": 0, "a8w4": 0}
    lock = threading.Lock()

    def work(name):
        for _ in range(30):
            with gate.hold(MODES[name]):
                with lock:
                    inside[name] += 1
                    together.append(inside[name])
                time.sleep(0.0002)
                seen.append((name, env.get("AITER_SITUV2_A8W4")))
                with lock:
                    inside[name] -= 1

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a16w4", "a8w4", "a8w4", "a16w4")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(seen) == 120
    assert {value for name, value in seen if name == "a8w4"} == {"1"}
    assert {value for name, value in seen if name == "a16w4"} == {None}
    assert max(together) == 2, "calls of one mode may overlap"
    assert env == {}


@pytest.mark.parametrize(
    ("statement", "says", "remedy"),
    [
        ("raise RuntimeError('ROCm version file not found')", "RuntimeError: ROCm version file", "triton_unfused"),
        ("raise KeyError('Unknown GPU architecture')", "KeyError", "triton_unfused"),
        ("raise OSError('libstdc++.so.6: version GLIBCXX_3.4.32 not found')", "GLIBCXX", "triton_unfused"),
        ("raise PermissionError(13, 'Permission denied', '/opt/aiter/jit')", "PermissionError", "AITER_JIT_DIR"),
        ("raise OSError(30, 'Read-only file system')", "Read-only", "AITER_JIT_DIR"),
        ("import no_such_module_aiter_core", "ModuleNotFoundError", "triton_unfused"),
        ("raise AssertionError", "AssertionError", "triton_unfused"),
    ],
)
def test_whatever_an_import_raises_is_a_reason(install, statement, says, remedy):
    install(write=lambda site: trees.raising_tree(site, statement))
    with pytest.raises(AiterUnavailableError) as caught:
        load_aiter()
    assert says in str(caught.value.reason.value)
    assert remedy in caught.value.reason.remedy


def test_the_impostor_and_old_releases_do_not_load(install):
    install(write=trees.impostor_tree)
    with pytest.raises(AiterUnavailableError, match=r"aiter\.fused_moe"):
        load_aiter()


def test_a_release_without_situ_does_not_load(install):
    install("0.1.18")
    with pytest.raises(AiterUnavailableError, match="Situv2"):
        load_aiter()


def test_a_release_with_other_parameters_does_not_load(install):
    site = install("0.1.20")
    source = site / "aiter" / "fused_moe.py"
    source.write_text(source.read_text().replace("linear_beta=None", "up_beta=None"))
    with pytest.raises(AiterUnavailableError, match="lacks linear_beta"):
        load_aiter()


@pytest.mark.parametrize("version", ["0.1.20", "0.1.20.post1", trees.MAIN])
def test_supported_releases_load(install, version):
    install(version)
    handle = load_aiter()
    assert handle.situv2 == 3
    assert handle.per_1x32 == 3


@pytest.mark.parametrize(
    ("statement", "says"),
    [("os.abort()", "signal SIGABRT"), ("raise RuntimeError('ROCm version file not found')", "ROCm version file")],
)
def test_an_abort_costs_the_child_only(install, statement, says):
    """What `portamoe probe --deep` does with a tree that takes its process along."""
    from portamoe.deep import try_import

    install(write=lambda site: trees.raising_tree(site, statement))
    assert says in str(try_import("aiter", timeout=120))
