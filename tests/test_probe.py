"""`portamoe.capabilities`: the report, the choice on every recorded host, and the deep probe."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from portamoe import registry, render
from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI
from portamoe.decision import Accepted, BackendRejected, Reason, Rejected
from portamoe.probe import SCHEMA, Capabilities, capabilities
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec
from tests.fake_backends import FakeBackend
from tests.host_recordings import HOST_NAMES, HOSTS, device, recorded

ON_AMD = ["triton_unfused", "torch"]
ON_NVIDIA = ["triton_fused", "triton_unfused", "torch"]

#: What is accepted by whom on each host, best first; the first that this library has registered must be chosen.
GOLDEN = {
    ("lumi-g", "kimi-k3"): ON_AMD,  # no AITER on gfx90a
    ("lumi-g", "gpt-oss"): ON_AMD,
    ("lumi-g", "nvfp4"): ["torch"],
    ("lumi-g-one-gcd", "kimi-k3"): ON_AMD,
    ("lumi-g-no-access", "kimi-k3"): ["torch"],  # the CPU
    ("mi300x", "kimi-k3"): ON_AMD,
    ("mi300x", "gpt-oss"): ON_AMD,
    ("mi355x-aiter-0.1.20", "kimi-k3"): ["aiter", *ON_AMD],
    ("mi355x-aiter-0.1.20", "nvfp4"): ["torch"],
    ("mi355x-aiter-impostor", "kimi-k3"): ON_AMD,
    ("mi355x-aiter-impostor", "gpt-oss"): ON_AMD,
    ("h200", "kimi-k3"): ON_NVIDIA,  # no FlashInfer there
    ("h200", "gpt-oss"): ON_NVIDIA,
    ("h200", "nvfp4"): ["torch"],
    ("b300", "kimi-k3"): ON_NVIDIA,
    ("b300", "nvfp4"): ["flashinfer_cutedsl", "torch"],
    ("rubin-flashinfer-0.7.1", "kimi-k3"): ON_NVIDIA,
    ("rubin-flashinfer-0.7.1", "nvfp4"): ["torch"],  # plain SwiGLU instead of SiTU, without an error
    ("rubin-flashinfer-0.7.2", "kimi-k3"): ON_NVIDIA,
    ("rubin-flashinfer-0.7.2", "nvfp4"): ["flashinfer_cutedsl", "torch"],
    ("cpu-only", "kimi-k3"): ["torch"],
    ("cpu-only", "gpt-oss"): ["torch"],
    ("cpu-only", "nvfp4"): ["torch"],
}
SPECS = {
    "kimi-k3": KIMI_K3,
    "gpt-oss": GPT_OSS,
    "nvfp4": replace(KIMI_K3, weight_format="nvfp4", activation_format="nvfp4"),
}


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch):
    monkeypatch.delenv("PORTAMOE_BACKEND", raising=False)


def on(name: str, spec: MoESpec = KIMI_K3, device: int = 0) -> registry.Selection:
    return registry.choose(spec, recorded(name).devices[device])


@pytest.mark.parametrize(("name", "spec"), GOLDEN)
def test_golden_selection(name, spec):
    registered = [backend.name for backend in registry.backends()]
    expected = next(backend for backend in GOLDEN[name, spec] if backend in registered)
    assert on(name, SPECS[spec]).name == expected


def test_every_recorded_host_is_in_the_table():
    assert {name for name, _ in GOLDEN} == set(HOST_NAMES)


def test_the_impostor_is_called_by_name():
    (decision,) = (d for d in on("mi355x-aiter-impostor").decisions if d.backend == "aiter")
    assert isinstance(decision, Rejected)
    assert any("0.13.20191203" in str(reason) and "another package" in str(reason) for reason in decision.reasons)


def test_aiter_is_refused_on_gfx90a_with_the_way_out():
    (decision,) = (d for d in on("lumi-g").decisions if d.backend == "aiter")
    assert any("gfx90a" in str(r.value) and "triton_unfused" in str(r.remedy) for r in decision.reasons)


def test_a_gpu_that_cannot_be_opened_is_named_by_the_backends_that_need_it():
    (decision,) = (d for d in on("lumi-g-no-access").decisions if d.backend == "aiter")
    assert "/dev/kfd permission denied" in str(decision.reasons[0])


@pytest.mark.parametrize("name", HOST_NAMES)
def test_the_cpu_of_every_host_serves_every_activation(name):
    for spec in (KIMI_K3, GPT_OSS, replace(KIMI_K3, activation=SwiGLU())):
        assert on(name, spec, -1).name == "torch"


def test_a_cpu_build_of_torch_does_not_serve_a_gpu():
    cpu = {"version": "2.13.0+cpu", "hip": None, "cuda": None}
    for name, wanted in (("h200", "CUDA"), ("lumi-g", "ROCm")):
        selection = registry.choose(KIMI_K3, recorded(name, torch=cpu).devices[0])
        assert selection.name is None
        reasons = [str(r) for d in selection.decisions if d.backend == "torch" for r in d.reasons]
        assert any(wanted in reason and "2.13.0+cpu" in reason for reason in reasons)


def test_no_torch_at_all():
    selection = registry.choose(KIMI_K3, recorded("cpu-only", torch=None, distributions={}).devices[0])
    assert selection.name is None
    assert "torch: not installed" in selection.why


ARCHS = [("amd", a) for a in ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "gfx1250")]
ARCHS += [("nvidia", f"sm_{n}") for n in (80, 86, 89, 90, 100, 103, 107, 110, 120, 121)]
ARCHS += [("cpu", "cpu"), ("amd", "gfx1300"), ("nvidia", "sm_130"), ("nvidia", "unknown")]
ACTIVATIONS = (
    SiTU(beta=4.0, linear_beta=25.0),
    SiTU(beta=4.0),
    SwiGLU(),
    SwiGLU(limit=7.0),
    SwiGLUOAI(1.702, 7.0),
    GeGLU(),
    ReLU2(),
)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
def test_something_serves_every_arch_activation_and_format(arch, weight_format):
    """At the least `torch`; every refusal names what was found and a way out or what it takes."""
    versions = {"version": "2.11.0", "hip": "7.2", "cuda": "13.0"}  # a build that would serve either vendor
    where = device(*arch, torch=versions, vendor={"triton": "3.6.0", "aiter": None, "flashinfer": None})
    for activation in ACTIVATIONS:
        spec = replace(KIMI_K3, activation=activation, weight_format=weight_format)
        selection = registry.choose(spec, where)
        assert selection.name is not None, selection.why
        for decision in selection.decisions:
            for reason in decision.reasons:
                assert reason.what != "check", decision  # a check that raised
                assert reason.value is not None
                assert reason.limit is not None or reason.remedy, decision


def test_memory_counts():
    """Kimi-K3's layer takes 15.7 GB; a device with less free is refused and says how much it would take."""
    files = recorded("h200")
    small = replace(files.devices[0], memory_bytes=80 << 30, memory_free_bytes=8 << 30)
    selection = registry.choose(KIMI_K3, small)
    assert selection.name is None
    for decision in selection.decisions:
        if decision.backend in {"torch", "triton_fused"}:
            assert any(reason.what == "memory" and "8.6 GB free" in reason.value for reason in decision.reasons)
    few = replace(KIMI_K3, local_experts=range(112))
    assert registry.choose(few, small).name is not None


