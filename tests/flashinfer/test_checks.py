"""The table, and `check` on recorded and made-up hosts."""

import dataclasses
import subprocess
import sys

import pytest

from cuda_moe.flashinfer.cutedsl import ATOMIC
from cuda_moe.flashinfer.cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer.cutlass import BACKEND as CUTLASS
from cuda_moe.flashinfer.detect import artifacts, detect_flashinfer
from cuda_moe.flashinfer.support import activation_key, support
from cuda_moe.flashinfer.trtllm import BACKEND as TRTLLM
from portamoe.activations import ACTIVATIONS, GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.spec import GPT_OSS, KIMI_K3, PRESETS
from tests.flashinfer import trees
from tests.host_recordings import recorded

K3_NVFP4 = PRESETS["kimi-k3-nvfp4"]
W4A16 = dataclasses.replace(K3_NVFP4, activation_format="bf16")
MXFP8 = dataclasses.replace(KIMI_K3, activation_format="mxfp8")


def rubin(version="0.7.2.post1", host="rubin-flashinfer-0.7.2", distributions=None, **facts):
    """A recorded device with another FlashInfer."""
    device = recorded(host).devices[0]
    vendor = {**device.host.vendor, "flashinfer": {"version": version, **facts}, "triton": "3.8.0"}
    names = {**device.host.distributions, "flashinfer-python": version, **(distributions or {})}
    return dataclasses.replace(device, host=dataclasses.replace(device.host, vendor=vendor, distributions=names))


def b300(*args, **kwargs):
    return rubin(*args, host="b300", **kwargs)


def hopper(version="0.7.4", **facts):
    return rubin(version, host="h200", **facts)


def text(reasons):
    return "; ".join(map(str, reasons))


@pytest.mark.parametrize("version", ["0.7.2", "0.7.2.post1", "0.7.2+cu130", "0.7.4", "0.8.0"])
def test_rubin_from_0_7_2(version):
    assert CUTEDSL.check(K3_NVFP4, rubin(version)) == []
    assert ATOMIC.check(K3_NVFP4, rubin(version)) == []


@pytest.mark.parametrize("version", ["0.6.18", "0.6.18.post1", "0.7.0", "0.7.1", "0.7.2rc1", "0.7.2.dev3"])
def test_rubin_before_it_is_refused_with_the_true_reason(version):
    (reason,) = CUTEDSL.check(K3_NVFP4, rubin(version))
    assert reason.what == "flashinfer"
    assert "computes plain SwiGLU" in reason.value
    assert "without an error" in reason.value
    assert reason.limit == ">= 0.7.2"


def test_the_recorded_hosts():
    assert CUTEDSL.check(K3_NVFP4, recorded("rubin-flashinfer-0.7.2").devices[0]) == []
    assert "plain SwiGLU" in text(CUTEDSL.check(K3_NVFP4, recorded("rubin-flashinfer-0.7.1").devices[0]))
    assert CUTEDSL.check(K3_NVFP4, recorded("b300").devices[0]) == []


@pytest.mark.parametrize("version", ["0.6.18", "0.7.0", "0.7.1"])
def test_the_same_versions_are_right_on_b300(version):
    assert CUTEDSL.check(K3_NVFP4, b300(version)) == []


def test_before_situ_there_is_none():
    assert "0.6.17 has no situ on sm_103" in text(CUTEDSL.check(K3_NVFP4, b300("0.6.17")))


@pytest.mark.parametrize(
    ("activation", "rubin_has", "b300_has"),
    [
        (SiTU(4.0), True, True),
        (SwiGLU(), True, True),
        (SwiGLU(7.0), True, True),
        (SwiGLUOAI(1.7, 7.0), False, True),
        (GeGLU("tanh"), False, True),
        (GeGLU(), False, False),
        (SwiGLUStep(7.0), False, False),
        (ReLU2(), False, False),
    ],
    ids=str,
)
def test_other_activations_of_cutedsl(activation, rubin_has, b300_has):
    spec = dataclasses.replace(K3_NVFP4, activation=activation)
    assert (CUTEDSL.check(spec, rubin()) == []) is rubin_has
    assert (CUTEDSL.check(spec, b300()) == []) is b300_has


