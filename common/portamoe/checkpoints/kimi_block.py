"""What surrounds the routed experts in a Kimi-K3 MoE block: router, latent projections, norm and shared experts.

Below `….layers.{i}.block_sparse_moe.`, all BF16 unless said otherwise; D is the model's hidden size, H the latent one,
S = num_shared_experts · moe_intermediate_size the width of the shared experts, which are stored as one MLP:

    gate.weight (E, D)                              gate.e_score_correction_bias (E,) F32
    routed_expert_down_proj.weight (H, D)           routed_expert_up_proj.weight (D, H)
    routed_expert_norm.weight (H,)                  shared_experts.gate_proj.weight, .up_proj.weight (S, D)
                                                    shared_experts.down_proj.weight (D, S)

The kinds of Kimi-K3 checkpoints differ in the experts only, so one reader serves them all.
Source of names and shapes: moonshotai/Kimi-K3, config.json and model.safetensors.index.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portamoe.checkpoints._config import Config
from portamoe.checkpoints._experts import Expected, Origin, check_tensors
from portamoe.checkpoints._kimi import activation_of, check_layer, prefix_of
from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints.errors import CheckpointError
from portamoe.routing import SigmoidRouter

if TYPE_CHECKING:
    import torch

    from portamoe.activations import SiTU

_MATRIX = ("BF16", "F32")


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and rules of a block, as config.json has them.

    hidden_size:               D, the width of the model
    latent_size:               H, the width that the routed experts see
    shared_intermediate_size:  S of all shared experts together, before it is split over ranks
    moe_intermediate_size:     I of a routed expert, before it is split over ranks
    router:                    top-k, renormalisation and routed_scaling_factor, which multiplies the experts' weights
    norm_eps:                  of the latent RMSNorm, or None: the model has no such norm
    """

    hidden_size: int
    latent_size: int
    shared_intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    router: SigmoidRouter
    activation: SiTU
    norm_eps: float | None


@dataclass(frozen=True)
class BlockWeights:
    """The block's unquantised tensors on the CPU, in the checkpoint's dtype.

    router:           (E, D)
    correction_bias:  (E,) float32, for the selection only
    down, up:         (H, D) and (D, H), the latent projections
    norm:             (H,), or None where the model has no latent norm
    shared_gate_up:   (2S, D), gate rows first; S is this rank's share
    shared_down:      (D, S)
    origin:           the checkpoint and layer they were read from, or None
    """

    router: torch.Tensor
    correction_bias: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    norm: torch.Tensor | None
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor
    origin: Origin | None = None


def block_config(config: Config, layer: int) -> BlockConfig:
    """Return the rules of a layer's block; raises CheckpointError for a dense layer or a rule that is not built."""
    check_layer(config, layer)
    for key in ("num_expert_group", "topk_group"):
        if (value := config.integer(key, 1)) != 1:
            raise CheckpointError(f"{config.path}: {key} is {value}, expected 1: groups of experts are not built")
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    if (top_k := config.integer("num_experts_per_token")) > (experts := config.integer("num_experts")):
        raise CheckpointError(
            f"{config.path}: num_experts_per_token is {top_k}, expected at most num_experts {experts}"
        )
    return BlockConfig(
        hidden_size=config.integer("hidden_size"),
        latent_size=config.integer("routed_expert_hidden_size"),
        shared_intermediate_size=config.integer("num_shared_experts") * config.integer("moe_intermediate_size"),
        moe_intermediate_size=config.integer("moe_intermediate_size"),
        num_experts=experts,
        router=SigmoidRouter(
            top_k=top_k,
            renormalize=config.flag("moe_renormalize"),
            routed_scaling_factor=config.number("routed_scaling_factor"),
        ),
        activation=activation_of(config),
        norm_eps=config.number("rms_norm_eps") if config.flag("latent_moe_use_norm") else None,
    )


def block_weights(
    config: Config, folder: TensorFolder, layer: int, rules: BlockConfig, shared_parallel: tuple[int, int] = (0, 1)
) -> BlockWeights:
    """Check every tensor of the block beside the experts in the headers, then read them.

    shared_parallel:  (rank, ranks): keep this rank's part of S

    Raises CheckpointError that names what is missing, surplus or misshapen, and ValueError for a split that does not
    come out even.
    """
    prefix = prefix_of(folder, layer)
    experts = f"{prefix}experts."
    sizes = f"D={rules.hidden_size}, H={rules.latent_size}, S={rules.shared_intermediate_size} in {config.path}"
    expected = {prefix + name: wanted for name, wanted in _expected(rules).items()}
    check_tensors(folder, prefix, expected, lambda name: not name.startswith(experts), sizes)
    part = _part(rules.shared_intermediate_size, shared_parallel)

    gate_up = [f"{prefix}shared_experts.{name}_proj.weight" for name in ("gate", "up")]
    return BlockWeights(
        router=folder.read(f"{prefix}gate.weight"),
        correction_bias=folder.read(f"{prefix}gate.e_score_correction_bias").float(),
        down=folder.read(f"{prefix}routed_expert_down_proj.weight"),
        up=folder.read(f"{prefix}routed_expert_up_proj.weight"),
        norm=None if rules.norm_eps is None else folder.read(f"{prefix}routed_expert_norm.weight"),
        shared_gate_up=folder.read(gate_up, (part,)),
        shared_down=folder.read(f"{prefix}shared_experts.down_proj.weight", (slice(None), part)),
        origin=Origin(folder.directory.resolve(), layer),
    )


def _expected(rules: BlockConfig) -> Mapping[str, Expected]:
    E, D, H, S = rules.num_experts, rules.hidden_size, rules.latent_size, rules.shared_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (E, D),
        "gate.e_score_correction_bias": (E,),
        "routed_expert_down_proj.weight": (H, D),
        "routed_expert_up_proj.weight": (D, H),
        "shared_experts.gate_proj.weight": (S, D),
        "shared_experts.up_proj.weight": (S, D),
        "shared_experts.down_proj.weight": (D, S),
    }
    if rules.norm_eps is not None:
        shapes["routed_expert_norm.weight"] = (H,)
    return {name: Expected(_MATRIX, shape) for name, shape in shapes.items()}


def _part(size: int, shared_parallel: tuple[int, int]) -> slice:
    match shared_parallel:
        case (int(rank), int(ranks)) if 0 <= rank < ranks:
            pass
        case _:
            raise ValueError(f"shared_parallel must be (rank, ranks) with 0 <= rank < ranks, got {shared_parallel!r}")
    if size % ranks:
        raise ValueError(f"the shared experts' {size} intermediate values cannot be split over {ranks} ranks evenly")
    part = size // ranks
    return slice(rank * part, (rank + 1) * part)
