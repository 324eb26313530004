"""One body of tests over every implementation of the products, and who is chosen."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_build
from pallas_kernels.bitdelta_matmul import cpu, mosaic, ops, reference
from pallas_kernels.bitdelta_matmul.ops import SignBank
from pallas_kernels.packing import pack_signs

IMPLEMENTATIONS = ["reference", "cpu", "auto"]
FORMS = ["mixed", "one", "segments"]
# Rows, O, I: tails of every kind, several blocks, several chunks of inputs, one input.
SHAPES = [(1, 37, 41), (5, 130, 64), (21, 9, 24), (15, 67, 200), (4, 3, 1), (13, 70, 2100)]
# What the sums may be off by: float32's, and of the delta term 2 % where that is in 8 bits.
EXACT, DELTA = 2e-5, 0.02


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernel is there: a machine that runs the tests has a compiler."""
    assert cpu_build.build("bitdelta_matmul") is not None
    assert cpu.available()


def case(outputs: int, size: int, dtype: str, levels: int = 2) -> tuple:
    """w, signs in float64 and the bank of three variants."""
    rng = np.random.default_rng(outputs * 1000 + size)
    w = jnp.asarray(rng.normal(0, 0.05, (outputs, size)), dtype)
    signs = rng.choice([-1.0, 1.0], (3, levels, outputs, size))
    scale = rng.uniform(0.001, 0.1, (3, levels, outputs)).astype(np.float32)
    return w, signs, SignBank(jnp.asarray(pack_signs(signs)), jnp.asarray(scale))


def rows_of(count: int, size: int, dtype: str = "float32") -> jax.Array:
    rows = np.random.default_rng(count).normal(0.3, 1, (count, size))
    return jnp.asarray(rows.astype(np.float32), dtype)


def slots_of(form: str, count: int) -> np.ndarray:
    """Each row's slot: any order, one variant, or runs of rows."""
    if form == "one":
        return np.full(count, 1, np.int32)
    order = np.arange(count, dtype=np.int32)
    return order % 4 - 1 if form == "mixed" else order // max(1, -(-count // 3)) - 1


def product(form: str, x, w, bank, slots, implementation) -> np.ndarray:
    """The product of a form, given each row's slot."""
    match form:
        case "mixed":
            y = ops.bitdelta_matmul_mixed(x, w, bank, slots, implementation)
        case "one":
            y = ops.bitdelta_matmul(x, w, bank, slots[0], implementation)
        case _:
            starts = np.flatnonzero(np.r_[True, slots[1:] != slots[:-1]])
            ends = np.r_[starts[1:], len(slots)].astype(np.int32)
            y = ops.bitdelta_matmul_segments(x, w, bank, slots[starts], ends, implementation)
    return np.asarray(y, np.float64)


def terms(x, w, signs, bank, slots) -> tuple[np.ndarray, np.ndarray]:
    """The base's product and the delta's, float64[R, O]."""
    wide = np.asarray(x, np.float64)
    delta = (np.asarray(bank.scale, np.float64)[..., None] * signs).sum(1)
    rows = [
        row @ delta[s].T if s >= 0 else np.zeros(w.shape[0])
        for row, s in zip(wide, slots, strict=True)
    ]
    return wide @ np.asarray(w, np.float64).T, np.stack(rows)