def test_w4a16_and_w4a8():
    assert CUTEDSL.check(W4A16, b300()) == []
    assert "unverified" in text(CUTEDSL.check(W4A16, rubin()))
    assert CUTEDSL.check(MXFP8, b300("0.7.4")) == []
    assert "no situ" in text(CUTEDSL.check(MXFP8, b300("0.7.2")))
    assert "SM107" in text(CUTEDSL.check(MXFP8, rubin("0.7.4")))


CUBINS = {"artifacts": {"folder": "/x", "cubins": 12}}


def test_trtllm():
    assert TRTLLM.check(K3_NVFP4, b300(**CUBINS)) == []
    assert TRTLLM.check(MXFP8, b300(**CUBINS)) == []
    assert "left out" in text(TRTLLM.check(K3_NVFP4, rubin(**CUBINS)))
    assert "SM103" in text(TRTLLM.check(KIMI_K3, b300(**CUBINS)))
    unclamped = dataclasses.replace(K3_NVFP4, activation=SiTU(4.0))
    assert "situ_unclamped" in text(TRTLLM.check(unclamped, b300(**CUBINS)))


def test_trtllms_kernels_are_looked_for_not_fetched():
    assert "compiled kernels" in text(TRTLLM.check(K3_NVFP4, b300()))
    empty = {"artifacts": {"folder": "/cache/cubins", "cubins": 0}}
    reason = text(TRTLLM.check(K3_NVFP4, b300(**empty)))
    assert "/cache/cubins" in reason
    assert "flashinfer-cubin==0.7.2.post1" in reason
    same = {"flashinfer-cubin": "0.7.2.post1"}
    assert TRTLLM.check(K3_NVFP4, b300(distributions=same)) == []
    other = {"flashinfer-cubin": "0.6.13"}
    assert "compiled kernels" in text(TRTLLM.check(K3_NVFP4, b300(distributions=other)))


def test_cutlass_on_hopper():
    assert CUTLASS.check(KIMI_K3, hopper()) == []
    assert "no situ_beta" in text(CUTLASS.check(KIMI_K3, hopper("0.6.18")))
    assert "sm_90" in text(CUTLASS.check(KIMI_K3, b300()))
    assert "not installed" in text(CUTLASS.check(KIMI_K3, recorded("h200").devices[0]))
    spread = dataclasses.replace(KIMI_K3, local_experts=range(112))
    assert "no expert parallelism" in str(CUTLASS.only_on_request(spread, hopper()).limit)
    assert CUTLASS.only_on_request(KIMI_K3, hopper()) is None


def test_packages():
    assert CUTEDSL.check(K3_NVFP4, rubin(nvcc={"path": "/x", "version": "13.4"})) == []
    assert "do not know sm_107" in text(CUTEDSL.check(K3_NVFP4, rubin(nvcc={"path": "/x", "version": "13.0.88"})))
    assert CUTEDSL.check(K3_NVFP4, b300(nvcc={"path": "/x", "version": "13.0.88"})) == []
    assert "nvcc: not found" in text(CUTEDSL.check(K3_NVFP4, b300(nvcc=None)))
    assert CUTEDSL.check(K3_NVFP4, b300(nvcc=None, distributions={"flashinfer-jit-cache": "0.7.2"})) == []
    old = {"nvidia-cutlass-dsl": "4.7.0"}
    assert "nvidia-cutlass-dsl: 4.7.0" in text(CUTEDSL.check(K3_NVFP4, rubin(distributions=old)))


def test_triton_is_needed_for_the_names_to_be_there():
    device = rubin()
    host = dataclasses.replace(device.host, vendor={**device.host.vendor, "triton": None})
    assert "leaves its CuteDSL functions out" in text(CUTEDSL.check(K3_NVFP4, dataclasses.replace(device, host=host)))


@pytest.mark.parametrize("version", [None, "0.7.x-nightly"])
def test_a_version_that_says_nothing(version):
    assert "decides what is computed" in text(CUTEDSL.check(K3_NVFP4, rubin(version)))


def test_a_variable_that_changes_the_numbers():
    device = rubin()
    host = dataclasses.replace(device.host, env={"FLASHINFER_NVFP4_4OVER6": "1"})
    assert "FLASHINFER_NVFP4_4OVER6" in text(CUTEDSL.check(K3_NVFP4, dataclasses.replace(device, host=host)))


