"""Arrays in host memory that a device on the CPU can take as they are, without a copy."""

import math
from collections.abc import Sequence
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


def concatenate(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """As `numpy.concatenate`, at such an address; all parts have one dtype."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.concatenate(parts, axis, out=empty(tuple(shape), parts[0].dtype))
