"""Every target compiles without a GPU, nothing spills, and no wgmma operand is overwritten in flight."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cuda_moe import compile_check, sass

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("capability", compile_check.TARGETS)
def test_small_shapes_compile(capability, capsys):
    status = compile_check.main(["--targets", str(capability), "--specs", "small", "--tokens", "1,8,100"])
    assert status == 0, capsys.readouterr().out


_SASS = """
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0110*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0120*/                   LOP3.LUT R5, R40, 0x81c081c0, RZ, 0xc0, !PT ;
        /*0130*/              @!P0 BRA 0x100 ;
"""


def test_a_write_to_an_operand_in_flight_is_found():
    (loop,) = sass.wgmma_loops(_SASS.format(pending="0x1"))
    assert loop.hazards == ((0x100, 0x120),)


def test_a_wait_for_all_clears_it():
    (loop,) = sass.wgmma_loops(_SASS.format(pending="0x0"))
    assert loop.hazards == ()
    assert loop.waits == (0,)
