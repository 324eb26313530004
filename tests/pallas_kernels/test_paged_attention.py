"""Attention to pages: the bits of fixed rows, whatever the pages' size, order and numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import cpu_build
from pallas_kernels.decode_attention import ops as decode
from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.pages import DTYPES, Pages
from pallas_kernels.prompt_attention import ops as prompt

ROWS, LENGTH, KV_HEADS, GROUP, SIZE = 4, 320, 2, 3, 20
POSITIONS = np.array([319, 0, 130, 47], np.int32)
DECODE, PROMPT = ["reference", "cpu", "xla"], ["reference", "blocks", "cpu", "xla"]
RNG = np.random.default_rng(5)
K, V = RNG.standard_normal((2, ROWS, LENGTH, KV_HEADS, SIZE), np.float32)
QKV = jnp.asarray(RNG.standard_normal((ROWS, KV_HEADS, GROUP + 2, SIZE), np.float32))
ANGLES = tuple(jnp.asarray(f(POSITIONS[:, None] * 0.6 ** np.arange(SIZE // 2)), jnp.float32)
               for f in (np.cos, np.sin))  # fmt: skip
# Two chunks of 30 and 17 tokens, at positions 160 and 3 of the rows 2 and 0.
TOKENS, STARTS, LENGTHS = 30, np.array([160, 3], np.int32), np.array([30, 17], np.int32)
Q = jnp.asarray(RNG.standard_normal((2, TOKENS, KV_HEADS, GROUP, SIZE), np.float32))
OWN = [jnp.asarray(x) for x in RNG.standard_normal((2, 2, TOKENS, KV_HEADS, SIZE), np.float32)]
OF = np.array([2, 0])


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernels are there: a machine that runs the tests has a compiler."""
    assert cpu_build.build("decode_attention") and cpu_build.build("prompt_attention")


def bits(x: Any) -> np.ndarray:
    """An array's bits, so that NaN equals itself."""
    return np.asarray(x).view(np.uint8)


def laid_out(size: int, dtype: str, seed: int = 0) -> tuple[Pages, np.ndarray]:
    """K and V in pages of `size` positions, in any order, NaN in pages that are nobody's; and the
    rows' table. A page of all positions makes fixed rows."""
    columns = -(-LENGTH // size)
    order = np.random.default_rng(seed).permutation(ROWS * columns + 3)
    table = order[: ROWS * columns].reshape(ROWS, columns).astype(np.int32)
    if columns == 1:
        order, table = np.arange(ROWS), np.arange(ROWS, dtype=np.int32)[:, None]
    made = []
    for x in (K, V):
        room = np.full((len(order), size, KV_HEADS, SIZE), np.nan, np.float32)
        padded = np.pad(x, ((0, 0), (0, columns * size - LENGTH), (0, 0), (0, 0)))
        room[table] = padded.reshape(ROWS, columns, size, KV_HEADS, SIZE)
        made.append(paging.quantise(jnp.asarray(room), dtype))
    (k, k_scale), (v, v_scale) = made
    return Pages(k, v, k_scale, v_scale), table


def rows_of(pages: Pages, table: Any) -> list[np.ndarray]:
    """What each row holds, as it is kept, [B, S, ...]."""
    leaves = jax.tree.leaves(pages)
    return [np.asarray(x)[table].reshape(ROWS, -1, *x.shape[2:])[:, :LENGTH] for x in leaves]


def one_token(pages: Pages, table: Any, implementation: Any, window=None) -> tuple:
    """A decode step; y, and the cache."""
    return jax.jit(
        lambda pages, table: decode.decode_attention(
            QKV, pages, table, jnp.asarray(POSITIONS), ANGLES, None, 0.0, window, implementation
        )
    )(pages, jnp.asarray(table))


def chunks(pages: Pages, table: Any, implementation: Any, window=None) -> tuple:
    """Two chunks; y, and the cache."""
    where = (jnp.asarray(STARTS), jnp.asarray(LENGTHS))
    return jax.jit(
        lambda pages, table: prompt.prompt_attention(
            Q, *OWN, pages, table, *where, window, implementation
        )
    )(pages, jnp.asarray(table[OF]))


WAYS = [(one_token, i) for i in DECODE] + [(chunks, i) for i in PROMPT]


@pytest.mark.parametrize(
    ("dtype", "window"),
    [("float32", None), ("bfloat16", 70), ("int8", 70), ("float8_e4m3fn", None)],
)
@pytest.mark.parametrize(("way", "implementation"), WAYS)
def test_pages_of_any_size_in_any_order_have_the_bits_of_fixed_rows(
    way, implementation, dtype: str, window
) -> None:
    pages, table = laid_out(LENGTH, dtype)
    want, kept = way(pages, table, implementation, window)
    assert np.isfinite(np.asarray(want)).all() and np.asarray(want)[0].any()
    held = rows_of(kept, table)
    for seed, size in enumerate((16, 64)):
        if implementation != "cpu" and size != 16:
            continue
        pages, scattered = laid_out(size, dtype, seed)
        got, new = way(pages, scattered, implementation, window)
        if implementation == "cpu":
            assert np.array_equal(bits(got), bits(want))
        else:  # XLA sums in an order of its own
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        for a, b in zip(rows_of(new, scattered), held, strict=True):
            assert np.array_equal(bits(a), bits(b)), "the tokens went where they belong"
        nobody = np.setdiff1d(np.arange(len(pages.k)), scattered)
        left = (new.k, new.v) if new.k_scale is None else (new.k_scale, new.v_scale)
        assert all(np.isnan(np.asarray(x[nobody], np.float32)).all() for x in left)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [one_token, chunks])