def test_biases_memory_and_other_vendors():
    biased = dataclasses.replace(K3_NVFP4, bias=True)
    assert "passes no bias" in text(CUTEDSL.check(biased, b300()))
    assert CUTEDSL.check(GPT_OSS, b300()) != []
    small = dataclasses.replace(b300(), memory_free_bytes=10**9)
    assert "memory" in text(CUTEDSL.check(K3_NVFP4, small))
    assert "vendor nvidia" in text(CUTEDSL.check(K3_NVFP4, recorded("mi300x").devices[0]))
    assert "vendor nvidia" in text(CUTLASS.check(K3_NVFP4, recorded("cpu-only").devices[0]))


def test_every_activation_and_arch_has_an_answer_in_every_mode():
    """An answer is a line of the table or a reason; nothing is accepted by falling through."""
    formats = [(m.weights, m.activations) for m in support().modes.values()]
    made = {"situ": SiTU(4.0, 25.0), "swiglu_oai": SwiGLUOAI(1.7, 7.0), "swiglu_step": SwiGLUStep(7.0)}
    for host in ("h200", "b300", "rubin-flashinfer-0.7.2"):
        device = rubin("0.7.4", host=host, **CUBINS)
        for weights, activations in formats:
            for name, cls in ACTIVATIONS.items():
                spec = dataclasses.replace(
                    KIMI_K3, weight_format=weights, activation_format=activations, activation=made.get(name) or cls()
                )
                for backend in (CUTEDSL, TRTLLM, CUTLASS):
                    mode = support().mode_for(backend.table, spec)
                    lines = support().about(mode.name, device.arch, activation_key(spec.activation)) if mode else ()
                    works = any(e.status == "works" for e in lines)
                    assert (backend.check(spec, device) == []) is works, (host, backend.name, spec)


def test_every_line_names_its_source_and_a_known_mode():
    for entry in support().entries:
        assert entry.mode in support().modes
        assert entry.source
        assert entry.why
        assert entry.status in {"works", "silently_wrong", "absent", "unverified"}


def test_check_imports_nothing_heavy():
    code = (
        "import sys; from tests.host_recordings import recorded; from portamoe.spec import PRESETS\n"
        "from cuda_moe.flashinfer import cutedsl, cutlass, trtllm\n"
        "d = recorded('b300').devices[0]\n"
        "for m in (cutedsl, cutlass, trtllm):\n"
        "    m.BACKEND.check(PRESETS['kimi-k3-nvfp4'], d)\n"
        "assert not {'torch', 'flashinfer', 'triton', 'cutlass'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = ['common', '.']\n{code}"], check=True)


# Facts from files.


def test_facts_of_an_installation(install, tmp_path, monkeypatch):
    install("0.7.2.post1")
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-13.4"))
    compiler = tmp_path / "cuda-13.4" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    facts = detect_flashinfer()
    assert facts["version"] == "0.7.2.post1"
    assert facts["nvcc"] == {"path": str(compiler), "version": "13.4"}
    assert facts["artifacts"] == {"folder": str(tmp_path / "cubins" / trees.ARTIFACT.rstrip("/")), "cubins": 0}
    folder = tmp_path / "cubins" / trees.ARTIFACT
    folder.mkdir(parents=True)
    (folder / "one.cubin").write_text("")
    (compiler.parent.parent / "version.json").write_text('{"cuda_nvcc": {"name": "x", "version": "13.5.37"}}')
    facts = detect_flashinfer()
    assert facts["artifacts"]["cubins"] == 1
    assert facts["nvcc"]["version"] == "13.5.37"
    assert "flashinfer" not in sys.modules


def test_facts_without_an_installation_or_with_a_broken_one(install, tmp_path):
    assert detect_flashinfer() is None
    site = install("0.7.4")
    (site / "flashinfer" / "artifacts.py").write_text("class ArtifactPath(:\n")
    assert "SyntaxError" in detect_flashinfer()["problem"]
    (site / "flashinfer" / "artifacts.py").write_text("x = 1\n")
    assert artifacts(site / "flashinfer", {}) is None
    assert "broken" in text(CUTEDSL.check(K3_NVFP4, rubin(problem="SyntaxError: x")))
