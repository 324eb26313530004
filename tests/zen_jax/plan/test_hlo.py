"""What is read from a compiled program's text: kernels, collectives, copies of what is held."""

import pytest

from zen_jax.plan.hlo import Program, nbytes

# A step in a loop: a weight goes to a kernel, pages are written in place and gathered from.
STEP = """HloModule jit_step, is_scheduled=true

%fused_write (p.0: bf16[64,16,1,128], p.1: bf16[8,128], p.2: s32[8,1]) -> bf16[64,16,1,128] {
  %p.0 = bf16[64,16,1,128]{3,2,1,0} parameter(0)
  %p.1 = bf16[8,128]{1,0} parameter(1)
  %p.2 = s32[8,1]{1,0} parameter(2)
  ROOT %s.1 = bf16[64,16,1,128]{3,2,1,0} scatter(%p.0, %p.2, %p.1), to_apply=%region_1
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %a = f32[] add(%x, %y)
}

%body (c: (s32[], bf16[1000,256], bf16[64,16,1,128], f32[8,256])) -> (s32[], bf16[1000,256]) {
  %c = (s32[], bf16[1000,256]{1,0}, /*index=2*/bf16[64,16,1,128]{3,2,1,0}, f32[8,256]) parameter(0)
  %w = bf16[1000,256]{1,0} get-tuple-element(%c), index=1
  %kv = bf16[64,16,1,128]{3,2,1,0} get-tuple-element(%c), index=2
  %x.9 = f32[8,256]{1,0} get-tuple-element(%c), index=3
  %written = bf16[64,16,1,128]{3,2,1,0} fusion(%kv, %x.9), kind=kInput, calls=%fused_write
  %y.1 = f32[1,8,128]{2,1,0} custom-call(%x.9, %w), custom_call_target="mosaic_gpu_v2"
  %sum = f32[8,256]{1,0} all-reduce(%y.1), channel_id=1, to_apply=%add
  %ag = ((bf16[8,32]{1,0}), bf16[8,256]{1,0}) all-gather-start(%sum), channel_id=2, dimensions={1}
  %agd = bf16[8,256]{1,0} all-gather-done(%ag)
EXTRA
  ROOT %out = (s32[], bf16[1000,256]{1,0}) tuple(%c, %w)
}

ENTRY %main (w: bf16[1000,256]) -> bf16[1000,256] {
  %w.1 = bf16[1000,256]{1,0} parameter(0)
  ROOT %loop = bf16[1000,256]{1,0} while(%w.1), body=%body
}
"""
PAD = """%fused_pad (p.3: bf16[1000,256]) -> bf16[1024,256] {
  %p.3 = bf16[1000,256]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  ROOT %pad.1 = bf16[1024,256]{1,0} pad(%p.3, %zero), padding=0_24x0_0
}
"""
HELD = {("bf16", 1000 * 256), ("bf16", 64 * 16 * 128)}


def program(extra: str = "") -> Program:
    """The step, with one more instruction."""
    before = PAD if "%fused_pad" in extra else ""
    return Program(before + STEP.replace("EXTRA", extra))


def test_kernels_and_collectives_are_counted_once() -> None:
    made = program()
    assert made.kernels() == 1
    assert made.collectives() == {"all-reduce": [8 * 256 * 4], "all-gather": [8 * 256 * 2]}
    assert made.copies(HELD) == []


@pytest.mark.parametrize(
    "extra",
    [
        "  %k = bf16[64,16,1,128]{3,2,1,0} copy(%kv)",
        "  %k = bf16[1024,256]{1,0} fusion(%w), kind=kLoop, calls=%fused_pad",
        "  %k = f32[1000,256]{1,0} convert(%w)",
        "  %k = bf16[256,1000]{1,0} transpose(%w), dimensions={1,0}",
        "  %k = (bf16[1000,256]{1,0}, u32[]) copy-start(%w)",
        "  %k = bf16[8000,256]{1,0} all-gather(%w), dimensions={0}",
    ],
)
def test_a_copy_is_found(extra: str) -> None:
    (line,) = program(extra).copies(HELD)
    assert line in extra


@pytest.mark.parametrize(
    "extra",
    [
        "  %k = bf16[8,256]{1,0} slice(%w), slice={[0:8], [0:256]}",
        "  %k = bf16[64,16,1,128]{3,2,1,0} gather(%kv, %x.9), offset_dims={1,2,3}",
        "  %k = bf16[64,2048]{1,0} bitcast(%kv)",
        "  %k = f32[8,256]{1,0} copy(%x.9)",
    ],
)
def test_what_is_no_copy_of_what_is_held(extra: str) -> None:
    assert program(extra).copies(HELD) == []


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (("bf16", 3), 6),
        (("u32", 3), 12),
        (("s8", 3), 3),
        (("f8e4m3fn", 3), 3),
        (("pred", 3), 3),
        (("f32", 3), 12),
    ],
)
def test_bytes(kind: tuple[str, int], size: int) -> None:
    assert nbytes(kind) == size
