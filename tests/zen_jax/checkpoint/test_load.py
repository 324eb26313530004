"""A base from its store onto devices: weight by weight, as compiled for, each file once."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from zen_jax.checkpoint.load import bank_schema, base_shapes, read_base
from zen_jax.checkpoint.store import Store
from zen_jax.delta.widen import HeldShape
from zen_jax.engine import place_params
from zen_jax.layout import EMBED
from zen_jax.sharding import Placement, make_mesh


def cases(store: Store) -> dict[str, HeldShape]:
    """As the base is, and as held for members with more tokens and a head of their own."""
    base = store.base().config
    wide = HeldShape.of(base, [base.__class__.from_hf(base.to_hf() | WIDER)])
    return {"as it is": bank_schema(store).held, "widened": wide}


WIDER = {"vocab_size": 300, "tie_word_embeddings": False}


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("case", ["as it is", "widened"])
def test_weight_by_weight_equals_all_at_once(
    case: str, meshed: bool, tiny_store: Path, devices, monkeypatch
) -> None:
    store, read = Store(tiny_store), Counter()
    held = cases(store)[case]
    place = Placement.of(held.config, make_mesh(2)) if meshed else None
    want = place_params(held.config, held.fuse_base(dict(store.base_tensors())), place)
    before = store.base_tensor
    monkeypatch.setattr(store, "base_tensor", lambda name: (read.update([name]), before(name))[1])
    told: list[tuple[int, int]] = []
    got = read_base(store, held, place, lambda what, done, count: told.append((done, count)))
    shapes = base_shapes(store, held, place)

    def same(a: Any, b: Any, shape: Any) -> None:
        assert np.array_equal(a, b) and a.dtype == b.dtype
        assert (shape.shape, shape.dtype) == (a.shape, a.dtype)
        if meshed:
            assert a.sharding == b.sharding == shape.sharding

    jax.tree.map(same, got, want, shapes)
    twice = {EMBED} if case == "widened" else set()
    assert {name for name, count in read.items() if count > 1} == twice
    assert set(read) == set(store.base().tensors)
    count = len(jax.tree.leaves(got))
    assert told == [(n, count) for n in range(count)]
