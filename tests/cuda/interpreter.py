"""Make Triton's interpreter compute in bf16 as a GPU does; import before any kernel, with TRITON_INTERPRET=1."""

from __future__ import annotations


def patch() -> None:
    """Round float32 to bf16 to nearest even (the interpreter truncates) and multiply bf16 operands by value."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data, dtype=np.float32).view(np.uint32).astype(np.uint64)
            nan = np.isnan(src.data)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return interpreter.TensorHandle(np.where(nan, 0x7FC0, bits).astype(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def widened(self, a, b, d, precision, imprecise):
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            raise TypeError("the interpreter multiplies bf16 bit patterns; kernels must widen to float32")
        return dot(self, a, b, d, precision, imprecise)

    builder.cast_impl = rounded
    builder.create_fp_trunc = rounded
    builder.create_dot = widened
