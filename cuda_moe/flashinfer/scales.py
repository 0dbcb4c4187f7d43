"""The scales beside the block scales: one number for GEMM1 of an expert, one for its GEMM2, one for x and one for h.

NVFP4: GEMM1's accumulator is the product over (input scale · global scale), so w13_alpha = global scale · input scale
of x; w2_alpha likewise with that of h. Kernels quantise x once for all experts: the largest input scale of the rank
serves them all, as in vLLM. w1 and w3 must share a global scale, see `portamoe.nvfp4.fold_global_scales`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portamoe.nvfp4 import InexactError, fold_global_scales

if TYPE_CHECKING:
    import torch

    from cuda_moe.flashinfer.support import Mode
    from portamoe.weights import Expert

#: Largest E8M0 code that is served: 2^73. Slots of other ranks may be computed with weight 0, and 0 times an expert's
#: output must be 0, so nothing may overflow float32: 6 * 2^73 * 100 * I stays far below 2^127.
MAX_E8M0 = 200
_E4M3_NAN = 0x7F


@dataclass
class Scales:
    """Collects the scales of all experts while they are converted."""

    mode: Mode
    _globals: list[tuple[float, float]] = field(default_factory=list)
    _inputs: list[tuple[float, float]] = field(default_factory=list)

    def take(self, expert: Expert, index: int) -> Expert:
        """Note the expert's scales and return what the layout converts: weights and block scales.

        Raises ValueError for NaN or huge block scales, for global scales that no kernel can express and for input
        scales that are not positive.
        """
        from cuda_moe.flashinfer.layouts import without_global_scales

        self._require_finite(expert, index)
        if self.mode.weights != "nvfp4":
            self._globals.append((1.0, 1.0))
            return expert
        try:
            w13_scale, w13_global = fold_global_scales(expert)
        except InexactError as error:
            raise InexactError(f"local expert {index}: {error}") from error
        assert expert.w2_global_scale is not None  # noqa: S101 - `validate` saw to it
        self._globals.append((float(w13_global), float(expert.w2_global_scale)))
        inputs = [_largest(value) for value in (expert.w13_input_scale, expert.w2_input_scale)]
        if any(not 0 < value < float("inf") for value in inputs):
            raise ValueError(f"local expert {index} has the input scales {inputs}; they must be positive and finite")
        self._inputs.append((inputs[0], inputs[1]))
        return without_global_scales(expert, w13_scale)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return w13_alpha, w2_alpha, x_factor and h_factor on the CPU, see `FlashInferWeights`."""
        import torch

        scales = torch.tensor(self._globals, dtype=torch.float32)
        inputs = torch.ones(2)
        if self.mode.activations == "nvfp4":
            inputs = torch.tensor(self._inputs, dtype=torch.float32).amax(0)
        alphas, factors = scales * inputs, 1.0 / inputs
        return {
            "w13_alpha": alphas[:, 0].contiguous(),
            "w2_alpha": alphas[:, 1].contiguous(),
            "x_factor": factors[:1].clone(),
            "h_factor": factors[1:].clone(),
        }

    def _require_finite(self, expert: Expert, index: int) -> None:
        import torch

        for name in ("w13_scale", "w2_scale"):
            codes = getattr(expert, name).view(torch.uint8)
            if self.mode.weights == "nvfp4":
                if bool(((codes & 0x7F) == _E4M3_NAN).any()):
                    raise ValueError(f"{name} of local expert {index} holds NaN; the checkpoint is damaged")
            elif (largest := int(codes.max())) > MAX_E8M0:
                what = "NaN" if largest == 255 else f"2^{largest - 127}"
                raise ValueError(f"{name} of local expert {index} holds {what}; E8M0 codes up to {MAX_E8M0} are served")


def _largest(scale: torch.Tensor | None) -> float:
    """Return an input scale, the larger of w1's and w3's; 1 where the checkpoint has none."""
    return 1.0 if scale is None else float(scale.max())
