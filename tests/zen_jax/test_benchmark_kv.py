"""What the benchmark of keys and values compares: the kinds it is asked for, and their numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zen_jax.benchmark_kv import decode_kinds, divergences
from zen_jax.delta.bank import BankSchema


def test_kinds_are_timed_beside_fixed_rows(config: Any, base: Any) -> None:
    kinds = [("float32", None), ("float32", 16), ("int8", None)]
    made = decode_kinds(base, BankSchema.covering(config, 1), kinds, 2, 20, 2)
    assert [(one.kv_dtype, one.page_size) for one in made] == kinds
    ms = [one.step_ms for one in made]
    assert [one.over_float32 for one in made] == [t / ms[0] for t in ms]
    assert [one.over_fixed for one in made] == [1.0, ms[1] / ms[0], 1.0]
    # 2 layers of keys and values, 4 kv heads of 8 numbers, a scale each with 8 bits.
    assert [one.bytes_per_token for one in made] == [2 * 2 * 4 * 32, 2 * 2 * 4 * 32, 2 * 2 * 4 * 12]


def test_what_has_nothing_to_compare_with_is_refused(config: Any, base: Any) -> None:
    schema = BankSchema.covering(config, 1)
    with pytest.raises(ValueError, match="int8 has no fixed rows"):
        decode_kinds(base, schema, [("float32", None), ("int8", 16)])
    with pytest.raises(ValueError, match="repeats 31; expected 1 or more, repeats up to 30"):
        decode_kinds(base, schema, [("float32", None)], repeats=31)


def test_fewer_bits_diverge_more(config: Any, base: Any) -> None:
    params = jax.tree.map(lambda w: w.astype(jnp.float32), base)
    sheets = [list(range(40)), list(range(63, 3, -1))]
    dtypes = ["float32", "bfloat16", "int8", "float8_e4m3fn"]
    found = divergences(config, params, sheets, dtypes)
    assert [one.kv_dtype for one in found] == dtypes
    assert {one.tokens for one in found} == {100}, "padding is not counted"
    exact, *others = found
    assert abs(exact.kl) < 1e-6 and exact.same == 1.0
    assert exact.kl < others[0].kl < others[1].kl < others[2].kl < 0.5
    assert all(one.kl < one.kl_99 for one in others)