def test_the_report_is_json_with_these_keys():
    result = capabilities(root=HOSTS / "lumi-g")
    report = json.loads(render.to_json(result.to_dict()))
    assert report == result.to_dict()
    assert list(report) == ["schema", "host", "devices", "toolchain", "backends", "selected", "note", "projections"]
    assert report["schema"] == SCHEMA == 1
    assert isinstance(report["schema"], int)
    for backend in report["backends"]:
        assert {"name", "package", "accepted", "reasons"} <= set(backend)
        assert backend["accepted"] is (backend["reasons"] == [])
        for reason in backend["reasons"]:
            assert set(reason) == {"what", "value", "limit", "remedy"}
    assert report["selected"] in {b["name"] for b in report["backends"] if b["accepted"]}
    assert [d["asked"] for d in report["devices"]] == [True] + [False] * 8
    assert {d["vendor"] for d in report["devices"]} == {"amd", "cpu"}
    assert report["toolchain"]["rocm"] == {"version": "6.4.4", "kfd": "openable"}
    assert report["host"]["live"] == ["caches"]


@pytest.mark.parametrize("name", HOST_NAMES)
def test_json_round_trip(name):
    report = capabilities(root=HOSTS / name).to_dict()
    assert json.loads(render.to_json(report)) == report


def test_typed_form():
    result = capabilities(GPT_OSS, device="cuda:3", root=HOSTS / "mi300x")
    assert isinstance(result, Capabilities)
    assert result.selection.spec == GPT_OSS
    assert result.selection.device.index == 3
    assert result.selected == result.selection.name
    assert result.decision("torch") in result.decisions
    with pytest.raises(ValueError, match=r"unknown backend 'x'; known: .*torch"):
        result.decision("x")


