"""Arrays in host memory that a device on the CPU can take as they are, without a copy."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

# What XLA asks of a buffer that it takes over.
_ALIGNED = 64


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array as `numpy.empty` gives it, at an address that is a multiple of 64."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size].view(dtype).reshape(shape)


def adjacent(groups: Sequence[Sequence[tuple[tuple[int, ...], Any]]]) -> list[list[np.ndarray]]:
    """Arrays in one piece of memory, which the system gives in large pages.

    Args:
      groups: shapes and dtypes; those of a group lie one right after the other, the first of each
        at such an address.
    """
    sizes = [[math.prod(shape) * np.dtype(t).itemsize for shape, t in group] for group in groups]
    room = (-(-sum(size) // _ALIGNED) * _ALIGNED for size in sizes)
    starts = list(accumulate(room, initial=0))
    whole = empty((starts[-1],), np.uint8)
    arrays: list[list[np.ndarray]] = []
    for start, group, size in zip(starts, groups, sizes, strict=False):
        ends = list(accumulate(size, initial=start))
        spans = zip(ends, ends[1:], group, strict=False)
        arrays.append([whole[a:b].view(dtype).reshape(shape) for a, b, (shape, dtype) in spans])
    return arrays


def concatenate(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """As `numpy.concatenate`, at such an address; all parts have one dtype. Those that lie one
    after the other as they should are not copied."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    room = parts[0].base
    if math.prod(shape[:axis]) == 1 and room is not None and _adjacent(parts):
        start = parts[0].ctypes.data - room.ctypes.data
        size = sum(part.nbytes for part in parts)
        flat = room.reshape(-1).view(np.uint8)[start : start + size]
        return flat.view(parts[0].dtype).reshape(shape)
    return np.concatenate(parts, axis, out=empty(tuple(shape), parts[0].dtype))


def _adjacent(parts: Sequence[np.ndarray]) -> bool:
    """Whether parts lie in one array, one after the other."""
    room, at = parts[0].base, parts[0].ctypes.data
    if not isinstance(room, np.ndarray):
        return False
    for part in parts:
        if part.base is not room or part.ctypes.data != at or not part.flags.c_contiguous:
            return False
        at += part.nbytes
    return at <= room.ctypes.data + room.nbytes
