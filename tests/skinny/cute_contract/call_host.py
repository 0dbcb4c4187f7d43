"""Call a host function of CuteDSL's as `cute_launch` does and print what it receives; needs no GPU."""

import sys

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from cuda_moe.skinny import cute_launch


@cute.jit
def host(x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32, grid: Int32, stream):
    cute.printf("%lld %lld %lld %lld %d %d %d\n", x, w, r, out, m, n, grid)


addresses, sizes = [cutlass.Int64(0)] * 4, [cutlass.Int32(1)] * 3
compiled = cute.compile(host, *addresses, *sizes, make_fake_stream(), options="--gpu-arch sm_90a")
call = cute_launch._Call(compiled.to(), CUstream)
for first in (1 << 40, 2, 1 << 41):  # the first call goes CuteDSL's own way, the others reuse its values
    call(first, 3, 0, 4, 5, 6, 7, 8)
sys.stdout.flush()
