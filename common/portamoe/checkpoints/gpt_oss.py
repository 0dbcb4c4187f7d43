"""gpt-oss as released on the Hub: quant_method `mxfp4`, all experts of a layer stacked.

`gate_up_proj_blocks` U8 (E, 2I, H/32, 16), `_scales` U8 (E, 2I, H/32), `_bias` (E, 2I); `down_proj_blocks`
(E, H, I/32, 16), `_scales` (E, H, I/32), `_bias` (E, H). A block's 16 bytes hold 32 values, low nibble first. Rows of
gate_up_proj alternate: gate 0, up 0, gate 1, up 1, …; they are put into the canonical order [w1; w3] here.
Source: transformers, integrations/mxfp4.py and models/gpt_oss (interleaving, alpha 1.702); config.json (swiglu_limit).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portamoe.activations import SwiGLUOAI
from portamoe.checkpoints._config import Config
from portamoe.checkpoints._experts import E8M0, Expected, ReadExpert, Share, check_tensors
from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints.errors import CheckpointError
from portamoe.spec import MoESpec
from portamoe.weights import Expert

if TYPE_CHECKING:
    import torch

#: The sigmoid's factor; config.json does not carry it (it says `hidden_act: silu`), the model type implies it.
ALPHA = 1.702


class GptOssReader:
    """Reads gpt-oss."""

    description = "gpt-oss, mxfp4"

    def spec(self, config: Config, layer: int) -> MoESpec:
        """Return the whole layer's spec; raises CheckpointError when the config lacks it."""
        layers = config.integer("num_hidden_layers")
        if not 0 <= layer < layers:
            raise CheckpointError(f"{config.path}: layer {layer} is outside 0:{layers} (num_hidden_layers)")
        config.expect("hidden_act", "silu")
        if config.text.get("swiglu_limit") is None:
            raise CheckpointError(f"{config.path} lacks swiglu_limit, the clamp of gpt-oss's activation")
        return MoESpec(
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_experts=config.integer("num_local_experts"),
            top_k=config.integer("num_experts_per_tok"),
            activation=SwiGLUOAI(alpha=ALPHA, limit=config.text["swiglu_limit"]),
            bias=True,
        )

    def open(self, config: Config, folder: TensorFolder, layer: int, spec: MoESpec, share: Share) -> ReadExpert:
        """Check the layer's six tensors and return how to read one expert by its id."""
        prefix = f"model.layers.{layer}.mlp.experts."
        E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size  # noqa: E741
        expected: dict[str, Expected] = {}
        for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            expected |= {
                f"{prefix}{name}_blocks": Expected(("U8",), (E, rows, columns // 32, 16)),
                f"{prefix}{name}_scales": Expected(E8M0, (E, rows, columns // 32)),
                f"{prefix}{name}_bias": Expected(("BF16", "F32"), (E, rows)),
            }
        check_tensors(folder, prefix, expected, lambda _: True, f"H={H}, I={I}, E={E} in {config.path}")
        return lambda expert, _: _read(folder, prefix, expert, share)


def _read(folder: TensorFolder, prefix: str, expert: int, share: Share) -> Expert:
    import torch

    one = slice(expert, expert + 1)
    pairs = (one, *share.rows(per_value=2))
    groups = (one, slice(None), share.columns(32))
    w2_bias = folder.read(f"{prefix}down_proj_bias", (one,))[0]
    return Expert(
        w13=_separate(folder.read(f"{prefix}gate_up_proj_blocks", pairs)[0].flatten(1)),
        w13_scale=_separate(folder.read(f"{prefix}gate_up_proj_scales", pairs)[0]),
        w13_bias=_separate(folder.read(f"{prefix}gate_up_proj_bias", pairs)[0]),
        w2=folder.read(f"{prefix}down_proj_blocks", groups)[0].flatten(1),
        w2_scale=folder.read(f"{prefix}down_proj_scales", groups)[0],
        # Ranks add their partial sums, so exactly one of them may carry the bias.
        w2_bias=w2_bias if share.rank == 0 else torch.zeros_like(w2_bias),
    )


def _separate(interleaved: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows g0, u0, g1, u1, … in the order of all g, then all u."""
    import torch

    return torch.cat([interleaved[0::2], interleaved[1::2]])


READER = GptOssReader()