def test_a_named_backend():
    assert capabilities(backend="torch", root=HOSTS / "mi355x-aiter-0.1.20").selected == "torch"
    assert capabilities(backend="aiter", root=HOSTS / "lumi-g").selected is None
    with pytest.raises(ValueError, match="unknown backend 'x'"):
        capabilities(backend="x", root=HOSTS / "lumi-g")
    with pytest.raises(ValueError, match="no device 'cuda:9'"):
        capabilities(device="cuda:9", root=HOSTS / "lumi-g")


def text_of(name: str) -> str:
    result = capabilities(root=HOSTS / name)
    return render.to_text(result.to_dict(), question="kimi-k3 on cuda:0", why=result.selection.why)


def test_text_holds_what_a_bug_report_needs():
    text = text_of("lumi-g")
    for part in (
        "replayed from",
        "taken from this machine: caches",
        "gfx90a",
        "AMD Instinct MI250X, memory 68.7 GB, 110 CU",
        "found by kfd",
        "visible: 0, 1, 2, 3, 4, 5, 6, 7 (no variable set)",
        "torch 2.9.1+rocm6.4 (hip 6.4.43484)",
        "triton 3.5.1",
        "ROCm 6.4.4, /dev/kfd openable",
        "TRITON_CACHE_DIR",
        "writable",
        "backends for kimi-k3 on cuda:0",
        "torch (portamoe): accepted, unverified",
        "aiter (rocm_moe): rejected",
        "first in order of those that accept",
    ):
        assert part in text, part


def test_text_of_other_hosts():
    assert "knows sm_107" in text_of("rubin-flashinfer-0.7.2")
    assert "does not know sm_107" in text_of("b300")
    assert "NVIDIA driver 580.159.04, CUDA 13.0" in text_of("h200")
    assert "triton: not installed" in text_of("cpu-only")
    assert "problems\n  /dev/kfd: permission denied" in text_of("lumi-g-no-access")


def test_text_and_json_say_the_same_reasons():
    result = capabilities(root=HOSTS / "mi355x-aiter-impostor")
    text = render.to_text(result.to_dict())
    for decision in result.decisions:
        for reason in decision.reasons:
            assert str(reason) in text


def test_on_request_and_environment_are_shown(monkeypatch):
    slow = Reason("speed", "interpreted", None, "name it")
    monkeypatch.setattr(registry, "backends", lambda: (FakeBackend("slow", on_request=slow),))
    host = recorded("lumi-g", {"ROCR_VISIBLE_DEVICES": "2,1", "NCCL_SOCKET_IFNAME": "hsn"})
    result = Capabilities(host.host, host.devices, registry.choose(KIMI_K3, host.devices[0]))
    text = render.to_text(result.to_dict())
    assert "only on request: speed: interpreted; name it" in text
    assert "selected\n  none" in text
    assert "NCCL_SOCKET_IFNAME=hsn" in text
    assert "visible: 2, 1 (ROCR_VISIBLE_DEVICES=2,1)" in text
    assert result.to_dict()["backends"][0]["only_on_request"] == slow.to_dict()


def test_live_capabilities_hold_the_toolchain():
    report = capabilities().to_dict()
    assert report["host"]["recorded"] is None
    assert report["devices"][-1]["vendor"] == "cpu"
    assert report["devices"][-1]["memory_bytes"] > 1 << 30
    assert report["toolchain"]["torch"]["version"]


def test_an_unknown_wish_in_the_environment_still_gives_a_report(monkeypatch):
    monkeypatch.setenv("PORTAMOE_BACKEND", "nope")
    result = capabilities()
    assert result.selected is None
    assert "PORTAMOE_BACKEND=nope: unknown backend" in result.selection.why
    with pytest.raises(ValueError, match=r"known: .*torch"):
        registry.select(KIMI_K3, result.devices[0])


PLUG_IN = """
from portamoe.torch_backend import TorchBackend

class Backend(TorchBackend):
    name, package = {name!r}, "elsewhere"

    def forward(self, *args, **kwargs):
        {action}

BACKEND = Backend()
"""
ACTIONS = {
    "right": "super().forward(*args, **kwargs)",
    "wrong": "super().forward(*args, **kwargs); args[5].mul_(1.5)",
}


