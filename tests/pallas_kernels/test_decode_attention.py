"""One body of tests over every implementation of a decode step's norms and attention."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import cpu_build
from pallas_kernels.decode_attention import cpu, ops, reference
from pallas_kernels.paged_attention.pages import Pages

IMPLEMENTATIONS = ["reference", "cpu", "auto"]
EPS = 1e-5


class Shape(NamedTuple):
    rows: int
    length: int
    kv_heads: int
    group: int
    size: int
    window: int | None = None


# Heads that fill no lane, some, and whole ones; one position, some, several chunks; every group.
SHAPES = [
    Shape(1, 1, 1, 1, 4),
    Shape(5, 17, 2, 3, 6),
    Shape(6, 513, 1, 7, 64),
    Shape(5, 300, 2, 2, 128),
    Shape(5, 300, 2, 2, 128, 200),
    Shape(7, 140, 3, 3, 64, 1),
    Shape(4, 513, 2, 1, 80, 129),
    Shape(4, 40, 1, 5, 16, 5),
    Shape(6, 140, 5, 2, 64),  # a row alone has fewer chunks than threads want: heads are split too
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernel is there: a machine that runs the tests has a compiler."""
    assert cpu_build.build("decode_attention") is not None
    assert cpu.available()


def case(shape: Shape, dtype: str = "float32", norms: bool = False) -> list[Any]:
    """The arguments of `decode_attention`. Positions end, begin and miss the cache, then are drawn;
    what lies after them is NaN."""
    rows, length, kv_heads, group, size, window = shape
    rng = np.random.default_rng(sum(shape[:5]))
    draw = rng.standard_normal
    drawn = rng.integers(0, length, rows)
    positions = np.array([length - 1, 0, -1, length, *drawn][:rows], np.int32)
    stale = np.arange(length)[None] > np.clip(positions, -1, length - 1)[:, None]
    cache = [draw((rows, length, kv_heads, size), np.float32) for _ in "kv"]
    for part in cache:
        part[stale] = np.nan
    turns = positions[:, None] * 0.7 ** np.arange(size // 2)
    weights = [jnp.asarray(draw((n, size), np.float32) + 1.0) for n in (1, rows)]
    return [
        jnp.asarray(draw((rows, kv_heads, group + 2, size), np.float32) * 2.0),
        *(jnp.asarray(part, dtype) for part in cache),
        jnp.asarray(positions),
        (jnp.cos(jnp.asarray(turns, jnp.float32)), jnp.sin(jnp.asarray(turns, jnp.float32))),
        (weights[0], weights[1]) if norms else None,
        EPS,
        window,
    ]


def fixed(function: Any, qkv: Any, k: Any, v: Any, *rest: Any, **named: Any) -> tuple[Any, ...]:
    """A function called with k and v [B, S, K, H] as one page a row: y, k and v."""
    table = jnp.arange(qkv.shape[0], dtype=jnp.int32)[:, None]
    y, pages = function(qkv, Pages(k, v), table, *rest, **named)
    return y, pages.k, pages.v


def attend(arguments: list[Any], implementation: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`ops.decode_attention`, compiled as one program."""
    *arrays, eps, window = arguments

    def run(*arrays: Any) -> Any:
        return fixed(ops.decode_attention, *arrays, eps, window, implementation)

    return jax.jit(run)(*arrays)


def normed64(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def turned64(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def expected(arguments: list[Any], k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 to the cache as it was left, and each row's turned key."""
    qkv, _, _, positions, angles, norms, _, window = arguments
    qkv = np.asarray(qkv, np.float64)
    rows, kv_heads, fused, size = qkv.shape
    y, keys = np.zeros((rows, kv_heads, fused - 2, size)), np.zeros((rows, kv_heads, size))
    for r, position in enumerate(np.asarray(positions)):
        heads = qkv[r, :, :-1]
        if norms is not None:
            weights = [np.asarray(np.broadcast_to(w, (rows, size)), np.float64)[r] for w in norms]
            queries = normed64(heads[:, :-1], weights[0])
            heads = np.concatenate([queries, normed64(heads[:, -1:], weights[1])], axis=1)
        heads = turned64(heads, *(np.asarray(a, np.float64)[r] for a in angles))
        keys[r] = heads[:, -1]
        if not 0 <= position < k.shape[1]:
            continue
        seen = slice(max(0, position + 1 - (window or k.shape[1])), position + 1)
        part = [np.asarray(a[r, seen].astype(jnp.float32), np.float64) for a in (k, v)]
        scores = np.einsum("kgh,skh->kgs", heads[:, :-1], part[0]) / np.sqrt(size)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        y[r] = np.einsum("kgs,skh->kgh", weight, part[1])
    return y, keys


def bits(x: Any) -> np.ndarray:
    """An array's bits, so that NaN equals itself."""
    return np.asarray(x).view(np.uint8)


def check_cache(arguments: list[Any], got: Any, old: Any, fresh: np.ndarray, bound: float) -> None:
    """The token's own place holds it, and nothing else has changed."""
    live = [(r, int(p)) for r, p in enumerate(arguments[3]) if 0 <= int(p) < arguments[1].shape[1]]
    kept = np.asarray(got.astype(jnp.float32)).copy()
    before = np.asarray(old.astype(jnp.float32))
    for r, position in live:
        np.testing.assert_allclose(kept[r, position], fresh[r], rtol=bound, atol=bound)
        kept[r, position] = before[r, position]
    assert np.array_equal(bits(kept), bits(before))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "norms"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(shape, dtype: str, norms: bool, implementation) -> None:
    arguments = case(shape, dtype, norms)
    y, k, v = attend(arguments, implementation)
    assert y.dtype == jnp.float32 and k.dtype == v.dtype == dtype
    want, keys = expected(arguments, k, v)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)
    bound = 1e-5 if dtype == "float32" else 2.0**-8
    check_cache(arguments, k, arguments[1], keys, bound)
    check_cache(arguments, v, arguments[2], np.asarray(arguments[0])[:, :, -1], bound)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_activations_in_bfloat16(implementation) -> None:
    arguments = case(SHAPES[4], "bfloat16", norms=True)
    arguments[0] = arguments[0].astype(jnp.bfloat16)
    y, k, v = attend(arguments, implementation)
    assert y.dtype == jnp.bfloat16
    want, _ = expected([arguments[0].astype(jnp.float32), *arguments[1:]], k, v)
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0.03, atol=0.03)
    x = jnp.linspace(-2, 5, 48).reshape(3, 16).astype(jnp.bfloat16)
    got = ops.rms_norm(x, jnp.ones((1, 16)), EPS, implementation)
    assert got.dtype == jnp.bfloat16
    want = normed64(np.asarray(x.astype(jnp.float32), np.float64), np.ones(16))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2.0**-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_of_lanes_has_the_same_bits(shape, dtype: str) -> None:
    arguments = case(shape, dtype, True)
    whole = fixed(cpu.decode_attention, *arguments)
    for level in (cpu.PLAIN, cpu.AVX2):
        for got, want in zip(
            fixed(cpu.decode_attention, *arguments, level=level), whole, strict=True
        ):
            assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape) -> None:
    arguments = case(shape)
    whole = fixed(cpu.decode_attention, *arguments)
    for r in range(shape.rows):
        own = jax.tree.map(lambda a, r=r: a[r : r + 1], arguments[:5])
        alone = fixed(cpu.decode_attention, *own, None, EPS, shape.window)
        for got, want in zip(alone, whole, strict=True):
            assert np.array_equal(bits(got[0]), bits(want[r]))


