"""Kimi-K3-NVFP4 by NVIDIA's Model Optimizer, quant_method `modelopt_mixed`.

Per projection: `.weight` U8 (N, K/2), `.weight_scale` F8_E4M3 (N, K/16), `.weight_scale_2` F32 and `.input_scale` F32;
value = e2m1 · weight_scale · weight_scale_2. `quantized_layers` lists each module under one of several names. A module
that it misses is still read as what its tensors are, never as BF16; one that it describes otherwise is an error.
Source: NVIDIA/Model-Optimizer, examples/kimi/kimi_k3/quantize_to_nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from portamoe.checkpoints._config import Config
from portamoe.checkpoints._kimi import KimiReader, Storage
from portamoe.checkpoints.errors import CheckpointError

ALGORITHMS = ("MIXED_PRECISION", "NVFP4")


def _storage(config: Config, modules: Sequence[str]) -> Storage:
    if (algorithm := config.quantization.get("quant_algo")) not in ALGORITHMS:
        raise CheckpointError(f"{config.path}: quant_algo is {algorithm!r}, expected {' or '.join(ALGORITHMS)}")
    layers, excluded = config.section("quantized_layers"), config.patterns("exclude_modules")
    for module in modules:
        names = list(_aliases(module))
        entries = {name: layers[name] for name in names if name in layers}
        for name, entry in entries.items():
            kind = (entry.get("quant_algo"), entry.get("group_size")) if isinstance(entry, dict) else (entry, None)
            if kind != ("NVFP4", 16):
                raise CheckpointError(
                    f"{config.path}: quantized_layers has {name} as {entry!r}, "
                    "expected quant_algo NVFP4 with group_size 16"
                )
        patterns = [p for p in excluded if any(fnmatchcase(name, p) for name in names)]
        if patterns and not entries:
            raise CheckpointError(
                f"{config.path}: exclude_modules says with {patterns[0]!r} that {module} is not quantized, "
                "but it is an expert of a quantized checkpoint"
            )
    return Storage("nvfp4", ("F8_E4M3",), weight=".weight", global_scale=".weight_scale_2", input_scale=".input_scale")


def _aliases(module: str) -> Iterator[str]:
    """Yield the names under which "….layers.1.block_sparse_moe.experts.0.w1", or all experts, may be listed."""
    core = module[module.index("layers.") :]
    experts = core[: core.index(".experts.") + len(".experts")]
    for name in (core, experts):
        for renamed in (name, name.replace(".block_sparse_moe.", ".mlp.")):
            for prefix in ("language_model.model.", "language_model.", "model.", ""):
                yield prefix + renamed


READER = KimiReader("Kimi-K3-NVFP4, Model Optimizer", "nvfp4", _storage)