@pytest.fixture
def plug_ins(tmp_path, monkeypatch):
    """Announce backends that do these things when they are called, in this process and its children; no others."""
    for name, action in ACTIONS.items():
        (tmp_path / f"plug_{name}.py").write_text(PLUG_IN.format(name=name, action=action))
        folder = tmp_path / f"plug_{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: plug_{name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[portamoe.backends]\n{name} = plug_{name}:BACKEND\n")
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor/__init__.py").write_text("__version__ = '7'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path / "cache"))
    cached = registry.backends
    cached.cache_clear()
    kept = tuple(backend for backend in registry.backends() if backend.name in ACTIONS)
    monkeypatch.setattr(registry, "backends", lambda: kept)
    yield
    cached.cache_clear()


def test_deep_runs_each_backend_in_a_child(plug_ins, monkeypatch):
    from portamoe import probe

    monkeypatch.setattr(probe, "VENDOR_MODULES", ("vendor", "not_there"))
    spec = replace(KIMI_K3, local_experts=range(8))
    assert capabilities(spec, device="cpu").decision("wrong").reasons == ()
    result = capabilities(spec, device="cpu", deep=True, timeout=120)
    assert result.decision("right") == Accepted("right", "elsewhere", "verified")
    wrong = result.decision("wrong")
    assert isinstance(wrong, Rejected)
    assert wrong.reasons[0].what == "forward"
    assert wrong.reasons[0].value.startswith("failed: ")
    assert result.selected == "right"
    assert result.imports == {"vendor": "ok: version 7"}
    assert "import vendor: ok: version 7" in render.to_text(result.to_dict())


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("", "ok: imported"),
        ("print('noise')\n__version__ = '0.1.20'", "ok: version 0.1.20"),
        ("raise RuntimeError('ROCm version file not found')", "failed: RuntimeError: ROCm version file not found"),
        ("raise KeyError('gfx906')", "failed: KeyError: 'gfx906'"),
        ("raise SystemExit(1)", "failed: SystemExit: 1"),
        ("import os, sys; sys.stderr.write('LLVM ERROR: x\\n'); os.abort()", "crashed: signal SIGABRT; LLVM ERROR: x"),
        ("import os; os._exit(0)", "crashed: exit code 0 without an answer"),
    ],
)
def test_a_package_may_do_anything_at_import(tmp_path, monkeypatch, source, answer):
    from portamoe.deep import try_import

    (tmp_path / "some_vendor.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert str(try_import("some_vendor", 60)) == answer


def test_a_compiler_that_hangs_is_ended_with_its_parent(tmp_path, monkeypatch):
    from portamoe.deep import try_import

    (tmp_path / "compiling.py").write_text(
        "import pathlib, subprocess\n"
        "compiler = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(compiler.pid))\n"
        "compiler.wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for limit in (3, 10, 60):  # a busy machine may take longer to get as far as the compiler
        assert try_import("compiling", limit).status == "timed out"
        if (tmp_path / "pid").exists():
            break
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    # The signal is sent when try_import returns, but takes effect when the kernel next schedules the compiler.
    deadline = time.monotonic() + 10
    while not ended(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(status)


def ended(status: Path) -> bool:
    """The process is gone, or a zombie where nobody reaps orphans."""
    try:
        return "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_deep_and_root_exclude_each_other():
    with pytest.raises(ValueError, match="cannot replay a recording"):
        capabilities(root=HOSTS / "lumi-g", deep=True)


@pytest.mark.parametrize("name", ["kimi-k3", "gpt-oss", "nvfp4", "bf16"])
def test_what_is_accepted_here_can_be_built_and_run(name):
    """On this machine's CPU: every accepting decision is followed by construction and a right forward."""
    import torch

    from portamoe.layer import RoutedExperts
    from portamoe.testing import assert_close, make_problem

    torch.set_num_threads(1)
    small = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 96, "local_experts": range(4)}
    spec = {
        "kimi-k3": KIMI_K3,
        "gpt-oss": GPT_OSS,
        "nvfp4": replace(KIMI_K3, weight_format="nvfp4"),
        "bf16": replace(KIMI_K3, weight_format="bf16"),
    }[name]
    spec = replace(spec, **small)
    problem = make_problem(spec, tokens=3)
    result = capabilities(spec, device="cpu")
    accepted = [d.backend for d in result.decisions if isinstance(d, Accepted)]
    assert "torch" in accepted
    for backend in accepted:
        layer = RoutedExperts(spec, problem.weights, device="cpu", backend=backend, max_tokens=3)
        y = layer(problem.x, problem.topk_ids, problem.topk_weights)
        assert_close(y, problem.reference(), roundings=4, context=backend)
    for decision in result.decisions:
        if isinstance(decision, Rejected):
            with pytest.raises(BackendRejected):
                RoutedExperts(spec, problem.weights, device="cpu", backend=decision.backend, max_tokens=3)