def test_a_nan_stays_in_its_row_and_a_score_of_minus_infinity_counts_nothing() -> None:
    arguments = case(Shape(6, 300, 2, 3, 64))
    arguments[3] = jnp.array([299, 150, 7, 299, 128, 0], jnp.int32)
    arguments[1:3] = [jnp.nan_to_num(a, nan=1.0) for a in arguments[1:3]]
    whole = np.asarray(fixed(cpu.decode_attention, *arguments)[0])
    broken = [*arguments]
    broken[0] = arguments[0].at[2, 0, 0, 5].set(jnp.nan)  # a query
    broken[1] = arguments[1].at[0, 3, 1, 5].set(jnp.nan)  # a key far back
    broken[2] = arguments[2].at[3, 140, 0, 9].set(jnp.nan)  # a value
    got = np.asarray(fixed(cpu.decode_attention, *broken)[0])
    assert np.isnan(got[2, 0, 0]).all() and np.isnan(got[0, 1]).all()
    assert np.isnan(got[3, 0, :, 9]).all()
    for mine in ((1,), (4,), (5,), (2, 1), (2, 0, 1), (0, 0), (3, 1)):
        assert np.array_equal(got[mine], whole[mine]), mine
    assert np.isfinite(np.delete(got[3, 0], 9, axis=-1)).all()
    # A whole chunk of keys that no query wants: nothing but what comes after it counts.
    away = [*arguments]
    away[0] = jnp.abs(arguments[0]).at[..., 32:].set(0.0)
    away[4] = (jnp.ones((6, 32)), jnp.zeros((6, 32)))
    away[1] = arguments[1].at[0, :128].set(-jnp.inf).at[0, :128, :, 32:].set(0.0)
    want, got = attend(away, "reference")[0], attend(away, "cpu")[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_far_larger_score_in_an_earlier_chunk_is_what_counts() -> None:
    k = jnp.zeros((1, 300, 1, 4)).at[0, 5, 0, 0].set(400.0)
    v = jnp.ones((1, 300, 1, 4)).at[0, 5].set(3.0)
    qkv = jnp.zeros((1, 1, 3, 4)).at[:, 0, 0, 0].set(1.0)
    angles = (jnp.ones((1, 2)), jnp.zeros((1, 2)))
    for implementation in IMPLEMENTATIONS:
        case = [qkv, k, v, jnp.array([299], jnp.int32), angles, None, EPS, None]
        assert np.array_equal(attend(case, implementation)[0][0, 0, 0], [3.0] * 4)


def test_weights_of_far_scores_keep_their_precision() -> None:
    """With two positions the result is e^-d / (1 + e^-d), to a few units in the last place."""
    far = np.linspace(0.0, 86.0, 1001)
    rows = len(far)
    k = jnp.zeros((rows, 2, 1, 4)).at[:, 0, 0, 0].set(-2.0 * jnp.asarray(far, jnp.float32))
    v = jnp.zeros((rows, 2, 1, 4)).at[:, 0].set(1.0)
    qkv = jnp.zeros((rows, 1, 3, 4)).at[:, 0, 0, 0].set(1.0)
    angles = (jnp.ones((rows, 2)), jnp.zeros((rows, 2)))
    y = fixed(cpu.decode_attention, qkv, k, v, jnp.ones((rows,), jnp.int32), angles)[0]
    exact = np.asarray(far, np.float32).astype(np.float64)
    want = np.exp(-exact) / (1 + np.exp(-exact))
    np.testing.assert_allclose(y[:, 0, 0, 0], want, rtol=4e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", [(1, 4), (3, 17), (8, 1, 576), (2, 40, 3, 576)], ids=str)
def test_norm_equals_float64(shape, own: bool, implementation) -> None:
    rng = np.random.default_rng(shape[-1])
    x = rng.normal(0, 3, shape).astype(np.float32)
    weight = rng.normal(1, 1, (shape[0] if own else 1, shape[-1])).astype(np.float32)
    got = ops.rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS, implementation)
    of_row = weight.astype(np.float64).reshape(-1, *(1,) * (len(shape) - 2), shape[-1])
    want = normed64(x.astype(np.float64), of_row)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_a_rows_norm_has_the_same_bits_in_any_company_and_keeps_its_nan() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 100), np.float32)
    weight = jnp.asarray(rng.standard_normal((5, 100), np.float32))
    whole = np.asarray(cpu.rms_norm(x, weight, EPS))
    many = cpu.rms_norm(np.repeat(x[:, None], 90, 1), weight, EPS)
    for r in range(5):
        alone = cpu.rms_norm(x[r : r + 1], weight[r : r + 1], EPS)
        assert np.array_equal(alone[0], whole[r])
        assert (np.asarray(many)[r] == whole[r]).all()
    x[3, 99] = np.nan
    got = np.asarray(cpu.rms_norm(x, weight, EPS))
    assert np.isnan(got[3]).all() and np.array_equal(np.delete(got, 3, 0), np.delete(whole, 3, 0))


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_eight_devices_give_the_bits_of_one(devices, implementation) -> None:
    arguments = case(Shape(4, 140, 8, 2, 64), norms=True)
    *arrays, eps, window = arguments

    def run(*arrays: Any) -> Any:
        return fixed(ops.decode_attention, *arrays, eps, window, implementation)

    heads, held, all_of = PartitionSpec(None, "m"), PartitionSpec(None, None, "m"), PartitionSpec()
    split = jax.shard_map(
        run,
        mesh=Mesh(np.array(devices[:8]), ("m",)),
        in_specs=(heads, held, held, all_of, all_of, all_of),
        out_specs=(heads, held, held),
        check_vma=False,
    )
    for got, want in zip(jax.jit(split)(*arrays), jax.jit(run)(*arrays), strict=True):
        if implementation == "cpu":
            assert np.array_equal(bits(got), bits(want))
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def lowered(arguments: list[Any], donate: bool = True) -> Any:
    *arrays, eps, window = arguments

    def run(*arrays: Any) -> Any:
        return fixed(ops.decode_attention, *arrays, eps, window)

    return jax.jit(run, donate_argnums=(1, 2) if donate else ()).lower(*arrays)


