"""A prompt's attention: against float64, and the same bits however a prompt is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_build
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
    count, tokens, kv_heads, group, size, cache_rows, positions, _ = shape
    rng = np.random.default_rng(tokens)
    q = rng.normal(size=(count, tokens, kv_heads, group, size)).astype(np.float32)
    k, v = rng.normal(size=(2, cache_rows, positions, kv_heads, size)).astype(np.float32)
    rows = rng.permutation(cache_rows)[:count].astype(np.int32)
    starts = rng.integers(0, positions - tokens + 1, count).astype(np.int32)
    lengths = rng.integers(1, tokens + 1, count).astype(np.int32)
    return q, k, v, rows, starts, lengths


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
    got = ops.prompt_attention(*map(jnp.asarray, args), window, implementation)
    np.testing.assert_allclose(got, expected(*args, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cache_in_bfloat16(implementation) -> None:
    q, k, v, *where = case(SHAPES[0])
    k, v = (jnp.asarray(a, jnp.bfloat16) for a in (k, v))
    got = ops.prompt_attention(jnp.asarray(q), k, v, *map(jnp.asarray, where), None, implementation)
    want = expected(q, np.asarray(k, np.float32), np.asarray(v, np.float32), *where, None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_code_gives_the_same_bits(shape) -> None:
    args = tuple(map(jnp.asarray, case(shape)))
    widest = cpu.prompt_attention(*args, shape[-1])
    for level in (cpu.PLAIN, cpu.AVX2):
        assert np.array_equal(widest, cpu.prompt_attention(*args, shape[-1], level))


@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_cut_into_chunks_has_the_same_bits(window: int | None) -> None:
    """Whole, in chunks of several sizes, and beside another prompt's chunks."""
    q, k, v, *_ = case((2, 150, 2, 3, 20, 3, 150, None))
    where = np.array([2], np.int32), np.array([0], np.int32), np.array([150], np.int32)
    whole = np.asarray(cpu.prompt_attention(q[:1], k, v, *where, window))[0]
    for size in (2, 17, 64):
        for start in range(0, 150, size):
            own = min(size, 150 - start)
            chunk = np.zeros((2, size, *q.shape[2:]), np.float32)
            chunk[0], chunk[1, :own] = q[1, :size], q[0, start : start + own]
            where = np.array([[0, 2], [0, start], [size, own]], np.int32)
            got = np.asarray(cpu.prompt_attention(chunk, k, v, *where, window))[1, :own]
            assert np.array_equal(got, whole[start : start + own])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_comes_from_other_rows_or_behind(implementation) -> None:
    """What lies in other rows, behind a chunk, or is padding, may be anything."""
    q, k, v, *_ = case((2, 6, 2, 2, 8, 3, 70, None))
    where = [jnp.asarray(a, jnp.int32) for a in ([1, 7], [2, 0], [4, 6])]
    clean = np.asarray(ops.prompt_attention(jnp.asarray(q), k, v, *where, None, implementation))
    assert not clean[0, 4:].any() and not clean[1].any()
    for array in (k, v):
        array[[0, 2]] = np.nan
        array[1, 6:] = np.nan
    q[0, 4:] = np.nan
    got = np.asarray(ops.prompt_attention(jnp.asarray(q), k, v, *where, None, implementation))
    assert np.array_equal(got[0, :4], clean[0, :4]) and not got[0, 4:].any()


@pytest.mark.parametrize("implementation", ["blocks", "cpu"])
def test_gradients_are_the_references(implementation: str) -> None:
    args = tuple(map(jnp.asarray, case(SHAPES[0])))

    def grads(implementation):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(ops.prompt_attention(q, k, v, *args[3:], None, implementation)))

        return jax.grad(loss, argnums=(0, 1, 2))(*args[:3])

    for got, want in zip(grads(implementation), grads("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_bad_input_is_named() -> None:
    q, k, v, *where = map(jnp.asarray, case(SHAPES[0]))
    with pytest.raises(ValueError, match=r"q has shape \(7, 2, 3, 8\)"):
        ops.prompt_attention(q[0], k, v, *where)
    with pytest.raises(ValueError, match="v is float16"):
        ops.prompt_attention(q, k, v.astype(jnp.float16), *where)
    with pytest.raises(ValueError, match="starts are float32"):
        ops.prompt_attention(q, k, v, where[0], where[1].astype(jnp.float32), where[2])
    with pytest.raises(ValueError, match="window is 0"):
        ops.prompt_attention(q, k, v, *where, 0)
    with pytest.raises(ValueError, match="'gpu'"):
        ops.prompt_attention(q, k, v, *where, None, "gpu")
    with pytest.raises(ValueError, match="no CPU kernel for bfloat16"):
        ops.prompt_attention(q.astype(jnp.bfloat16), k, v, *where, None, "cpu")
