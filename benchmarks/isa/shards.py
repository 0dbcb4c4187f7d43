"""The specs whose kernels the report judges: Kimi-K3 as one rank holds it, and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec

#: Kimi-K3 spread over 8 or 32 ranks by expert, or over 8 by tensor (I = 3072 / 8); gpt-oss whole.
SPECS: Mapping[str, MoESpec] = MappingProxyType(
    {
        "EP8": replace(KIMI_K3, local_experts=range(112)),
        "TP8": replace(KIMI_K3, intermediate_size=384),
        "EP32": replace(KIMI_K3, local_experts=range(28)),
        "gpt-oss": GPT_OSS,
    }
)
#: Shards whose whole call is modelled, with the number of ranks that share the experts.
CALL_RANKS: Mapping[str, int] = MappingProxyType({"EP8": 8, "TP8": 1, "EP32": 32})
CALL_TOKENS = (1, 4, 16, 64, 256)
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
