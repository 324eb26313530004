"""What is counted from a listing: known instructions, loops, and code that only looks like one."""

import pytest

from pallas_kernels.aot import sass

# A copy loop, then a loop that unpacks and multiplies, whose wait is put behind the end and comes
# back by a branch: backwards in the listing, but no loop of its own around the other.
LISTING = """
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   ISETP.NE.AND P0, PT, R2, 0x8, PT ;
        /*0030*/              @P0  BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*0050*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   LDS.64 R8, [R5] ;
        /*0070*/                   LOP3.LUT R16, R8.reuse, 0xbf80bf80, R19, 0x6c, !PT ;
        /*0080*/                   IMAD.SHL.U32 R17, R9, 0x10, RZ ;
        /*0090*/                   UIADD3 UR4, UR4, 0x2, URZ ;
        /*00a0*/                   HGMMA.64x8x16.F32.BF16 R24, R16, gdesc[UR4], R24 ;
        /*00b0*/                   HGMMA.64x8x16.F32.BF16 R24, R20, gdesc[UR4], R24, gsb0 ;
        /*00c0*/                   HGMMA.64x8x16.F32.BF16 R40, gdesc[UR8], R40 ;
        /*00d0*/               @P1 BRA `(.L_x_1) ;
        /*00e0*/                   UTMASTG.2D [UR8], [UR6] ;
        /*00f0*/                   EXIT ;
.L_x_3:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*0110*/              @!P0 BRA `(.L_x_3) ;
        /*0120*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0130*/                   BRA `(.L_x_4);
        /*0140*/                   NOP;
"""


@pytest.fixture
def kernel() -> sass.Function:
    (found,) = sass.functions(LISTING).values()
    return found


def test_instructions_are_counted_by_name(kernel: sass.Function) -> None:
    counts = kernel.counts()
    assert kernel.name == "kernel"
    assert (counts["HGMMA"], counts["LOP3"], counts["UTMASTG"], counts["NOP"]) == (3, 1, 1, 1)
    assert counts["STL"] == 0


def test_loops_are_entered_at_one_place(kernel: sass.Function) -> None:
    """The copy, the unpacking with its wait, the wait, and the branch to itself at the end."""
    assert sorted(len(body) for body in kernel.loops()) == [1, 2, 3, 13]


def test_unpacking_is_counted_for_a_weight(kernel: sass.Function) -> None:
    """LOP3 and IMAD over two multiplications with 8 weights of a thread each; UIADD3 is uniform."""
    (loop,) = kernel.unpacking()
    assert loop.multiplications == "HGMMA.64x8x16.F32.BF16"
    assert (loop.count, loop.integer, loop.all) == (2, 2, 13)
    assert loop.per_weight == 2 / 16


@pytest.mark.parametrize("code", ["STL.64", "@P2 STL", "@!P0 LDL.LU"])
def test_spilled_registers_are_seen(code: str) -> None:
    listing = LISTING.replace("UTMASTG.2D", code)
    assert listing != LISTING
    (bad,) = sass.functions(listing).values()
    assert bad.counts()["STL"] + bad.counts()["LDL"] == 1


def test_two_functions_are_kept_apart() -> None:
    both = sass.functions(LISTING + LISTING.replace("text.kernel", "text.other"))
    assert set(both) == {"kernel", "other"}
    assert both["other"].unpacking() == both["kernel"].unpacking()
