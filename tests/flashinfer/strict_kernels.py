"""Strict stand-ins for FlashInfer's MoE kernels and quantisers: check the contract, then compute in float32.

They read the *converted* bytes through index arithmetic of their own and know nothing of the adapter. A layout prepared
for another kernel gives wrong numbers, not an error; what FlashInfer leaves to luck (a missing beta, a scale of the
wrong shape or dtype, ids beyond the layer) raises here.
"""

import torch

#: E2M1 values by code (OCP MX v1.0, section 5.3.3); bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: FlashInfer's neutral clamp.
NO_LIMIT = 3.4028234663852886e38
SWIGLU, RELU2, GEGLU_TANH, SITU = 3, 6, 8, 10
#: What the stand-in of the SM90 byte order does to a byte; its inverse is itself. Only the device knows the real one.
SM90_MARK = 0x5A


class ContractViolationError(Exception):
    """The caller broke FlashInfer's contract."""


def _require(holds, message):
    if not holds:
        raise ContractViolationError(message)


def up_first_row(row, intermediate, group):
    """Return where canonical row of [w1; w3] (gate first) lies when `group` rows of up and of gate take turns."""
    is_gate = (row < intermediate).long()
    within = row % intermediate
    return within // group * 2 * group + is_gate * group + within % group


def shuffled_row(row):
    """Return where a row goes in trtllm-gen's order: position i of 32 goes to (i % 4) * 8 + i // 4."""
    inside = row % 32
    return row - inside + inside % 4 * 8 + inside // 4


def swizzled_offset(row, column, columns):
    """Return the offset of scale (row, column) in 128x4 tiles."""
    tile = row // 128 * (columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def dequantise(packed, scale, block):
    """Return (R, K) float32 of E2M1 nibbles, low nibble = even K, times a float32 scale per `block`."""
    table = torch.tensor(E2M1)
    values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), -1).flatten(-2)
    return values * scale.repeat_interleave(block, dim=-1)


def scale_values(codes, block):
    """Return the float32 value of scale bytes: E4M3 for blocks of 16, E8M0 for 32."""
    if block == 16:
        return codes.view(torch.float8_e4m3fn).float()
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127)).float()


def quantise_nvfp4(x, factor):
    """Return packed E2M1 and E4M3 scales of (R, K): scale E4M3(amax / 6 * factor), element E2M1(x * factor / scale)."""
    blocks = x.float().reshape(x.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 * factor).clamp_max(448).to(torch.float8_e4m3fn)
    step = scale.float()[..., None]
    ratio = torch.where(step > 0, blocks * factor / step, 0.0)
    magnitude = ratio.abs().clamp_max(6)
    grain = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / grain) * grain
    codes = torch.searchsorted(torch.tensor(E2M1[:8]), rounded.contiguous()).to(torch.uint8)
    codes = (codes | (ratio.signbit().to(torch.uint8) << 3)).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


