"""What a slot holds, what does not fit, and that nothing of an old variant is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.bank import BankSchema, DoesNotFit, LeafSchema, write_slot
from zen_jax.delta.format import WeightDelta

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


def test_every_leaf_of_a_slot_is_written(config, make_variant) -> None:
    schema = BankSchema.covering(config, 2)
    first, second = make_variant(1), make_variant(2)
    second = {name: WeightDelta() if name in (UP, NORM) else d for name, d in second.items()}
    write = jax.jit(write_slot, donate_argnums=0)
    bank = schema.empty()
    for deltas in (first, second):
        bank = write(bank, jnp.int32(1), schema.fit(deltas))
    fresh = write(schema.empty(), jnp.int32(1), schema.fit(second))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, bank, fresh)))
    gate_up = bank.weights["layers"][0]["gate_up"]
    assert not np.asarray(gate_up.scale[1, 0, 1]).any(), "the shared half reads as the base"
    assert not np.asarray(bank.weights["final_norm"].dense[1]).any()
    assert not np.asarray(gate_up.scale[0]).any(), "the other slot is untouched"


def test_what_does_not_fit_names_tensor_and_limit(config, make_variant) -> None:
    schema = BankSchema.covering(config, 2)
    two = make_variant(1, levels=2)
    with pytest.raises(DoesNotFit, match=r"2 levels; the bank has room for 1"):
        schema.fit(two)
    whole = make_variant(1)
    whole[UP] = WeightDelta(dense=np.ones((128, 64), np.float32))
    with pytest.raises(DoesNotFit, match=r"up_proj\.weight: stored whole"):
        schema.fit(whole)


def test_a_schema_covers_the_variants_it_was_made_for(config, make_variant) -> None:
    schema = BankSchema.covering(config, 2, [{UP: LeafSchema(2, False)}, {UP: LeafSchema(1, True)}])
    assert schema.leaves[UP] == LeafSchema(2, True)
    deltas = make_variant(1) | {UP: make_variant(1, levels=2)[UP]}
    fitted = schema.fit(deltas)
    assert fitted.weights["layers"][0]["gate_up"].bits.shape[0] == 2
    assert fitted.weights["layers"][1]["gate_up"].bits.shape[0] == 1


def test_bytes_of_a_slot(config) -> None:
    """One bit a parameter and a float32 a row: 0.0625 + scales of a bfloat16 copy."""
    bank = BankSchema.covering(config, 1).empty()
    matrices = [
        d for d in jax.tree.leaves(bank.weights, is_leaf=lambda n: isinstance(n, WeightDelta))
    ]
    bits = sum(d.bits.nbytes for d in matrices if d.bits is not None)
    norms = config.hidden_size * (2 * config.num_layers + 1)
    assert bits == (config.parameters - norms) // 8


def test_a_bank_needs_a_slot(config) -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        BankSchema.covering(config, 0)
