"""What is asked of a backend: the sizes and formats of one layer's routed experts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from portamoe.activations import Activation, SiTU, SwiGLUOAI, activation_from_dict

WeightFormat = Literal["mxfp4", "nvfp4", "bf16"]
ActivationFormat = Literal["bf16", "mxfp8", "mxfp4", "nvfp4"]

#: Values of K that share one block scale (OCP MX v1.0 section 5.2: 32; NVFP4: 16; unscaled: 1).
BLOCK_SIZE: Mapping[str, int] = MappingProxyType({"mxfp4": 32, "nvfp4": 16, "bf16": 1})


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Sizes, formats and expert range of one rank's routed experts; validated once, hashable.

    hidden_size:        H, the width the experts see (Kimi-K3: the latent 3584, not 7168)
    intermediate_size:  I of this rank, unpadded (after tensor-parallel slicing)
    num_experts:        E of the whole layer, on all ranks
    top_k:              K, experts per token
    activation:         the gated activation between the two GEMMs, with its parameters
    weight_format:      "mxfp4", "nvfp4" or "bf16"
    activation_format:  "bf16" keeps x and h as they are; the others quantise them before each GEMM
    bias:               each expert adds a bias after GEMM1 and GEMM2 (gpt-oss)
    local_experts:      ids that live on this rank, a contiguous range; default, and for `range(0)`: all of them, as
                        many as there are when `dataclasses.replace` changes `num_experts`

    Raises ValueError or TypeError that names the field, what came and what was expected.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation
    weight_format: WeightFormat = "mxfp4"
    activation_format: ActivationFormat = "bf16"
    bias: bool = False
    local_experts: range = field(default=range(0))

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        if not isinstance(self.activation, Activation):
            raise TypeError(f"activation must be a portamoe activation, got {self.activation!r}")
        if not isinstance(self.bias, bool):
            raise TypeError(f"bias must be a bool, got {self.bias!r}")
        _one_of("weight_format", self.weight_format, get_args(WeightFormat))
        _one_of("activation_format", self.activation_format, get_args(ActivationFormat))
        block = BLOCK_SIZE[self.weight_format]
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % block:
                raise ValueError(
                    f"{name} {getattr(self, name)} is no multiple of {block}, the block of {self.weight_format}"
                )
        self._validate_local_experts()

    def _validate_local_experts(self) -> None:
        local = self.local_experts
        if not isinstance(local, range):
            raise TypeError(f"local_experts must be a range, got {local!r}")
        # `replace` hands on the very object: all experts of the old number become all of the new one.
        default = local.start == local.stop == 0  # range(5, 5) is equal to range(0), but no way to say "all"
        if default or local == range(self.num_experts) or local is _all(len(local)):
            object.__setattr__(self, "local_experts", _all(self.num_experts))
        elif local.step != 1 or local.start < 0 or local.stop > self.num_experts or not local:
            raise ValueError(
                f"local_experts must be a non-empty contiguous range within 0:{self.num_experts}, "
                f"got {local.start}:{local.stop}" + (f":{local.step}" if local.step != 1 else "")
            )

    @property
    def num_local_experts(self) -> int:
        """E_local, experts held by this rank."""
        return len(self.local_experts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take copied or unpickled values; `all experts` stays that."""
        self.__dict__.update(state)
        self._validate_local_experts()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `local_experts` is [first, end)."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["activation"] = self.activation.to_dict()
        out["local_experts"] = [self.local_experts.start, self.local_experts.stop]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoESpec:
        """Build a spec from its JSON form; unknown names raise ValueError, missing ones too."""
        known = {f.name for f in fields(cls)}
        if surplus := sorted(set(data) - known):
            raise ValueError(f"unknown spec fields {surplus}; known: {sorted(known)}")
        required = {"hidden_size", "intermediate_size", "num_experts", "top_k", "activation"}
        if missing := sorted(required - set(data)):
            raise ValueError(f"spec lacks {missing}")
        values = dict(data)
        values["activation"] = activation_from_dict(values["activation"])
        if "local_experts" in values:
            bounds = values["local_experts"]
            if not (isinstance(bounds, list | tuple) and len(bounds) == 2):
                raise ValueError(f"local_experts must be [first, end), got {bounds!r}")
            values["local_experts"] = range(*cast("list[int]", bounds))
        return cls(**values)


@functools.cache
def _all(num_experts: int) -> range:
    """Return the one object that stands for all experts, so that it can be told from a range that a caller made."""
    return range(num_experts)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


#: moonshotai/Kimi-K3 text_config: latent 3584, I 3072, 896 experts, top-16, SiTU(4, 25).
KIMI_K3 = MoESpec(
    hidden_size=3584,
    intermediate_size=3072,
    num_experts=896,
    top_k=16,
    activation=SiTU(beta=4.0, linear_beta=25.0),
)

#: nvidia/Kimi-K3-NVFP4: the same weights recoded, activations quantised with the checkpoint's input scales.
KIMI_K3_NVFP4 = replace(KIMI_K3, weight_format="nvfp4", activation_format="nvfp4")

#: openai/gpt-oss-120b config: H = I = 2880, 128 experts, top-4, SwiGLU-OAI(1.702, 7), biases.
GPT_OSS = MoESpec(
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=128,
    top_k=4,
    activation=SwiGLUOAI(alpha=1.702, limit=7.0),
    bias=True,
)

PRESETS: Mapping[str, MoESpec] = MappingProxyType(
    {"kimi-k3": KIMI_K3, "kimi-k3-nvfp4": KIMI_K3_NVFP4, "gpt-oss": GPT_OSS}
)


def load_spec(name_or_file: str) -> MoESpec:
    """Return a preset by name ("kimi-k3", "kimi-k3-nvfp4", "gpt-oss") or read a JSON file of MoESpec's fields.

    Raises ValueError if it is neither, or when the JSON does not describe a spec.
    """
    if preset := PRESETS.get(name_or_file):
        return preset
    path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(f"{name_or_file!r} is neither a preset ({', '.join(PRESETS)}) nor a file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, expected an object of MoESpec fields")
    return MoESpec.from_dict(data)