def off(got: np.ndarray, want: np.ndarray, beside: np.ndarray | None = None) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want if beside is None else beside))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(shape, form: str, dtype: str, implementation) -> None:
    count, outputs, size = shape
    w, signs, bank = case(outputs, size, dtype)
    x, slots = rows_of(count, size), slots_of(form, count)
    base, delta = terms(x, w, signs, bank, slots)
    got = product(form, x, w, bank, slots, implementation)
    exact = implementation == "reference" or form != "mixed" or dtype == "float32"
    if exact or not delta.any():
        np.testing.assert_allclose(got, base + delta, rtol=EXACT, atol=EXACT)
    else:
        assert off(got - base, delta) <= DELTA
    for prompt in (False, True):
        alone = ops.base_matmul(x, w, prompt=prompt, implementation=implementation)
        np.testing.assert_allclose(alone, base, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_rows(form: str, implementation) -> None:
    w, signs, bank = case(67, 200, "bfloat16", 1)
    x, slots = rows_of(9, 200, "bfloat16"), slots_of(form, 9)
    base, delta = terms(x, w, signs, bank, slots)
    got = product(form, x, w, bank, slots, implementation)
    assert off(got - base, delta) <= (DELTA if form == "mixed" else 0.035)
    base_only = ops.base_matmul(x, w, prompt=form != "mixed", implementation=implementation)
    assert off(np.asarray(base_only), base) <= 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alpha", [2e-5, 5e-4, 1e-2])
def test_a_small_scale_is_not_lost(
    alpha: float, rows_dtype: str, form: str, implementation
) -> None:
    """The delta term at W ~ N(0, .02), alpha = 2e-5, over a bfloat16 base: at most 2 % off. An
    alpha of four spacings of W and more may be rounded together with W, which leaves 3.5 %."""
    rng = np.random.default_rng(5)
    w = jnp.asarray(rng.normal(0, 0.02, (256, 512)), jnp.bfloat16)
    signs = rng.choice([-1.0, 1.0], (2, 1, 256, 512))
    bank = SignBank(jnp.asarray(pack_signs(signs)), jnp.full((2, 1, 256), alpha, jnp.float32))
    x, slots = rows_of(20, 512, rows_dtype), slots_of("one", 20)
    base, delta = terms(x, w, signs, bank, slots)
    got = product(form, x, w, bank, slots, implementation)
    rounded = rows_dtype == "bfloat16" and form != "mixed" and alpha >= 5e-4
    assert off(got - base, delta) <= (0.035 if rounded else DELTA)


@pytest.mark.parametrize("size", [576, 2100])
@pytest.mark.parametrize(
    ("form", "dtype"), [("mixed", "float32"), ("mixed", "bfloat16"), ("one", "bfloat16")]
)
def test_rows_with_outliers_keep_the_delta_term(form: str, dtype: str, size: int) -> None:
    """One activation a thousand times the others would take all the steps of a table in 8 bits."""
    w, signs, bank = case(70, size, "bfloat16", 2)
    bank = bank._replace(scale=bank.scale * 1e-3)  # too small to be rounded with W
    x = np.array(rows_of(8, size))
    x[1, 7], x[2, 100], x[3, ::50], x[4, size - 1] = 1000, -3e4, 80, 500
    x[5] *= np.exp(2 * np.random.default_rng(1).normal(size=size))  # as behind an activation
    x[6], x[7] = 1e-3, 0
    x[6, 3] = 20
    rows, slots = jnp.asarray(x, dtype), slots_of(form, 8)
    _, delta = terms(rows, w, signs, bank, slots)
    zero = SignBank(bank.bits, jnp.zeros_like(bank.scale))
    got = product(form, rows, w, bank, slots, "cpu") - product(form, rows, w, zero, slots, "cpu")
    for row in np.flatnonzero(slots >= 0):
        assert off(got[row], delta[row], None if delta[row].any() else np.ones(1)) <= DELTA, row


def test_a_prompt_of_the_base_has_the_bits_of_the_bases_rows() -> None:
    """Alone and beside others, whoever "auto" chooses."""
    w, _, bank = case(130, 72, "bfloat16")
    x, slots = rows_of(20, 72, "bfloat16"), np.r_[np.full(12, -1), np.full(8, 1)].astype(np.int32)
    mixed = product("segments", x, w, bank, slots, "auto")
    assert np.array_equal(np.asarray(ops.base_matmul(x[:12], w, prompt=True)), mixed[:12])


@pytest.mark.parametrize("form", FORMS)
def test_the_hopper_kernels_mean_the_same(form: str) -> None:
    """In the interpreter, from packed signs and from a bank in their own order."""
    w, signs, bank = case(64, 128, "bfloat16", 1)
    x, slots = rows_of(9, 128, "bfloat16"), slots_of(form, 9)
    base, delta = terms(x, w, signs, bank, slots)
    got = product(form, x, w, bank, slots, "mosaic")
    assert off(got - base, delta) <= (DELTA if form == "mixed" else 0.035)
    made = mosaic.to_kernel_order(bank.bits, bank.scale, w)
    assert np.array_equal(product(form, x, w, made, slots, "auto"), got)
    with pytest.raises(ValueError, match="implementation 'cpu' takes a SignBank"):
        product(form, x, w, made, slots, "cpu")
    ids, rows = jnp.array([[3], [63]]), np.array([1, -1], np.int32)
    want = ops.bitdelta_embed(ids, w, bank, rows, "reference")
    np.testing.assert_allclose(ops.bitdelta_embed(ids, w, made, rows), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reconstruct", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_loops_and_avx512_have_the_same_bits(shape, reconstruct: bool, dtype: str) -> None:
    count, outputs, size = shape
    w, _, bank = case(outputs, size, dtype)
    x, slots = rows_of(count, size), jnp.asarray(slots_of("mixed", count))
    fast = cpu.bitdelta_matmul(x, w, bank, slots, reconstruct, False)
    plain = cpu.bitdelta_matmul(x, w, bank, slots, reconstruct, True)
    assert np.array_equal(fast, plain)
    fast = cpu.base_matmul(x, w, reconstruct, False)
    assert np.array_equal(fast, cpu.base_matmul(x, w, reconstruct, True))


@pytest.mark.parametrize("alpha", [1e-5, 1.0])
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mixed", "segments"])
def test_a_row_has_the_same_bits_in_any_company_and_a_nan_stays_in_it(
    form, rows_dtype, alpha
) -> None:
    w, _, bank = case(130, 72, "bfloat16")
    bank = bank._replace(scale=alpha * bank.scale)
    slots = np.array([0, 1, 2, -1, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0], np.int32)
    x = rows_of(len(slots), 72, rows_dtype)
    whole = product(form, x, w, bank, slots, "cpu")
    for row in range(len(slots)):
        alone = product(form, x[row : row + 1], w, bank, slots[row : row + 1], "cpu")
        assert np.array_equal(whole[row], alone[0])
    base = ops.base_matmul(x, w, prompt=form != "mixed", implementation="cpu")
    assert np.array_equal(np.asarray(base, np.float64)[3], whole[3])
    for bad in (np.nan, np.inf):
        got = product(form, x.at[3, 5].set(bad).at[4, 5].set(bad), w, bank, slots, "cpu")
        assert not np.isfinite(got[3:5]).any()
        others = [row for row in range(len(slots)) if row not in (3, 4)]
        assert np.array_equal(got[others], whole[others])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_embedding_rows(implementation) -> None:
    w, signs, bank = case(31, 20, "bfloat16")
    ids, slots = jnp.array([[0], [5], [30]]), np.array([1, -1, 2], np.int32)
    got = ops.bitdelta_embed(ids, w, bank, slots, implementation)
    for b, slot in enumerate(slots):
        whole = np.asarray(w, np.float64)
        if slot >= 0:
            whole = whole + (np.asarray(bank.scale)[slot][..., None] * signs[slot]).sum(0)
        np.testing.assert_allclose(got[b], whole[ids[b]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_weight(form: str) -> None:
    """By x, w and the scales, through the kernel, against autodiff of the materialised product."""
    w, signs, bank = case(40, 24, "float32")
    x, slots = rows_of(6, 24), slots_of(form, 6)

    def fused(x, w, scale):
        if form == "mixed":
            y = ops.bitdelta_matmul_mixed(x, w, SignBank(bank.bits, scale), slots, "cpu")
        else:
            y = cpu.bitdelta_matmul(x, w, SignBank(bank.bits, scale), jnp.asarray(slots), True)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(cpu.base_matmul(x, w, False)))

    def whole(x, w, scale):
        delta = jnp.sum(scale[..., None] * signs, axis=1)
        own = w + jnp.where((slots >= 0)[:, None, None], delta[slots], 0.0)
        y = jnp.einsum("ri,roi->ro", x, own, precision="highest")
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(x @ w.T))

    wanted = jax.grad(whole, argnums=(0, 1, 2))(x, w, bank.scale)
    for got, want in zip(jax.grad(fused, argnums=(0, 1, 2))(x, w, bank.scale), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_the_backward_pass_makes_no_weight(monkeypatch) -> None:
    monkeypatch.setattr(reference, "TILE_BYTES", 1 << 14)
    w, _, bank = case(512, 256, "bfloat16", 1)
    x, slots = rows_of(8, 256), jnp.zeros(8, jnp.int32)

    def loss(x, scale):
        return jnp.sum(cpu.bitdelta_matmul(x, w, SignBank(bank.bits, scale), slots, True))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, bank.scale).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 512 * 256 * 4 / 2


def program(form: str, rows: int, dtype: str = "float32") -> str:
    """What a product of so many rows is compiled to."""
    w, _, bank = case(16, 8, "bfloat16")
    x, slots = jnp.zeros((rows, 8), dtype), jnp.zeros((rows,), jnp.int32)
    take = {"mixed": ops.bitdelta_matmul_mixed, "one": ops.bitdelta_matmul}[form]
    return jax.jit(take).lower(x, w, bank, slots if form == "mixed" else slots[0]).as_text()


def test_auto_takes_the_kernel_where_it_has_a_form() -> None:
    for form in ("mixed", "one"):
        assert "zen_bitdelta_matmul" in program(form, 3)
        assert "zen_bitdelta_matmul" in program(form, 300, "bfloat16")
        assert "zen_bitdelta_matmul" not in program(form, 3, "float16")


def test_without_the_library_xla_does_it_and_says_so_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu_build, "library_path", lambda kernel: Path("/nowhere/kernel.so"))
    cpu_build.load.cache_clear()
    cpu.built.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert "zen_bitdelta_matmul" not in program("mixed", 6) and "zen" not in program("one", 7)
    assert caplog.text.count("is not built") == 1
    with pytest.raises(ValueError, match="has to be built"):
        ops.base_matmul(jnp.zeros((1, 8)), jnp.zeros((4, 8)), prompt=False, implementation="cpu")
    monkeypatch.undo()
    cpu_build.load.cache_clear()
    cpu.built.cache_clear()
    assert cpu.available()


def test_bad_input_is_named() -> None:
    w, _, bank = case(4, 8, "float32", 1)
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match="'gpu'"):
        ops.base_matmul(x, w, prompt=False, implementation="gpu")
    with pytest.raises(ValueError, match="no CPU kernel for x float16"):
        ops.base_matmul(x.astype(jnp.float16), w, prompt=False, implementation="cpu")
    with pytest.raises(ValueError, match=r"x is float32\[2, 7\]; expected float \[rows, 8\]"):
        ops.base_matmul(x[:, :7], w, prompt=False)
    with pytest.raises(ValueError, match=r"x is int32"):
        ops.bitdelta_matmul(x.astype(jnp.int32), w, bank, 0)
    with pytest.raises(ValueError, match=r"w is float32\[8\]"):
        ops.bitdelta_matmul(x, w[0], bank, 0)
    slots = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=r"bits are int8"):
        ops.bitdelta_matmul_mixed(x, w, SignBank(bank.bits.astype(jnp.int8), bank.scale), slots)
    with pytest.raises(ValueError, match=r"bits are uint8\[3, 1, 3, 1\]; expected .* 4, 1\]"):
        ops.bitdelta_matmul_mixed(x, w, SignBank(bank.bits[:, :, :3], bank.scale), slots)
    with pytest.raises(ValueError, match=r"scale is float32\[3, 1, 1\]"):
        ops.bitdelta_matmul_mixed(x, w, SignBank(bank.bits, bank.scale[..., :1]), slots)
    with pytest.raises(ValueError, match=r"slots are int32\[3\]; expected int32 \[2\]"):
        ops.bitdelta_matmul_mixed(x, w, bank, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="slot 3 of a bank of 3; expected -1"):
        ops.bitdelta_matmul_mixed(x, w, bank, np.array([0, 3], np.int32))
    with pytest.raises(ValueError, match="slot -2"):
        ops.bitdelta_matmul(x, w, bank, -2)
    with pytest.raises(ValueError, match="ids are float32"):
        ops.bitdelta_embed(jnp.zeros((2, 1)), w, bank, slots)
    with pytest.raises(ValueError, match="'attention'"):
        cpu_build.library_path("attention")


