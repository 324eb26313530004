"""The resident variants' signs and scales of one weight, as every kernel takes them, and the checks
that all public products share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import packed_size

# More than one byte of an activation could tell apart.
MAX_LEVELS = 8


class SignBank(NamedTuple):
    """Signs and scales of M variants; a variant adds sum over levels of scale[m, l] * sign[m, l].

    Attributes:
      bits: uint8[M, levels, O, ceil(I / 8)], packed as `pallas_kernels.packing` defines.
      scale: float32[M, levels, O].
    """

    bits: jax.Array
    scale: jax.Array


class KernelBank(NamedTuple):
    """The same in the order of the Hopper kernels, as `mosaic.to_kernel_order` makes it at load.

    Attributes:
      words: uint32[M, levels, H, W, 256], the signs in blocks of 64 outputs by 128 inputs.
      scale: float32[M, levels, O].
      reconstruct: bool[M], whether W + alpha S may be rounded to bfloat16.
    """

    words: jax.Array
    scale: jax.Array
    reconstruct: jax.Array


def check_arrays(name: str, **given: Any) -> None:
    """What is given are arrays.

    Raises:
      ValueError: one is something else; names it.
    """
    for what, array in given.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ValueError(f"{name}: {what} is a {type(array).__name__}; expected an array")


def on_host(array: Any) -> bool:
    """Whether an array's values can be looked at without waiting for a device."""
    return not isinstance(array, jax.Array)


def check_rows(name: str, x: jax.Array, w: jax.Array) -> None:
    """Rows fit a weight.

    Raises:
      ValueError: x is not float[R, I] or w not float[O, I]; names what it is.
    """
    check_arrays(name, x=x, w=w)
    if w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"{name}: w is {w.dtype}{list(w.shape)}; expected float [O, I]")
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: x is {x.dtype}{list(x.shape)}; expected float [rows, {w.shape[1]}] for w "
            f"{list(w.shape)}"
        )


def check_bank(name: str, w: jax.Array, bank: SignBank) -> None:
    """A bank belongs to a weight.

    Raises:
      ValueError: a dtype or a shape is another; names what it is and what was expected.
    """
    bits, scale = bank
    check_arrays(name, bits=bits, scale=scale)
    m, levels = bits.shape[:2] if bits.ndim == 4 else (0, 0)
    want = (m, levels, w.shape[0], packed_size(w.shape[1]))
    if bits.dtype != jnp.uint8 or bits.shape != want or not 1 <= levels <= MAX_LEVELS or m < 1:
        raise ValueError(
            f"{name}: bits are {bits.dtype}{list(bits.shape)}; expected uint8 [M, levels, "
            f"{want[2]}, {want[3]}] for w {list(w.shape)}, with 1 to {MAX_LEVELS} levels"
        )
    if scale.dtype != jnp.float32 or scale.shape != want[:3]:
        raise ValueError(
            f"{name}: scale is {scale.dtype}{list(scale.shape)}; expected float32 {list(want[:3])}"
        )


def check_slots(name: str, slots: Any, count: int, variants: int) -> jax.Array:
    """Slots as int32[count]; those that lie on the host are looked at.

    Raises:
      ValueError: another shape or dtype, or a slot on the host outside -1..M-1.
    """
    slots = np.asarray(slots) if on_host(slots) else slots
    if slots.shape != (count,) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(
            f"{name}: slots are {slots.dtype}{list(slots.shape)}; expected int32 [{count}]"
        )
    if on_host(slots):
        wrong = slots[(slots < -1) | (slots >= variants)]
        if wrong.size:
            raise ValueError(
                f"{name}: slot {int(wrong[0])} of a bank of {variants}; expected -1 (the base) to "
                f"{variants - 1}"
            )
    return jnp.asarray(slots, jnp.int32)


def check_ends(name: str, ends: Any, rows: int) -> jax.Array:
    """Ends of segments as int32[S]; those that lie on the host are looked at.

    Raises:
      ValueError: another shape or dtype, or ends on the host that fall or lie outside 0..rows.
    """
    ends = np.asarray(ends) if on_host(ends) else ends
    if ends.ndim != 1 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise ValueError(f"{name}: ends are {ends.dtype}{list(ends.shape)}; expected int32 [S]")
    if on_host(ends) and ends.size:
        if ends.min() < 0 or ends.max() > rows or np.any(ends[1:] < ends[:-1]):
            raise ValueError(
                f"{name}: ends are {ends.tolist()}; expected them rising, within 0..{rows}, the "
                "rows of x"
            )
    return jnp.asarray(ends, jnp.int32)
