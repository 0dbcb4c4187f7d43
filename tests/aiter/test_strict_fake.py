"""The stand-in for AITER, before anything is tested with it: its un-shuffle against hashes of AITER's own shuffles."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.aiter import strict_moe

CONTRACT = json.loads((Path(__file__).parent / "contract.json").read_text(encoding="utf-8"))
E, I, D = 4, 384, 512  # noqa: E741 - the letters of the field


def drawn() -> dict[str, torch.Tensor]:
    """Return the seeded bytes that the recorded hashes belong to."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    return {
        "w13": draw(0, 256, E, 2 * I, D // 2),
        "w2": draw(0, 256, E, D, I // 2),
        "s13": draw(100, 140, E, 2 * I, D // 32),
        "s2": draw(100, 140, E, D, I // 32),
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(CONTRACT["hashes"]))
def test_offsets_reproduce_aiters_bytes(name):
    source, *layout = name.split()
    interleaved = layout == ["interleaved"]
    tensor = drawn()[source]
    rows, columns = tensor.shape[1:]
    if source.startswith("w"):
        offsets, width, fill = strict_moe.weight_offsets(rows, columns, interleaved), columns, 0
    else:
        width = -(-columns // 8) * 8
        offsets, fill = strict_moe.scale_offsets(rows, columns, interleaved), 0x7F
    stored = torch.full((E, rows * width), fill, dtype=torch.uint8)
    stored[:, offsets] = tensor
    assert digest(stored) == CONTRACT["hashes"][name]
    for expert in range(E):
        assert torch.equal(strict_moe.unshuffle(stored[expert], offsets), tensor[expert])


@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets_hit_every_byte_once(interleaved):
    for offsets in (
        strict_moe.weight_offsets(256, 128, interleaved),
        strict_moe.scale_offsets(256, 8, interleaved),
    ):
        assert torch.equal(offsets.flatten().sort().values, torch.arange(offsets.numel()))


def test_quantisers_round_to_the_grid():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, 5.1, 2.4, 0.2, -0.3, 1.0, 3.4, -6.0])
    # amax 6 -> scale 1: the E2M1 grid itself, ties to even
    expected = torch.tensor([6.0, 6.0, 2.0, 0.0, -0.5, 1.0, 3.0, -6.0])
    assert torch.equal(strict_moe.quantise_activations(x, "a4w4")[0, :8], expected)
    exact = torch.tensor([[448.0, -1.75] + [0.0] * 30])
    assert torch.equal(strict_moe.quantise_activations(exact, "a8w4"), exact)