def test_what_is_no_array_is_named() -> None:
    w, _, bank = case(4, 8, "float32", 1)
    x, slots = jnp.zeros((2, 8)), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="x is a list; expected an array"):
        ops.bitdelta_matmul_mixed([[0.0] * 8], w, bank, slots)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bank is a tuple; expected a SignBank"):
        ops.bitdelta_matmul(x, w, tuple(bank), 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bits is a NoneType"):
        ops.bitdelta_matmul(x, w, SignBank(None, bank.scale), 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"x is float32\[\]"):
        ops.bitdelta_matmul_mixed(jnp.float32(1), w, bank, slots)
    listed = ops.bitdelta_matmul_mixed(x + 1, w, bank, [0, 1])
    assert np.array_equal(listed, ops.bitdelta_matmul_mixed(x + 1, w, bank, np.array([0, 1])))
    for ends, match in (
        ([2, 1], "rising"),
        ([1, 3], "within 0..2"),
        ([1.0, 2.0], "ends are float"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.bitdelta_matmul_segments(x, w, bank, slots, ends)
    with pytest.raises(ValueError, match=r"ids go from 0 to 4; expected 0\.\.3"):
        ops.bitdelta_embed(np.array([[0], [4]]), w, bank, slots)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8), (2, 8, 0), (0, 0, 0)])
