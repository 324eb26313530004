"""Cutting and joining arrays, and names that the store takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.checkpoint.chunks import cut, describe_bytes, empty_pieces, join
from zen_jax.checkpoint.manifest import NameRefused, Part, check_name


@given(data=st.data())
def test_shards_in_order_make_the_array(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    shards = data.draw(st.integers(1, 4))
    shape[axis] *= shards
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    part = Part("leaf", "float32", array.shape, shards, axis, "")
    stored = cut(array, shards, axis)
    pieces = [stored] if shards == 1 else list(stored)
    assert [p.shape for p in pieces] == [p.shape for p in empty_pieces(part)]
    assert stored.flags.c_contiguous
    np.testing.assert_array_equal(join(pieces, part), array)
    if shards > 1:
        for piece, expected in zip(stored, np.split(array, shards, axis), strict=True):
            np.testing.assert_array_equal(piece, expected)
    assert len(part.files()) == shards == len(set(part.files()))


def test_checksums_of_known_bytes() -> None:
    entry = describe_bytes(b"abc")
    assert entry.size == 3
    assert entry.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert entry.xxh3 == "06b05ab6733a618578af5f94892f3950"
    assert describe_bytes(np.frombuffer(b"abc", np.uint8)) == entry


@given(st.text(max_size=140))
def test_names_are_what_the_pattern_says(name: str) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    good = 1 <= len(name) <= 128 and name[0] in letters and name != "base"
    if good and all(c in letters + "._-" for c in name):
        assert check_name(name) == name
    else:
        with pytest.raises(NameRefused):
            check_name(name)
