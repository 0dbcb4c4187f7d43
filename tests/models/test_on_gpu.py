"""The block on a GPU: expected output through every backend, graphs, the second stream, the kernels' edges."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from safetensors.torch import load_file  # noqa: E402

from portamoe.models._block_ops import TorchOps, TritonOps  # noqa: E402
from portamoe.models.kimi_k3 import LatentMoE  # noqa: E402
from portamoe.routing import SigmoidRouter  # noqa: E402
from portamoe.testing import error_metrics  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TINY = Path(__file__).parents[1] / "data" / "kimi-k3-tiny"


def build(layer: int = 1, **options) -> LatentMoE:
    return LatentMoE.from_checkpoint(TINY, layer, **({"max_tokens": 64, "device": "cuda"} | options))


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("backend", ["torch", "triton_unfused", None])
def test_expected_output(layer, kernels, backend):
    data = load_file(TINY / "expected" / f"layer_{layer}.safetensors")
    block = build(layer, backend=backend, kernels=kernels)
    assert error_metrics(block(data["hidden"].cuda()), data["block_out"]).rms <= 0.006


def test_a_graph_follows_its_input_and_nothing_is_left_from_the_call_before():
    block, plain = build(), build(overlap=False)
    block.capture([1, 9, 16])
    for tokens in (1, 9, 16, 5, 40):
        for _ in range(3):
            hidden = torch.randn(tokens, 512, device="cuda").bfloat16()
            assert torch.equal(block(hidden), plain(hidden))
    with pytest.raises(ValueError, match="tokens has 17, expected 1 to 16"):
        block.capture([17])


def test_a_backend_that_waits_for_the_device_is_not_captured():
    with pytest.raises(RuntimeError, match="torch cannot run inside a graph capture"):
        build(backend="torch").capture([1])


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65])
def test_kernels_at_real_sizes(tokens):
    x, weight = torch.randn(tokens, 7168, device="cuda").bfloat16(), torch.randn(896, 7168, device="cuda").bfloat16()
    bias = torch.randn(896, device="cuda") * 0.1
    rule = SigmoidRouter(16)
    weight *= 0.02
    ids, weights = TritonOps().route(x, weight, bias, rule)
    wanted_ids, wanted = rule(x.double() @ weight.double().T, bias.double())
    # Scores that float32 cannot tell apart may change places.
    assert (ids == wanted_ids).float().mean() > 0.99
    same = ids == wanted_ids
    assert torch.allclose(weights[same], wanted[same], rtol=1e-4)
    gate_up = torch.randn(tokens, 2 * 6144, device="cuda").bfloat16() * 20
    from portamoe.activations import SiTU

    activation = SiTU(4.0, 25.0)
    ours = TritonOps().activate(gate_up, activation)
    assert error_metrics(ours, activation.apply(gate_up.double())).rms <= 0.0025
    latent, scale = torch.randn(tokens, 3584, device="cuda").bfloat16(), torch.randn(3584, device="cuda").bfloat16()
    normed = TritonOps().norm(latent, scale, 1e-5)
    assert error_metrics(normed, TorchOps().norm(latent.double(), scale.double(), 1e-5)).rms <= 0.0025
