"""How prompts are cut: the shapes, who is read, and that everybody is in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.chunking import chunk_shapes, cut, shape_for

SHAPES = chunk_shapes(512, 16, 1024)


def test_shapes_stay_within_the_budget() -> None:
    assert SHAPES == ((1, 32), (1, 128), (1, 512), (4, 32), (4, 128), (16, 32))
    assert chunk_shapes(512, 2, 1024) == ((1, 32), (1, 128), (1, 512), (2, 32), (2, 128))
    assert chunk_shapes(512, 16, 100) == ((1, 32), (4, 32), (16, 32))
    assert chunk_shapes(64, 8, 12) == ((1, 12), (4, 12))
    assert chunk_shapes(2, 1, 2) == ((1, 2),)


@pytest.mark.parametrize(
    ("left", "tokens"),
    [
        ([], ()),
        ([1], (1,)),
        ([40], (32,)),  # 40 of 128 would be mostly padding
        ([70], (70,)),
        ([900, 5], (512,)),
        ([5, 900], (5,)),  # two of four places would be half empty
        ([5, 900, 3], (5, 32, 3)),
        ([100] * 6, (100,) * 4),
        ([5] * 20, (5,) * 16),
    ],
)
def test_the_first_decides_and_others_join(left: list[int], tokens: tuple[int, ...]) -> None:
    assert cut(left, SHAPES) == tokens


@given(
    st.integers(2, 600),
    st.integers(1, 40),
    st.integers(2, 2000),
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
)
def test_every_cut_fits_a_shape_and_reading_ends(
    budget: int, rows: int, max_length: int, left: list[int]
) -> None:
    shapes = chunk_shapes(budget, rows, max_length)
    assert all(1 <= c <= rows and 2 <= t <= max_length for c, t in shapes)
    calls = 0
    while left:
        tokens = cut(left, shapes)
        assert 1 <= len(tokens) <= len(left)
        c, t = shape_for(tokens, shapes)
        assert c * t <= max(budget, max_length if max_length < 16 else 16), "no more than asked for"
        assert all(0 < taken <= there for taken, there in zip(tokens, left, strict=False))
        left = [there - taken for taken, there in zip(tokens, left, strict=False)] + left[
            len(tokens) :
        ]
        left = [there for there in left if there]
        calls += 1
    assert calls <= 30 * 3000


def test_what_fits_no_shape_is_refused() -> None:
    assert shape_for([3, 20], SHAPES) == (4, 32)
    with pytest.raises(ValueError, match=r"chunks of \[600\] tokens"):
        shape_for([600], SHAPES)
    with pytest.raises(ValueError, match="chunks of"):
        shape_for([1] * 17, SHAPES)