def test_the_kernel_equals_the_reference(way, dtype: str) -> None:
    """What it keeps too: 8 bits by one rule of rounding."""
    pages, table = laid_out(32, dtype)
    want, kept = way(pages, table, "reference", 33)
    got, new = way(pages, table, "cpu", 33)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)
    for a, b in zip(rows_of(new, table), rows_of(kept, table), strict=True):
        if a.dtype == np.float32:  # keys are turned; scales are of turned keys
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert (bits(a) != bits(b)).mean() < 1e-3, "a number between two codes, if any"


@pytest.mark.parametrize(("way", "implementation"), WAYS)
def test_pages_behind_a_window_are_not_needed(way, implementation) -> None:
    pages, table = laid_out(16, "float32")
    want, _ = way(pages, table, implementation, 70)
    gone = table.copy()
    for row, position in enumerate(POSITIONS if way is one_token else (3, 0, 160, 0)):
        gone[row, : max(0, position + 1 - 70) // 16] = -1
    assert (gone == -1).sum() > 4
    behind = table[gone == -1]
    broken = Pages(pages.k.at[behind].set(jnp.nan), pages.v.at[behind].set(jnp.nan))
    got, _ = way(broken, gone, implementation, 70)
    assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("lost", [-1, 10_000])
@pytest.mark.parametrize(("way", "implementation"), WAYS)
def test_a_row_that_lacks_a_page_gives_zeros_and_writes_nothing(way, implementation, lost) -> None:
    pages, table = laid_out(16, "float32")
    want, _ = way(pages, table, implementation)
    without = table.copy()
    without[[0, 2], 0] = lost
    got, kept = way(pages, without, implementation)
    dead = [0, 2] if way is one_token else [0, 1]
    assert not np.asarray(got)[dead].any()
    alive = [1, 3] if way is one_token else []
    assert np.array_equal(bits(np.asarray(got)[alive]), bits(np.asarray(want)[alive]))
    for part, before in zip(rows_of(kept, table), rows_of(pages, table), strict=True):
        assert np.array_equal(bits(part[[0, 2]]), bits(before[[0, 2]]))


@pytest.mark.parametrize(("way", "implementation"), WAYS)
def test_rows_that_share_pages_see_the_same(way, implementation) -> None:
    """Two rows whose first pages are one; each goes on in pages of its own."""
    pages, table = laid_out(32, "float32")
    shared = table.copy()
    if way is one_token:
        shared[2, :4] = table[0, :4]
        copied = [pages.k, pages.v]
        for i, x in enumerate(copied):
            copied[i] = x.at[table[2, :4]].set(x[table[0, :4]])
    else:
        shared[2, :5] = table[3, :5]
        copied = [x.at[table[2, :5]].set(x[table[3, :5]]) for x in (pages.k, pages.v)]
    want, _ = way(Pages(*copied), table, implementation)
    got, _ = way(pages, shared, implementation)
    assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eight_bits_round_to_the_nearest_code_of_a_heads_largest(dtype: str) -> None:
    x = np.concatenate([RNG.standard_normal((200, 64)), np.zeros((1, 64)), np.ones((1, 64))])
    x = (x * 10.0 ** RNG.uniform(-6, 4, (202, 1))).astype(np.float32)
    codes, scale = paging.quantise(jnp.asarray(x), dtype)
    limit = 127 if dtype == "int8" else 448
    np.testing.assert_allclose(scale, np.abs(x).max(1) / limit, rtol=1e-6)
    wide = np.asarray(codes).astype(np.float64) * np.asarray(scale, np.float64)[:, None]
    step = np.abs(x).max(1, keepdims=True) / 254 if dtype == "int8" else np.abs(x) / 16
    least = np.abs(x).max(1, keepdims=True) / 448 * 2.0**-10
    assert (np.abs(wide - x) <= np.maximum(step, least) * (1 + 1e-4)).all()
    assert not wide[200].any() and np.allclose(wide[201], x[201])
    with_nan = x.copy()
    with_nan[3, 5] = np.nan
    codes, scale = paging.quantise(jnp.asarray(with_nan), dtype)
    assert np.isnan(np.asarray(codes, np.float32)[3] * float(scale[3])).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_the_kernel_rounds_every_number_as_it_should(dtype: str) -> None:
    """Through a decode step with one head whose value is any number; its largest is 448 or 127."""
    limit = 127.0 if dtype == "int8" else 448.0
    numbers = np.concatenate([np.linspace(-limit, limit, 4001), 2.0 ** np.linspace(-12, 8, 2001)])
    numbers = np.clip(numbers, -limit, limit)
    rows, size = 1001, 8
    values = np.resize(numbers, (rows, size)).astype(np.float32)
    values[:, 0] = limit
    qkv = jnp.zeros((rows, 1, 3, size)).at[:, 0, 2].set(jnp.asarray(values))
    pages = Pages.empty(rows, 1, 1, size, dtype)
    table = jnp.arange(rows, dtype=jnp.int32)[:, None]
    angles = (jnp.ones((rows, 4)), jnp.zeros((rows, 4)))
    at = jnp.zeros((rows,), jnp.int32)
    y, kept = decode.decode_attention(qkv, pages, table, at, angles, implementation="cpu")
    kind = np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn
    want = (np.round(values) if dtype == "int8" else values).astype(kind)
    assert np.array_equal(bits(np.asarray(kept.v)[:, 0, 0]), bits(want))
    assert np.array_equal(np.asarray(y)[:, 0, 0], want.astype(np.float32))


def test_bad_pages_are_named() -> None:
    pages, table = laid_out(32, "int8")
    with pytest.raises(ValueError, match="a page has 20 positions; expected a multiple of 16"):
        one_token(Pages(jnp.zeros((9, 20, 2, 20)), jnp.zeros((9, 20, 2, 20))), table, "auto")
    with pytest.raises(ValueError, match=r"the table is int32\(3, 10\); expected int32\[4, J\]"):
        one_token(pages, table[:3], "auto")
    with pytest.raises(ValueError, match="expected scales with 8 bits"):
        one_token(Pages(pages.k, pages.v), table, "auto")
    with pytest.raises(ValueError, match="the scales of v are"):
        one_token(Pages(pages.k, pages.v, pages.k_scale, pages.v_scale[:1]), table, "auto")
    with pytest.raises(ValueError, match="keys and values as float16; expected one of float32"):
        Pages.empty(1, 16, 1, 8, "float16")
