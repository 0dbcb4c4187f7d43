"""A strict stand-in for AITER's `fused_moe`: checks the whole contract, then computes in float32.

It reads the *shuffled* bytes through index arithmetic of its own and knows nothing of the adapter. The layout that it
expects follows from the environment at the call, as AITER's does, so weights prepared for another mode give wrong
numbers, not an error. Everything that AITER leaves to luck (a lost `is_shuffled`, missing betas, ids out of range)
raises here.
"""

import os

import torch

#: E2M1 values by code (OCP MX v1.0, section 5.3.3); bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Settings under which AITER's numbers are known to be lossy or wrong.
FORBIDDEN_ENV = ("AITER_MXFP4_INTERMEDIATE", "AITER_MOE_A8W4_BYPASS_QUANT", "AITER_FORCE_A8W4")


class ContractViolationError(Exception):
    """The caller broke AITER's contract in a way that AITER itself would not report."""


class IllegalAccessError(Exception):
    """The kernel would have read outside its tensors."""


def mode_of_environment() -> str:
    """Return the SiTU mode that AITER would choose now; it reads these variables at every call."""
    if os.environ.get("AITER_SITUV2_A8W4", "0") == "1":
        return "a8w4"
    return "a4w4" if os.environ.get("AITER_SITUV2_A4W4", "0") == "1" else "a16w4"


def is_interleaved(mode: str, version: tuple[int, ...]) -> bool:
    """Gate and up rows alternate in blocks of 16: a8w4 always, a16w4 before 0.1.20."""
    return mode == "a8w4" or (mode == "a16w4" and version < (0, 1, 20))


