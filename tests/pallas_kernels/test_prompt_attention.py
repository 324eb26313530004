"""A prompt's attention: against float64, and the same bits however a prompt is cut."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_build
from pallas_kernels.paged_attention.pages import Pages
from pallas_kernels.prompt_attention import cpu, ops

IMPLEMENTATIONS = ["reference", "blocks", "cpu", "auto"]
# C, T, K, G, H, B, S, window: tails of every kind, several blocks of positions, one of each.
SHAPES = [
    (2, 7, 2, 3, 8, 4, 130, None),
    (1, 65, 1, 1, 64, 1, 200, None),
    (3, 20, 2, 2, 20, 3, 300, 37),
    (2, 9, 2, 4, 128, 2, 64, 5),
    (1, 2, 1, 7, 4, 2, 2, 1),
    (1, 130, 3, 1, 6, 1, 513, 100),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernel is there: a machine that runs the tests has a compiler."""
    assert cpu_build.build("prompt_attention") is not None
    assert cpu.available()


def case(shape: tuple) -> tuple[np.ndarray, ...]:
    """Queries; a cache [B, S, K, H] that holds all tokens, the chunks' own too; and the chunks."""
    count, tokens, kv_heads, group, size, cache_rows, positions, _ = shape
    rng = np.random.default_rng(tokens)
    q = rng.normal(size=(count, tokens, kv_heads, group, size)).astype(np.float32)
    k, v = rng.normal(size=(2, cache_rows, positions, kv_heads, size)).astype(np.float32)
    rows = rng.permutation(cache_rows)[:count].astype(np.int32)
    starts = rng.integers(0, positions - tokens + 1, count).astype(np.int32)
    lengths = rng.integers(1, tokens + 1, count).astype(np.int32)
    return q, k, v, rows, starts, lengths


def fixed(function, q, k, v, rows, starts, lengths, *rest) -> Any:
    """A function over k and v as one page a row, from which the chunks' own tokens were taken: they
    come with the queries, and have to be written. Gives y."""
    q, k, v = (jnp.asarray(a) for a in (q, k, v))
    rows, starts, lengths = (np.asarray(a) for a in (rows, starts, lengths))
    at = starts[:, None] + np.arange(q.shape[1])
    inside = np.clip(at, 0, k.shape[1] - 1)
    own = [a[np.clip(rows, 0, k.shape[0] - 1)[:, None], inside] for a in (k, v)]
    new = np.arange(q.shape[1]) < lengths[:, None]
    hole = np.where(new & (at < k.shape[1]), at, k.shape[1])
    empty = [a.at[rows[:, None], hole].set(np.nan, mode="drop") for a in (k, v)]
    where = (jnp.asarray(rows)[:, None], jnp.asarray(starts), jnp.asarray(lengths))
    y, pages = function(q, *own, Pages(*empty), *where, *rest)
    for kept, was in ((pages.k, k), (pages.v, v)):
        assert np.array_equal(bits(kept), bits(was)), "the tokens stand where they belong"
    return y


def bits(x: Any) -> np.ndarray:
    """An array's bits, so that NaN equals itself."""
    return np.asarray(x).view(np.uint8)


def expected(q, k, v, rows, starts, lengths, window) -> np.ndarray:
    """float64, query by query."""
    y = np.zeros(q.shape)
    for c, t in np.ndindex(*q.shape[:2]):
        if t >= lengths[c]:
            continue
        end = starts[c] + t + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head, g in np.ndindex(*q.shape[2:4]):
            keys = k[rows[c], seen, head].astype(np.float64)
            scores = keys @ q[c, t, head, g].astype(np.float64) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            y[c, t, head, g] = weights / weights.sum() @ v[rows[c], seen, head].astype(np.float64)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_float64(shape, implementation) -> None:
    args, window = case(shape), shape[-1]
    got = fixed(ops.prompt_attention, *args, window, implementation)
    np.testing.assert_allclose(got, expected(*args, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cache_in_bfloat16(implementation) -> None:
    q, k, v, *where = case(SHAPES[0])
    k, v = (jnp.asarray(a, jnp.bfloat16) for a in (k, v))
    got = fixed(ops.prompt_attention, q, k, v, *where, None, implementation)
    want = expected(q, np.asarray(k, np.float32), np.asarray(v, np.float32), *where, None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_code_gives_the_same_bits(shape) -> None:
    args = case(shape)
    widest = fixed(cpu.prompt_attention, *args, shape[-1])
    for level in (cpu.PLAIN, cpu.AVX2):
        assert np.array_equal(widest, fixed(cpu.prompt_attention, *args, shape[-1], level))


@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_cut_into_chunks_has_the_same_bits(window: int | None) -> None:
    """Whole, in chunks of several sizes, and beside another prompt's chunks."""
    q, k, v, *_ = case((2, 150, 2, 3, 20, 3, 150, None))
    where = np.array([2], np.int32), np.array([0], np.int32), np.array([150], np.int32)
    whole = np.asarray(fixed(cpu.prompt_attention, q[:1], k, v, *where, window))[0]
    for size in (2, 17, 64):
        for start in range(0, 150, size):
            own = min(size, 150 - start)
            chunk = np.zeros((2, size, *q.shape[2:]), np.float32)
            chunk[0], chunk[1, :own] = q[1, :size], q[0, start : start + own]
            where = np.array([[0, 2], [0, start], [size, own]], np.int32)
            got = np.asarray(fixed(cpu.prompt_attention, chunk, k, v, *where, window))[1, :own]
            assert np.array_equal(got, whole[start : start + own])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_comes_from_other_rows_or_behind(implementation) -> None:
    """What lies in other rows, behind a chunk, or is padding, may be anything."""
    q, k, v, *_ = case((2, 6, 2, 2, 8, 3, 70, None))
    where = [jnp.asarray(a, jnp.int32) for a in ([1, 7], [2, 0], [4, 6])]
    clean = np.asarray(fixed(ops.prompt_attention, q, k, v, *where, None, implementation))
    assert not clean[0, 4:].any() and not clean[1].any()
    for array in (k, v):
        array[[0, 2]] = np.nan
        array[1, 6:] = np.nan
    q[0, 4:] = np.nan
    got = np.asarray(fixed(ops.prompt_attention, q, k, v, *where, None, implementation))
    assert np.array_equal(got[0, :4], clean[0, :4]) and not got[0, 4:].any()


def test_bad_input_is_named() -> None:
    q, k, v, rows, *where = map(jnp.asarray, case(SHAPES[0]))
    own = [a[rows, : q.shape[1]] for a in (k, v)]

    whole = Pages(k, v)

    def call(q=q, own=own, pages=whole, where=where, rest=()) -> None:
        ops.prompt_attention(q, *own, pages, rows[:, None], *where, *rest)

    with pytest.raises(ValueError, match=r"q has shape \(7, 2, 3, 8\)"):
        call(q=q[0])
    with pytest.raises(ValueError, match=r"the tokens' v has shape \(2, 6, 2, 8\)"):
        call(own=[own[0], own[1][:, :6]])
    with pytest.raises(ValueError, match="v is float16"):
        call(pages=Pages(k, v.astype(jnp.float16)))
    with pytest.raises(ValueError, match="starts are float32"):
        call(where=[where[0].astype(jnp.float32), where[1]])
    with pytest.raises(ValueError, match="window is 0"):
        call(rest=(0,))
    with pytest.raises(ValueError, match="'gpu'"):
        call(rest=(None, "gpu"))
    with pytest.raises(ValueError, match="no CPU kernel for bfloat16"):
        call(q=q.astype(jnp.bfloat16), rest=(None, "cpu"))