def test_empty_products(shape, dtype: str, implementation) -> None:
    """Sums over nothing are 0, and nothing is as long as it should be."""
    rows, outputs, size = shape
    w, x = jnp.zeros((outputs, size), dtype), jnp.ones((rows, size), dtype)
    bits = jnp.zeros((2, 1, outputs, -(-size // 8)), jnp.uint8)
    bank, slots = SignBank(bits, jnp.ones((2, 1, outputs))), np.zeros(rows, np.int32)
    for got in (
        ops.bitdelta_matmul_mixed(x, w, bank, slots, implementation),
        ops.bitdelta_matmul(x, w, bank, 1, implementation),
        ops.base_matmul(x, w, prompt=True, implementation=implementation),
        ops.base_matmul(x, w, prompt=False, implementation=implementation),
    ):
        assert np.array_equal(got, np.zeros((rows, outputs)))


def test_a_slot_on_the_device_that_is_none_reads_as_the_base() -> None:
    w, _, bank = case(4, 8, "bfloat16", 1)
    x, slots = rows_of(3, 8), jnp.array([3, -7, -1])
    got = np.asarray(ops.bitdelta_matmul_mixed(x, w, bank, slots, "cpu"))
    assert np.array_equal(got, np.asarray(cpu.base_matmul(x, w, False)))
    got = np.asarray(ops.bitdelta_matmul(x, w, bank, jnp.int32(99), "cpu"))
    assert np.array_equal(got, np.asarray(cpu.base_matmul(x, w, True)))


def test_a_library_is_named_by_what_it_is_made_of(monkeypatch, tmp_path: Path) -> None:
    before = cpu_build.library_path("bitdelta_matmul")
    changed = tmp_path / "cpu.cc"
    changed.write_text("int other;")
    monkeypatch.setitem(cpu_build.SOURCES, "bitdelta_matmul", changed)
    monkeypatch.setattr(cpu_build, "ROOT", tmp_path)
    assert cpu_build.library_path("bitdelta_matmul").name != before.name
    assert cpu_build.build("bitdelta_matmul") is not None
    changed.write_text("no C++ at all")
    with pytest.raises(RuntimeError, match="could not build bitdelta_matmul"):
        cpu_build.build("bitdelta_matmul")
    assert [path.suffix for path in (tmp_path / "_build").iterdir()] == [".so"]
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: None)
    assert cpu_build.build("bitdelta_matmul") is None


def test_reference_is_what_it_was() -> None:
    """The reference is not routed through what it is the measure of."""
    w, _, bank = case(16, 8, "bfloat16")
    slots = jnp.zeros((2,), jnp.int32)
    for function in (reference.bitdelta_matmul_mixed, reference.bitdelta_embed):
        first = jnp.zeros((2, 8)) if function is reference.bitdelta_matmul_mixed else slots[:, None]
        assert "zen_" not in jax.jit(function).lower(first, w, bank, slots).as_text()