def test_a_donated_cache_is_written_in_place() -> None:
    arguments = case(Shape(4, 513, 2, 3, 64), "bfloat16")
    size = sum(a.nbytes for a in arguments[1:3])
    memory = lowered(arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 100
    kept = lowered(arguments, donate=False).compile()
    before = [bits(a).copy() for a in arguments[1:3]]
    kept(*arguments[:-2])
    for array, was in zip(arguments[1:3], before, strict=True):
        assert np.array_equal(bits(array), was), "what is not donated is left as it was"


def test_the_kernel_is_taken_where_it_has_a_form() -> None:
    assert "zen_decode_attention" in lowered(case(Shape(2, 20, 1, 2, 8), "bfloat16")).as_text()
    assert "zen_" not in lowered(case(Shape(2, 20, 1, 2, 8), "float16")).as_text()


def test_without_the_library_xla_does_it_and_says_so_once(monkeypatch, caplog) -> None:
    arguments = case(Shape(2, 20, 1, 2, 8))
    monkeypatch.setattr(cpu_build, "library_path", lambda kernel: Path("/nowhere/kernel.so"))
    cpu_build.load.cache_clear()
    cpu.built.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert "zen_" not in lowered(arguments).as_text()
        assert "zen_" not in lowered(arguments).as_text()
    assert caplog.text.count("is not built") == 1
    with pytest.raises(ValueError, match="has to be built"):
        fixed(ops.decode_attention, *arguments, implementation="cpu")
    with pytest.raises(ValueError, match="has to be built"):
        ops.rms_norm(jnp.zeros((1, 4)), jnp.ones((1, 4)), EPS, "cpu")
    monkeypatch.undo()
    cpu_build.load.cache_clear()
    cpu.built.cache_clear()
    assert cpu.available()


def test_a_library_is_named_by_its_headers_too(monkeypatch, tmp_path: Path) -> None:
    room = tmp_path / "decode_attention"
    room.mkdir()
    (room / "cpu.cc").write_text("#include <own.h>\n")
    monkeypatch.setitem(cpu_build.SOURCES, "decode_attention", room / "cpu.cc")
    monkeypatch.setattr(cpu_build, "ROOT", tmp_path)
    names = set()
    for path in (room / "own.h", tmp_path / "shared.h", tmp_path / "shared.h"):
        path.write_text(f"int n{len(names)};")
        names.add(cpu_build.library_path("decode_attention").name)
    assert len(names) == 3


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, jnp.zeros((2, 1, 4, 7)), r"qkv has shape \(2, 1, 4, 7\)"),
        (0, jnp.zeros((2, 1, 2, 8)), r"qkv has shape \(2, 1, 2, 8\)"),
        (1, jnp.zeros((2, 20, 2, 8)), r"k has shape \(2, 20, 2, 8\); expected \[N, P, 1, 8\]"),
        (2, jnp.zeros((2, 19, 1, 8)), r"v is float32\(2, 19, 1, 8\); expected float32\(2, 20"),
        (2, jnp.zeros((2, 20, 1, 8), jnp.bfloat16), "v is bfloat16"),
        (3, jnp.zeros((3,), jnp.int32), r"positions are int32\(3,\); expected int32\[2\]"),
        (3, jnp.zeros((2,)), "positions are float32"),
        (4, (jnp.zeros((2, 4)), jnp.zeros((1, 4))), r"the sine is float32\(1, 4\)"),
        (5, (jnp.zeros((2, 8)), jnp.zeros((3, 8))), r"the norm of k is float32\(3, 8\)"),
        (7, 0, "window is 0"),
    ],
)
def test_bad_input_is_named(index: int, value: Any, message: str) -> None:
    arguments = case(Shape(2, 20, 1, 2, 8))
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        fixed(ops.decode_attention, *arguments)


def test_bad_norms_and_choices_are_named() -> None:
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"x has shape \(2, 8\) and weight \(8,\)"):
        ops.rms_norm(x, jnp.ones((8,)), EPS)
    with pytest.raises(ValueError, match="'gpu'"):
        ops.rms_norm(x, jnp.ones((1, 8)), EPS, "gpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no CPU kernel for float16 here"):
        ops.rms_norm(x.astype(jnp.float16), jnp.ones((1, 8)), EPS, "cpu")
    arguments = case(Shape(2, 20, 1, 2, 8), "float16")
    with pytest.raises(ValueError, match="no CPU kernel for float32 over a cache of float16"):
        fixed(ops.decode_attention, *arguments, implementation="cpu")


def test_reference_is_not_routed_through_what_it_is_the_measure_of() -> None:
    *arrays, eps, window = case(Shape(2, 20, 1, 2, 8))
    text = jax.jit(lambda *a: fixed(reference.decode_attention, *a, eps, window)).lower(*arrays)
    assert "zen_" not in text.as_text()
