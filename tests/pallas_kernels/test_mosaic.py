"""The Hopper kernels in the interpreter, with races looked for, beside float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.bitdelta_matmul import mosaic, mosaic_plan, mosaic_rows, mosaic_tiles
from pallas_kernels.packing import pack_signs

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# Zeros where a copy reaches beyond an array, as on a card: then no weight is padded.
UNPADDED = plgpu.InterpretGPUParams(
    detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"
)


def races() -> bool:
    """Whether the kernel interpreted last had a race."""
    return gpu_callbacks.get_races().races_found


class Case:
    """A random weight and bank, with its signs in float64."""

    def __init__(self, outputs: int, size: int, variants: int, levels: int = 1) -> None:
        rng = np.random.default_rng(outputs + size)
        self.w = jnp.asarray(rng.normal(0, 0.02, (outputs, size)), jnp.bfloat16)
        self.signs = rng.choice([-1.0, 1.0], (variants, levels, outputs, size))
        self.scale = rng.uniform(1e-4, 1e-2, (variants, levels, outputs)).astype(np.float32)
        self.bits = jnp.asarray(pack_signs(self.signs))
        self.bank = mosaic.to_kernel_order(self.bits, jnp.asarray(self.scale), self.w)

    def rows(self, count: int) -> jnp.ndarray:
        """Rows with a mean, as activations have, in bfloat16."""
        rng = np.random.default_rng(count)
        return jnp.asarray(rng.normal(0.5, 1, (count, self.w.shape[1])), jnp.bfloat16)

    def term(self, x: jnp.ndarray, slots: np.ndarray) -> np.ndarray:
        """alpha (x S^T) of each row's variant."""
        valid = (slots >= 0) & (slots < len(self.signs))
        whole = (self.scale[..., None] * self.signs).sum(1)[np.where(valid, slots, 0)]
        wide = np.asarray(x, np.float64)
        return np.where(valid[:, None], np.einsum("ti,toi->to", wide, whole), 0)

    def base(self, x: jnp.ndarray) -> np.ndarray:
        """x W^T."""
        return np.asarray(x, np.float64) @ np.asarray(self.w, np.float64).T


# Rows, O, I, variants, levels; slots come in any order, -1 and one too large among them.
MIXED = [(13, 100, 1000, 3, 2), (40, 128, 500, 5, 1), (3, 130, 200, 2, 1)]
HOW = [*[(*case, INTERPRET) for case in MIXED], (*MIXED[0], UNPADDED), (*MIXED[2], UNPADDED)]