def quantise_mxfp8(x):
    """Return E4M3 elements and E8M0 bytes of (R, K), exponent floor(log2(amax)) - 8."""
    blocks = x.float().reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = torch.floor(torch.log2(amax)) - 8
    values = (blocks / torch.exp2(exponent)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.reshape(x.shape), (exponent.squeeze(-1) + 127).to(torch.uint8)


def activate(call, kind, gate, up):
    """Return the activation that the arguments mean, float32."""
    if kind == "situ":
        beta, linear = call["betas"]
        up = up if linear is None else linear * torch.tanh(up / linear)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
    if kind == GEGLU_TANH:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    alpha, offset, limit = call.get("swiglu", (1.0, 0.0, NO_LIMIT))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def fp4_quantize(call):
    """NVFP4 of x with linear scales; a swizzled layout is a violation, since the kernels here read linear ones."""
    x = call["input"]
    _require(x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous(), "input must be bf16, contiguous")
    _require(call["sf_vec_size"] == 16 and not call["sf_use_ue8m0"], "NVFP4 has E4M3 scales of 16")
    _require(call["is_sf_swizzled_layout"] is False, "activation scales are linear")
    _require(call["global_scale"].dtype == torch.float32 and call["global_scale"].numel() == 1, "global_scale")
    if "nvfp4_4over6" in call:
        _require(call["nvfp4_4over6"] is None, "4over6 would be read from the environment")
    packed, scale = quantise_nvfp4(x, call["global_scale"])
    return packed, scale.view(torch.uint8)


def mxfp8_quantize(call):
    """MXFP8 of x with linear scales, flat as FlashInfer returns them."""
    _require(call["is_sf_swizzled_layout"] is False, "activation scales are linear")
    values, scale = quantise_mxfp8(call["input"])
    return values, scale.flatten()


def cute_dsl(call, version, drop_situ=False, arch="sm_100"):
    """`cute_dsl_fused_moe` of a release such as "0.7.2".

    drop_situ: leave both betas out without an error, as SM107 did before 0.7.2
    """
    if arch == "sm_107":
        atomics = tuple(int(part) for part in version.split(".")[:3]) < (0, 7, 4)
        if atomics and not call["use_fused_finalize"]:
            raise NotImplementedError("use_fused_finalize=False is not supported by the Rubin (SM107) kernel")
        _require(call["quant_mode"] == "w4a4", "SM107 has w4a4 alone")
    mode = call["quant_mode"]
    swap = call.get("swap_ab", False)
    _require(mode in ("w4a4", "w4a16", "w4a8"), f"quant_mode {mode!r}")
    block, group = (32 if mode == "w4a8" else 16), (16 if swap else 64)
    if mode == "w4a8" and not swap:
        _require(call["situ_beta"] is None, "SiTU with MXFP8 activations requires swap_ab=True")
        _require(call["use_fused_finalize"], "MXFP8 activations require fused finalize with swap_ab=False")
    _require(not (mode == "w4a16" and swap), "swap_ab is not for w4a16")
    _require((call["fc2_input_scale"] is not None) == (mode == "w4a4"), "fc2_input_scale is for w4a4 alone")
    _require((call["x_sf"] is None) == (mode == "w4a16"), "x_sf is None for w4a16 alone")
    if call["situ_beta"] is None:
        _require(call["situ_linear_beta"] is None, "situ_linear_beta requires situ_beta")
    else:
        _require(call["activation_type"] == SWIGLU, "SiTU parameters require ActivationType.Swiglu")
    _require(call["activation_type"] in (SWIGLU, GEGLU_TANH), f"activation_type {call['activation_type']}")
    for name in ("per_token_scale", "aux_stream"):
        _require(call.get(name) is None, f"{name} is not part of this contract")
    x = _cute_dsl_input(call, mode)
    w13, w2 = call["w1_weight"], call["w2_weight"]
    experts, rows, half = w13.shape
    hidden, inter = 2 * half, rows // 2
    _require(w13.dtype == w2.dtype == torch.uint8, "weights are uint8")
    _require(tuple(w2.shape) == (experts, hidden, inter // 2), f"w2 {tuple(w2.shape)} against w1 {tuple(w13.shape)}")
    _require(hidden % 256 == 0 and rows % 128 == 0, f"H {hidden} is no multiple of 256 or 2I {rows} of 128")
    _require(x.shape[1] == hidden, f"x has {x.shape[1]} columns, the weights {hidden}")
    kind = "situ" if call["situ_beta"] is not None and not drop_situ else call["activation_type"]
    context = dict(call, betas=(call["situ_beta"], call["situ_linear_beta"]))
    context["swiglu"] = (call["swiglu_alpha"], call["swiglu_beta"], call["swiglu_limit"])

    def expert(index):
        row = torch.arange(rows)
        stored = up_first_row(row, inter, group)
        first = dequantise(
            w13[index][stored], _six_d(call["w1_weight_sf"], index, stored, hidden // block, block), block
        )
        down_rows = torch.arange(hidden)
        second = dequantise(w2[index], _six_d(call["w2_weight_sf"], index, down_rows, inter // block, block), block)
        return first * call["w1_alpha"][index], second

    def middle(h):
        if mode == "w4a16":
            return h.bfloat16().float()
        if mode == "w4a8":
            values, codes = quantise_mxfp8(h)
            return values.float() * scale_values(codes, 32).repeat_interleave(32, -1)
        packed, scale = quantise_nvfp4(h, call["fc2_input_scale"])
        return dequantise(packed, scale.float(), 16)

    def layer(index, rows_of_x):
        first, second = expert(index)
        gate, up = (rows_of_x @ first.T).chunk(2, 1)
        return middle(activate(context, kind, gate, up)) @ second.T * call["w2_alpha"][index]

    y = _combine(call, x, layer, call["num_local_experts"], call["local_expert_offset"])
    out = call["moe_output"]
    _require(out is not None and tuple(out.shape) == tuple(y.shape), "moe_output has another shape")
    out.copy_(y)
    return out


def _cute_dsl_input(call, mode):
    x, scale = call["x"], call["x_sf"]
    if mode == "w4a16":
        _require(x.dtype == torch.bfloat16, f"x is {x.dtype}")
        return x.float()
    if mode == "w4a8":
        _require(x.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8, f"x {x.dtype}, x_sf {scale.dtype}")
        return x.float() * scale_values(scale, 32).repeat_interleave(32, -1)
    _require(x.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn, f"x {x.dtype}, x_sf {scale.dtype}")
    _require(tuple(scale.shape) == (x.shape[0], x.shape[1] // 8, 1), f"x_sf {tuple(scale.shape)}")
    return dequantise(x, scale.squeeze(-1).float(), 16)


def _six_d(view, expert, rows, columns, block):
    """Return float32 scales of the stored `rows` from the view (32, 4, m_tiles, 4, k_tiles, E)."""
    _require(view.dim() == 6 and view.shape[:2] == (32, 4) and view.shape[3] == 4, f"scales {tuple(view.shape)}")
    _require(view.stride()[0] == 16 and view.stride()[1] == 4 and view.stride()[3] == 1, f"strides {view.stride()}")
    m, k = rows[:, None], torch.arange(columns)[None, :]
    return scale_values(view[m % 32, m % 128 // 32, m // 128, k % 4, k // 4, expert], block)


def trtllm(call, version, drop_situ=False):
    """`trtllm_fp4_block_scale_routed_moe`."""
    (ids, weights), x, scale = call["topk_ids"], call["hidden_states"], call["hidden_states_scale"]
    w13, w2 = call["gemm1_weights"], call["gemm2_weights"]
    experts, rows, half = w13.shape
    hidden, inter = 2 * half, rows // 2
    block = hidden // call["gemm1_weights_scale"].shape[-1]
    _require(block in (16, 32), f"gemm1_weights_scale {tuple(call['gemm1_weights_scale'].shape)}")
    _require(inter == call["intermediate_size"] and inter % 128 == 0 and hidden % 128 == 0, "sizes")
    for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
        _require(call[name].dtype == torch.float8_e4m3fn, f"{name} is {call[name].dtype}")
    for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
        _require(call[name].dtype == torch.float32 and tuple(call[name].shape) == (experts,), name)
    for name in (
        "routing_bias",
        "gemm1_bias",
        "gemm2_bias",
        "gemm1_clamp_limit",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "per_token_scale",
        "gemm1_lora_delta",
    ):
        _require(call.get(name) is None, f"{name} is not part of this contract")
    _require(call["do_finalize"], "do_finalize")
    if "hidden_states_scale_layout" in call and scale is not None:
        _require(int(call["hidden_states_scale_layout"] or 0) == 2, "the layout of x's scales must be named: linear")
    if x.dtype == torch.uint8:
        _require(block == 16 and scale.dtype == torch.float8_e4m3fn, "NVFP4 x with NVFP4 weights")
        values, middle = dequantise(x, scale.float(), 16), _nvfp4_middle
    elif x.dtype == torch.float8_e4m3fn:
        _require(block == 32 and scale.dtype == torch.float8_e4m3fn, "MXFP8 scales are passed as float8")
        values = x.float() * scale_values(scale.view(torch.uint8), 32).repeat_interleave(32, -1)
        middle = _mxfp8_middle
    else:
        _require(x.dtype == torch.bfloat16 and scale is None and block == 32, f"x is {x.dtype}")
        values, middle = x.float(), lambda h: h.bfloat16().float()
    activation = call["activation_type"]
    _require(activation in (SWIGLU, SITU), f"activation_type {activation}")
    if activation == SITU:
        for name in ("gemm1_alpha", "gemm1_beta"):
            value = call[name]
            _require(value is not None, f"{name} is missing: the kernel would take 1")
            _require(
                value.dtype == torch.float32 and tuple(value.shape) == (experts,) and bool((value > 0).all()), name
            )

    def layer(index, rows_of_x):
        row = torch.arange(rows)
        stored = shuffled_row(up_first_row(row, inter, 1))
        first = dequantise(w13[index][stored], _flat(call["gemm1_weights_scale"], index, stored, block), block)
        stored2 = shuffled_row(torch.arange(hidden))
        second = dequantise(w2[index][stored2], _flat(call["gemm2_weights_scale"], index, stored2, block), block)
        gate, up = (rows_of_x @ first.T).chunk(2, 1)
        factor, out_factor = call["output1_scale_gate_scalar"][index], call["output1_scale_scalar"][index]
        if activation == SITU and not drop_situ:
            betas = (float(call["gemm1_alpha"][index]), float(call["gemm1_beta"][index]))
            h = activate({"betas": betas}, "situ", gate * factor, up * factor)
        else:  # the gate alone is scaled before the nonlinearity; up's scale is in the output's
            up = up * factor if activation == SITU else up
            h = activate({}, SWIGLU, gate * factor, up)
        return middle(h * out_factor) @ second.T * call["output2_scale_scalar"][index]

    y = _combine(
        {
            "token_selected_experts": ids,
            "token_final_scales": weights,
            "num_experts": call["num_experts"],
            "top_k": call["top_k"],
        },
        values,
        layer,
        call["local_num_experts"],
        call["local_expert_offset"],
    )
    call["output"].copy_(y)
    return [call["output"]]


def _nvfp4_middle(h):
    packed, scale = quantise_nvfp4(h, torch.ones(1))
    return dequantise(packed, scale.float(), 16)


def _mxfp8_middle(h):
    values, codes = quantise_mxfp8(h)
    return values.float() * scale_values(codes, 32).repeat_interleave(32, -1)


def _flat(scale, expert, rows, block):
    codes = scale[expert].view(torch.uint8)
    columns = codes.shape[-1]
    offsets = swizzled_offset(rows[:, None], torch.arange(columns)[None, :], columns)
    return scale_values(codes.flatten()[offsets], block)


def interleave_sm90(call):
    """The stand-in of the byte order that only the device knows."""
    _require(call["quant_type"] == "fp4" and call["weight"].dim() == 3, "MXFP4 weights of (E, n, k/2)")
    return call["weight"] ^ SM90_MARK


def cutlass(call, version, drop_situ=False):
    """`cutlass_fused_moe` for MXFP4 x bf16 on SM90."""
    _require(call["use_w4_group_scaling"] is True, "use_w4_group_scaling")
    _require(call["use_fused_finalize"] is False, "the fused finalize adds with atomics")
    _require(call["ep_size"] == call["tp_size"] == 1, "no expert parallelism")
    x, w13, w2 = call["input"].float(), call["fc1_expert_weights"] ^ SM90_MARK, call["fc2_expert_weights"] ^ SM90_MARK
    experts, rows, half = w13.shape
    hidden, inter = 2 * half, rows // 2
    _require(hidden % 128 == 0 and inter % 128 == 0, f"H {hidden} and I {inter} must be multiples of 128")
    ids = call["token_selected_experts"]
    _require(bool(((ids >= 0) & (ids < experts)).all()), "ids outside the weights")
    scales = []
    for scale, shape in zip(call["quant_scales"], ((rows, hidden), (hidden, inter)), strict=True):
        _require(scale.dtype == torch.int32, f"quant_scales are {scale.dtype}")
        codes = scale.view(torch.uint8)
        _require(tuple(codes.shape) == (experts, shape[0] // 64, shape[1] // 128, 16, 16), f"{tuple(codes.shape)}")
        scales.append(codes)
    activation = call["activation_type"]
    _require(activation in (SWIGLU, SITU), f"activation_type {activation}")
    if activation == SITU:
        for name in ("situ_beta", "situ_linear_beta"):
            _require(call[name] is not None, f"{name} is missing: 4 and 25 would be taken")
            _require(tuple(call[name].shape) == (experts,) and call[name].dtype == torch.float32, name)

    def folded(codes, matrix_rows, columns):
        r, c = torch.arange(matrix_rows)[:, None], torch.arange(columns)[None, :]
        return scale_values(codes[r // 64, c // 4, r % 16, r % 64 // 16 * 4 + c % 4], 32)

    def layer(index, rows_of_x):
        order = torch.arange(rows).roll(-inter)  # canonical gate row r lies behind all up rows
        first = dequantise(w13[index], folded(scales[0][index], rows, hidden // 32), 32)[order]
        second = dequantise(w2[index], folded(scales[1][index], hidden, inter // 32), 32)
        gate, up = (rows_of_x @ first.T).chunk(2, 1)
        if activation == SITU and not drop_situ:
            betas = (float(call["situ_beta"][index]), float(call["situ_linear_beta"][index]))
            h = activate({"betas": betas}, "situ", gate, up)
        else:
            h = activate({}, SWIGLU, gate, up)
        return h.bfloat16().float() @ second.T

    fields = {
        "token_selected_experts": ids,
        "token_final_scales": call["token_final_scales"],
        "num_experts": experts,
        "top_k": ids.shape[1],
    }
    y = _combine(fields, x, layer, experts, 0, distinct=False)
    call["output"].copy_(y)
    return [call["output"]]


def _combine(call, x, layer, local, offset, distinct=True):
    """Add up a token's local experts; ids outside the local range, -1 too, are skipped."""
    ids, weights = call["token_selected_experts"], call["token_final_scales"]
    _require(ids.dtype == torch.int32 and weights.dtype == torch.float32, f"routing {ids.dtype}, {weights.dtype}")
    _require(tuple(ids.shape) == tuple(weights.shape) == (x.shape[0], call["top_k"]), f"routing {tuple(ids.shape)}")
    _require(bool(((ids >= -1) & (ids < call["num_experts"])).all()), "ids beyond the layer")
    if distinct:
        ordered = ids.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        _require(not bool(twice.any()), "an expert twice in one row")
    total = torch.zeros(x.shape[0], x.shape[1])
    for index in range(local):
        token, slot = (ids == index + offset).nonzero(as_tuple=True)
        if len(token):
            y = layer(index, x[token]).bfloat16().float()
            total.index_add_(0, token, weights[token, slot, None] * y)
    return total.bfloat16()