def stored_row(row: torch.Tensor, rows: int, interleaved: bool) -> torch.Tensor:
    """Return where canonical `row` of `[w1; w3]` (rows in all) lies before the 16x16 shuffle."""
    if not interleaved:
        return row
    half = rows // 2
    is_up = (row >= half).long()
    within = row - is_up * half
    return (within // 16 * 2 + is_up) * 16 + within % 16


def weight_offsets(rows: int, row_bytes: int, interleaved: bool = False) -> torch.Tensor:
    """Return, for each canonical (row, byte) of one expert, its offset in the shuffled bytes."""
    row = stored_row(torch.arange(rows), rows, interleaved)[:, None]
    byte = torch.arange(row_bytes)[None, :]
    tile = row // 16 * (row_bytes // 16) + byte // 16
    return tile * 256 + row % 16 * 16 + byte % 16


def scale_offsets(rows: int, columns: int, interleaved: bool = False) -> torch.Tensor:
    """Return, for each canonical (row, column) of one expert's scales, its offset in the shuffled bytes.

    `columns` is the unpadded K/32; the stored rows have it rounded up to 8.
    """
    row = stored_row(torch.arange(rows), rows, interleaved)[:, None]
    column = torch.arange(columns)[None, :]
    tile = row // 32 * (-(-columns // 8)) + column // 8
    return tile * 256 + (column % 4 * 16 + row % 16) * 4 + column % 8 // 4 * 2 + row % 32 // 16


def unshuffle(stored: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Gather the canonical bytes of one expert."""
    return stored.reshape(-1)[offsets]


def dequantise(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 (rows, K) of E2M1 nibbles, low nibble = even K, times 2^(scale - 127) per 32."""
    table = torch.tensor(E2M1)
    values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1)
    exponent = scales.to(torch.float64) - 127
    factor = torch.where(scales == 255, torch.nan, torch.exp2(exponent)).float()
    return (values.reshape(packed.shape[0], -1, 32) * factor[:, :, None]).reshape(packed.shape[0], -1)


def quantise_activations(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Round (T, K) to MXFP8 (a8w4) or MXFP4 (a4w4) blocks of 32, as float32; a16w4 rounds to bf16.

    The shared exponent is OCP's floor(log2(amax)) - emax with emax 8 (E4M3) or 2 (E2M1).
    """
    if mode == "a16w4":
        return x.bfloat16().float()
    blocks = x.float().reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.floor(torch.log2(amax)) - (8 if mode == "a8w4" else 2))
    ratio = blocks / scale
    if mode == "a8w4":
        ratio = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        magnitude = ratio.abs().clamp_max(6)
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        ratio = torch.round(magnitude / step) * step * ratio.sign()
    return (ratio * scale).reshape(x.shape)


def activate(name: str, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """Return the gated activation that AITER's enum names, float32."""
    if name == "Situv2":
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
    if name == "Silu":
        return gate * torch.sigmoid(gate) * up
    if name == "Swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    raise ContractViolationError(f"no such fused activation here: {name}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractViolationError(message)


def _check_call(call: dict, mode: str, version: tuple[int, ...]) -> None:
    hidden, w1, w2 = call["hidden_states"], call["w1"], call["w2"]
    ids, weights = call["topk_ids"], call["topk_weight"]
    for name in FORBIDDEN_ENV:
        _require(os.environ.get(name, "0") in ("", "0"), f"{name} is set: lossy or wrong numbers")
    situ = getattr(call["activation"], "name", None) == "Situv2"
    if situ and mode == "a16w4":
        for name in ("expert_mask", "bias1", "bias2"):
            if call[name] is not None:
                raise NotImplementedError(f"SiTU a16w4 does not take {name}")
        if call["doweight_stage1"]:
            raise NotImplementedError("SiTU a16w4 does not take doweight_stage1")
    _require(getattr(call["quant_type"], "name", None) == "per_1x32", f"quant_type {call['quant_type']!r}")
    _require(hidden.dtype in (torch.bfloat16, torch.float16), f"hidden_states is {hidden.dtype}")
    _require(hidden.dim() == 2 and hidden.is_contiguous(), "hidden_states must be (T, D), contiguous")
    _require(call["dtype"] in (None, torch.bfloat16, torch.float16), f"dtype {call['dtype']}")
    fp4 = torch.float4_e2m1fn_x2
    for name, weight in (("w1", w1), ("w2", w2)):
        _require(weight.dtype == fp4, f"{name} is {weight.dtype}, not float4_e2m1fn_x2")
        _require(weight.dim() == 3 and weight.is_contiguous(), f"{name} must be 3-D and contiguous")
        _require(getattr(weight, "is_shuffled", False) is True, f"{name}.is_shuffled is lost")
    experts, rows, hidden_bytes = w1.shape
    _require(hidden.shape[1] == 2 * hidden_bytes, f"hidden_states {tuple(hidden.shape)} against w1 {tuple(w1.shape)}")
    _require(tuple(w2.shape) == (experts, hidden.shape[1], rows // 4), f"w2 {tuple(w2.shape)} against w1")
    _require(hidden.shape[1] % 256 == 0, f"D {hidden.shape[1]} is no multiple of tile_k 256")
    _require(rows % 256 == 0, f"2I {rows} is no multiple of 256")
    _check_scales(call, experts, rows, hidden.shape[1])
    _require(ids.dtype == torch.int32 and ids.is_contiguous(), f"topk_ids is {ids.dtype}")
    _require(weights.dtype == torch.float32 and weights.is_contiguous(), f"topk_weight is {weights.dtype}")
    _require(ids.shape == weights.shape and ids.shape[0] == hidden.shape[0] > 0, "routing of another shape")
    if bool(((ids < 0) | (ids >= experts)).any()):
        raise IllegalAccessError(f"topk_ids outside 0..{experts - 1}")
    ordered = ids.sort(dim=1).values
    _require(not bool((ordered[:, 1:] == ordered[:, :-1]).any()), "an expert twice in one row")
    if situ:
        for name in ("beta", "linear_beta"):
            _require(call[name] is not None, f"{name} is missing: 1.0 on one kernel, 4 or 25 on another")
            if not call[name] > 0:
                raise ValueError(f"{name} must be positive")
        _require(call["swiglu_limit"] in (None, 0.0), "swiglu_limit would clamp SiTU on some kernels")
    wanted = "interleave" if is_interleaved(mode, version) else "separated"
    _require(call["gate_mode"] == wanted, f"gate_mode {call['gate_mode']!r}, {mode} takes {wanted!r}")
    for name in ("a1_scale", "a2_scale", "num_local_tokens", "block_size_M"):
        _require(call[name] is None, f"{name} is not part of this contract")
    _require(call["splitk"] == 0 and call["moe_sorting_dispatch_policy"] == 0, "splitk or dispatch policy")


def _check_scales(call: dict, experts: int, rows: int, hidden: int) -> None:
    for name, count, columns in (
        ("w1_scale", experts * rows, hidden // 32),
        ("w2_scale", experts * hidden, rows // 2 // 32),
    ):
        scale = call[name]
        _require(scale is not None, f"{name} is missing")
        _require(scale.dtype in (torch.uint8, torch.float8_e8m0fnu), f"{name} is {scale.dtype}")
        shape = (-(-count // 256) * 256, -(-columns // 8) * 8)
        _require(tuple(scale.shape) == shape, f"{name} is {tuple(scale.shape)}, not {shape}")
        _require(scale.is_contiguous(), f"{name} must be contiguous")
        _require(not bool((scale.view(torch.uint8) == 255).any()), f"{name} holds NaN bytes (padding?)")


def _one_expert(call: dict, expert: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _, rows, hidden_bytes = call["w1"].shape
    hidden, inter = 2 * hidden_bytes, rows // 2
    columns1, columns2 = hidden // 32, inter // 32
    scale1 = call["w1_scale"].view(torch.uint8)[expert * rows : (expert + 1) * rows]
    scale2 = call["w2_scale"].view(torch.uint8)[expert * hidden : (expert + 1) * hidden]
    s1 = unshuffle(scale1, scale_offsets(rows, columns1, interleaved))
    s2 = unshuffle(scale2, scale_offsets(hidden, columns2))
    packed1 = unshuffle(call["w1"].view(torch.uint8)[expert], weight_offsets(rows, hidden_bytes, interleaved))
    packed2 = unshuffle(call["w2"].view(torch.uint8)[expert], weight_offsets(hidden, inter // 2))
    _check_padding(call, packed1, packed2)
    return dequantise(packed1, s1), dequantise(packed2, s2)


def _check_padding(call: dict, packed1: torch.Tensor, packed2: torch.Tensor) -> None:
    """AITER ignores the pad arguments on some paths, so the padded region must be zeros."""
    pad_i, pad_h = call["intermediate_pad"], call["hidden_pad"]
    inter = packed1.shape[0] // 2
    if pad_i:
        halves = packed1.reshape(2, inter, -1)
        _require(not bool(halves[:, inter - pad_i :].any()), "w1's padded rows are not zero")
        _require(not bool(packed2[:, (inter - pad_i) // 2 :].any()), "w2's padded columns are not zero")
    if pad_h:
        hidden = packed2.shape[0]
        _require(not bool(packed2[hidden - pad_h :].any()), "w2's padded rows are not zero")
        _require(not bool(packed1[:, (hidden - pad_h) // 2 :].any()), "w1's padded columns are not zero")


def fused_moe(call: dict, version: tuple[int, ...]) -> torch.Tensor:
    """Check `call` (every parameter of that version's `fused_moe` by name) and compute it.

    Rounds h and the result, as the bf16 kernels do. Raises what AITER raises where that is known, else
    ContractViolationError or IllegalAccessError.
    """
    mode = mode_of_environment()
    _check_call(call, mode, version)
    interleaved = is_interleaved(mode, version)
    ids, weights = call["topk_ids"], call["topk_weight"]
    x = quantise_activations(call["hidden_states"].float(), mode)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = _one_expert(call, expert, interleaved)
        gate, up = (x[token] @ w13.T).chunk(2, dim=1)
        h = activate(call["activation"].name, gate, up, call["beta"], call["linear_beta"])
        y = quantise_activations(h, mode) @ w2.T
        total.index_add_(0, token, weights[token, slot, None] * y)
    return total.to(call["dtype"] or call["hidden_states"].dtype)