@pytest.mark.parametrize("rows, outputs, size, variants, levels, how", HOW)
def test_mixed_rows(
    rows: int, outputs: int, size: int, variants: int, levels: int, how: Any
) -> None:
    case = Case(outputs, size, variants, levels)
    x = case.rows(rows)
    slots = np.random.default_rng(rows).integers(-1, variants + 1, rows).astype(np.int32)
    tuning = mosaic_rows.RowsTuning(chunk=256, splits=2 if size == 1000 else 1)
    planned = mosaic.plan(jnp.asarray(slots), case.bank)
    got = mosaic_rows.rows_matmul(
        x, case.w, case.bank.words, case.scale, planned, tuning=tuning, interpret=how
    )
    assert not races()
    np.testing.assert_allclose(got, case.base(x) + case.term(x, slots), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch, variants", [(64, 14), (27, 3), (9, 19)])
def test_a_plan_covers_each_variants_rows_with_one_window(batch: int, variants: int) -> None:
    """Every variant once, its rows inside its window, the least that will do."""
    rng = np.random.default_rng(batch)
    make = jax.jit(functools.partial(mosaic_plan.plan, variants=variants, levels=2))
    for _ in range(20):
        slots = np.sort(rng.integers(-1, variants + 1, (4, batch)), axis=0)[rng.integers(0, 4)]
        rng.shuffle(slots)
        order, rank, ordered, entries = (np.asarray(part) for part in make(jnp.asarray(slots)))
        assert np.array_equal(order[rank], np.arange(batch))
        assert np.all(np.diff(ordered[:batch]) >= 0)
        rows = mosaic_plan.padded_rows(batch)
        present = sorted({slot for slot in slots if 0 <= slot < variants})
        assert entries[3, 0] == 2 * len(present)
        for n, (row, group, kind, _, slot) in enumerate(entries.T[: entries[3, 0]]):
            assert slot == present[n // 2] and row == 2 * slot + n % 2
            own = rank[slots == slot]
            width = mosaic_plan.widths_of(rows, False)[kind]
            assert 8 * group <= own.min() and own.max() < 8 * group + width <= rows
            assert width == 8 or own.max() >= own.min() // 8 * 8 + width // 2


@pytest.mark.parametrize("slot", [1, -1])
def test_rows_of_one_variant(slot: int) -> None:
    case = Case(100, 300, 2, 2)
    x = case.rows(9)
    got = mosaic.bitdelta_matmul(x, case.w, case.bank, jnp.int32(slot), interpret=INTERPRET)
    assert not races()
    want = case.base(x) + case.term(x, np.full(9, slot))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_more_rows_than_one_call_takes() -> None:
    case = Case(64, 128, 3)
    x, slots = case.rows(70), np.arange(70, dtype=np.int32) % 4 - 1
    got = mosaic.bitdelta_matmul_mixed(x, case.w, case.bank, slots, interpret=INTERPRET)
    assert not races()
    np.testing.assert_allclose(got, case.base(x) + case.term(x, slots), rtol=1e-5, atol=1e-5)


# With two levels, and programs in pairs that share their rows.
@pytest.mark.parametrize("reconstruct", [False, True])
@pytest.mark.parametrize(
    "outputs, size, levels, cluster, how",
    [(200, 300, 2, 1, INTERPRET), (256, 300, 1, 2, INTERPRET), (200, 304, 1, 1, UNPADDED)],
)
def test_prefill(
    reconstruct: bool, outputs: int, size: int, levels: int, cluster: int, how: Any
) -> None:
    case = Case(outputs, size, 2, levels)
    x, slots = case.rows(192), np.array([1, -1, 2], np.int32)
    tuning = mosaic_tiles.TilesTuning(64, cluster=cluster)
    got = mosaic_tiles.tiles_matmul(
        x,
        case.w,
        case.bank.words,
        case.scale,
        slots,
        reconstruct=reconstruct,
        tuning=tuning,
        interpret=how,
    )
    assert not races()
    rounded = np.asarray(jnp.asarray(case.scale, jnp.bfloat16).astype(jnp.float32))
    w = np.asarray(case.w, np.float64)
    term = rounded[..., None] * case.signs
    for n, slot in enumerate(slots):
        whole = case.w
        terms = [] if not 0 <= slot < 2 else list(term[slot])
        for each in terms:  # in bfloat16, one level after the other
            whole = whole + jnp.asarray(each, jnp.bfloat16)
        exact = np.asarray(whole, np.float64) if reconstruct else w + sum(terms, 0 * w)
        rows = np.asarray(x, np.float64)[64 * n : 64 * n + 64]
        np.testing.assert_allclose(got[64 * n : 64 * n + 64], rows @ exact.T, rtol=1e-5, atol=1e-5)


def test_a_long_prompt_that_is_no_whole_number_of_tiles() -> None:
    case = Case(64, 128, 2)
    x = case.rows(150)
    got = mosaic.bitdelta_matmul(x, case.w, case.bank, jnp.int32(1), interpret=INTERPRET)
    assert not races() and got.shape == (150, 64)
    term = case.term(x, np.full(150, 1))
    assert np.linalg.norm(got - case.base(x) - term) <= 0.02 * np.linalg.norm(term)


def test_segments() -> None:
    """An empty one, one of a single row, the base among them, rows beyond the last end."""
    case = Case(64, 128, 3)
    x, slots, ends = case.rows(150), np.array([2, 0, -1, 1]), np.array([60, 60, 61, 140])
    of_row = np.repeat([2, -1, 1, -1], [60, 1, 79, 10])
    run = functools.partial(mosaic.bitdelta_matmul_segments, interpret=INTERPRET)
    got = run(x, case.w, case.bank, jnp.asarray(slots), jnp.asarray(ends))
    assert not races()
    term = case.term(x, of_row)
    off = np.linalg.norm(got - case.base(x) - term, axis=1)
    assert np.all(off <= 0.02 * np.linalg.norm(term, axis=1) + 1e-4)


def test_embedding() -> None:
    case = Case(200, 300, 3, 2)
    ids = np.random.default_rng(0).integers(0, 200, (4, 5))
    slots = np.array([1, -1, 2, 3], np.int32)
    got = jax.jit(mosaic.bitdelta_embed)(ids, case.w, case.bank, slots)
    for b, slot in enumerate(slots):
        whole = np.asarray(case.w, np.float64)
        if 0 <= slot < 3:
            whole = whole + (case.scale[slot][..., None] * case.signs[slot]).sum(0)
        np.testing.assert_allclose(got[b], whole[ids[b]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [8, 80])
def test_a_small_scale_is_not_lost(rows: int) -> None:
    """The delta term at W ~ N(0, .02), alpha = 2e-5: at most 2 % off, in decode and in prefill."""
    case = Case(64, 256, 1)
    scale = jnp.full((1, 1, 64), 2e-5, jnp.float32)
    bank = mosaic.to_kernel_order(case.bits, scale, case.w)
    assert not bank.reconstruct[0]
    x = case.rows(rows)
    got = mosaic.bitdelta_matmul(x, case.w, bank, jnp.int32(0), interpret=INTERPRET)
    term = 2e-5 * (np.asarray(x, np.float64) @ case.signs[0, 0].T)
    assert np.linalg.norm(got - case.base(x) - term) <= 0.02 * np.linalg.norm(term)


def test_when_a_weight_may_be_reconstructed() -> None:
    """alpha at least 4 spacings of bfloat16 at 0.02, which are 4.9e-4; each row counts."""
    w = jnp.full((3, 8), 0.02, jnp.bfloat16)
    scale = jnp.array([[4.9e-4, 1e-3, 1e-3], [4.8e-4, 1e-3, 1e-3], [0, 1e-3, 4.9e-4]])[:, None]
    assert mosaic.may_reconstruct(scale, w).tolist() == [True, False, True]


def test_a_nan_stays_in_its_row() -> None:
    case = Case(64, 128, 2)
    x = case.rows(6)
    slots = np.array([0, 1, 0, -1, 1, 0], np.int32)
    got = mosaic.bitdelta_matmul_mixed(
        x.at[2].set(jnp.nan), case.w, case.bank, slots, interpret=INTERPRET
    )
    others = [0, 1, 3, 4, 5]
    want = (case.base(x) + case.term(x, slots))[others]
    assert np.isnan(got[2]).all()
    np.testing.assert_allclose(np.asarray(got)[others], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", ["outputs", "inputs"])
def test_a_sharded_weight(of: str, devices: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shard_map, signs sharded like the weight and padded in each shard by itself."""
    # The interpreter looks for barriers left over while another device still runs.
    monkeypatch.setattr(GPUSharedMemory, "assert_no_barriers_allocated", lambda *_: None)
    case = Case(160, 272, 2)
    x, slots = case.rows(8), np.array([0, 1, -1, 1, 0, 0, 1, 0], np.int32)
    mesh = Mesh(np.array(devices[:2]), ("model",))
    w, bits, scale, inputs, out = {
        "outputs": (("model", None), (None, None, "model"), (None, None, "model"), (), "model"),
        "inputs": ((None, "model"), (None, None, None, "model"), (), (None, "model"), None),
    }[of]

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*spec) for spec in (inputs, w, bits, scale)),
        out_specs=PartitionSpec(None, out),
        check_vma=False,
    )
    def run(x: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array) -> jax.Array:
        bank = mosaic.to_kernel_order(bits, scale, w)
        # Races are looked for on one device, above: here the two would be taken for one.
        y = mosaic.bitdelta_matmul_mixed(x, w, bank, slots, interpret=plgpu.InterpretGPUParams())
        return y if of == "outputs" else jax.lax.psum(y, "model")

    got = run(x, case.w, case.bits, jnp.asarray(case.scale))
    np.testing.assert_allclose(got, case.base(x) + case.term(x, slots), rtol=1e-5, atol=1e-5)


def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, but what has been read of a stage is written over without a fence."""
    entry = mosaic_rows._Warpgroup.entry

    def without_fence(self, *args) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "commit_smem", lambda: None)
            entry(self, *args)

    monkeypatch.setattr(mosaic_rows._Warpgroup, "entry", without_fence)
    case = Case(64, 512, 3)
    mosaic_rows.rows_matmul(
        case.rows(8),
        case.w,
        case.bank.words,
        case.scale,
        mosaic.plan(jnp.arange(8) % 3, case.bank),
        tuning=mosaic_rows.RowsTuning(chunk=256, splits=1, sign_stages=2),
        interpret=INTERPRET,
    )
    assert races()


def test_bad_arguments_are_named() -> None:
    case = Case(64, 256, 1)
    with pytest.raises(ValueError, match="65 rows"):
        mosaic_rows.rows_tuning(65, 64, 256)
    with pytest.raises(ValueError, match="are 512 entries"):
        mosaic_plan.plan(jnp.zeros(64, jnp.int32), 64, 8)
    with pytest.raises(ValueError, match="256 inputs are not 2 times"):
        mosaic_rows.rows_matmul(
            case.rows(8),
            case.w,
            case.bank.words,
            case.scale,
            mosaic.plan(jnp.zeros(8, jnp.int32), case.bank),
            tuning=mosaic_rows.RowsTuning(chunk=256, splits=2),
        )
    with pytest.raises(ValueError, match="80 rows; expected a multiple of a tile's 64"):
        mosaic_tiles.tiles_matmul(
            case.rows(80),
            case.w,
            case.bank.words,
            case.scale,
            jnp.zeros(1, jnp.int32),
            reconstruct=True,
            tuning=mosaic_tiles.TilesTuning(64),
        )
