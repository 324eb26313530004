"""How prompts are cut into chunks: which shapes are compiled, and who is read in the next call.

A call reads a chunk of each of several prompts, padded to one of a few shapes [C, T]: C prompts, T
tokens of each. What a prompt's numbers are does not depend on how it is cut or on its company, so
the shapes are chosen by speed alone. Pure Python: the scheduler decides by it too.
"""

from collections.abc import Sequence

# A quarter as long a chunk is the next shape, and four times as many prompts.
_STEP = 4
_SHORTEST = 16

type Shape = tuple[int, int]


def chunk_shapes(budget: int, rows: int, max_length: int) -> tuple[Shape, ...]:
    """The shapes (C, T) to compile, none of more than `budget` tokens if there is a choice.

    Args:
      budget: tokens of a call.
      rows: that decode together; no call reads more prompts.
      max_length: tokens of a row; no chunk is longer.
    """
    lengths = [max(budget, 2)]
    while lengths[-1] // _STEP >= _SHORTEST:
        lengths.append(lengths[-1] // _STEP)
    lengths = [t for t in lengths if t <= max_length] or [max_length]
    shapes: set[Shape] = set()
    for length in lengths:
        prompts = 1
        while prompts == 1 or prompts * length <= budget:
            shapes.add((min(prompts, rows), length))
            prompts *= _STEP
    return tuple(sorted(shapes))


def cut(left: Sequence[int], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """How many tokens of each prompt the next call reads.

    The first prompt decides how long the chunks are: the shortest shape that takes all that is left
    of it if that fills more than half, else the longest that it fills. Others join, in order, as
    long as more than half of a shape's places are taken.

    Args:
      left: tokens that are left of each prompt, at least 1, in the order of their turn.
      shapes: of `chunk_shapes`; each T is there with C = 1.

    Returns:
      Tokens of the first prompts, one entry for each that is read.
    """
    if not left:
        return ()
    lengths = sorted({t for _, t in shapes})
    taken = [t for t in lengths if t >= left[0]]
    filled = [t for t in lengths if t <= left[0]]
    length = taken[0] if taken and (not filled or 2 * left[0] > taken[0]) else filled[-1]
    places = max(c for c, t in shapes if t == length and (c == 1 or 2 * len(left) > c))
    return tuple(min(tokens, length) for tokens in left[:places])


def shape_for(chunks: Sequence[int], shapes: Sequence[Shape]) -> Shape:
    """The smallest shape that takes chunks of so many tokens.

    Raises:
      ValueError: there is none.
    """
    fitting = [(c, t) for c, t in shapes if c >= len(chunks) and t >= max(chunks, default=1)]
    if not fitting:
        raise ValueError(
            f"chunks of {list(chunks)} tokens; the engine takes up to C chunks of T tokens, "
            f"(C, T) one of {list(shapes)}"
        )
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape))
