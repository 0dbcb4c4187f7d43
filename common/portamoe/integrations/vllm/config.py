"""The quantisation config that takes the place of vLLM's "mxfp4"."""
# mypy: disable-error-code="misc"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

from portamoe.decision import Reason
from portamoe.integrations.vllm import LOGGER, decision
from portamoe.integrations.vllm.decision import LayerDecision
from portamoe.integrations.vllm.method import PortaMxfp4MoEMethod

NAME = "mxfp4"

_LOG = init_logger(LOGGER)


class PortaMxfp4Config(Mxfp4Config):
    """`Mxfp4Config` whose layers portamoe serves where it can; vLLM's own method serves the others."""

    def _make_moe_method(self, moe: Any) -> Any:
        found = decide(moe)
        _LOG.info_once(str(found))
        if found.backend is None:
            return super()._make_moe_method(moe)
        return PortaMxfp4MoEMethod(moe, found)


def decide(moe: Any) -> LayerDecision:
    """Return portamoe's decision, after asking whether the user chose a method of vLLM's by its own variables."""
    if chosen := stock_choice(moe):
        return LayerDecision(None, None, (chosen,))
    return decision.decide(moe)


def stock_choice(moe: Any) -> Reason | None:
    """Return the reason where vLLM's settings ask for AITER's Kimi-K3 kernels or for the lossy recode to int4."""
    from vllm.model_executor.layers.quantization import mxfp4

    for name, what in (
        ("_use_k3_situ_aiter", "VLLM_ROCM_USE_AITER"),
        ("_use_k3_situ_int4_gfx942", "--quantization-config.moe.weight"),
    ):
        asked = getattr(mxfp4, name, None)  # 0.31 and 0.32 have not both
        if asked is not None and asked(moe):
            return Reason(what, "asks for vLLM's own kernels", None, "unset it to let portamoe serve")
    return None


def register() -> None:
    """Put `PortaMxfp4Config` in the place of "mxfp4"; a second time changes nothing."""
    register_quantization_config(NAME)(PortaMxfp4Config)
