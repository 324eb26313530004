"""The products that the model calls: one function each, and who computes it.

"reference" is plain XLA and runs everywhere; it is what the arithmetic means. "cpu" is our kernel
for the CPU, "mosaic" those for Hopper, which another backend runs in Pallas' interpreter, slowly.
"auto" takes the CPU's kernel where it was built and is faster, and on a Hopper card the kernels for
it where the bank is in their order; it is decided when a program is traced.

`bitdelta_matmul_mixed` is the form of a decode step and `bitdelta_matmul` and
`bitdelta_matmul_segments` are those of prompts: each sums in one way whatever the number of rows
and whatever their variants, so that a request's numbers do not depend on its company.
"""

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import target
from pallas_kernels.bitdelta_matmul import cpu, reference
from pallas_kernels.bitdelta_matmul.bank import (
    KernelBank,
    SignBank,
    check_arrays,
    check_bank,
    check_ends,
    check_rows,
    check_slots,
    on_host,
)

__all__ = [
    "Implementation",
    "KernelBank",
    "SignBank",
    "base_matmul",
    "bitdelta_embed",
    "bitdelta_matmul",
    "bitdelta_matmul_mixed",
    "bitdelta_matmul_segments",
]

Implementation = Literal["auto", "reference", "cpu", "mosaic"]
# Signs as they are packed, or, for the Hopper kernels, as `mosaic.to_kernel_order` lays them out
# once at load; from the first the second is made in every call.
type Bank = SignBank | KernelBank


def base_matmul(
    x: jax.Array, w: jax.Array, *, prompt: bool, implementation: Implementation = "auto"
) -> jax.Array:
    """x[R, I] W[O, I]^T -> float32[R, O], with the bits that a row of the base (slot -1) has.

    Args:
      x: float.
      w: float.
      prompt: sum as `bitdelta_matmul` does; else as `bitdelta_matmul_mixed`.
      implementation: who computes it.

    Raises:
      ValueError: a shape or dtype is wrong, or the implementation unknown or not to be had.
    """
    check_rows("base_matmul", x, w)
    if implementation == "mosaic":  # the base's product is XLA's own on a card
        return reference.base_matmul(x.astype(w.dtype), w)
    # A float32 prompt over a float32 weight is XLA's: it is faster, and a base to compare with.
    wide = prompt and x.dtype == w.dtype == jnp.float32
    if _on_cpu(implementation, x, w, not wide):
        return cpu.base_matmul(x, w, prompt)
    return reference.base_matmul(x, w)


def bitdelta_matmul(
    x: jax.Array,
    w: jax.Array,
    bank: Bank,
    slot: Any,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Rows that all belong to one variant, as in a prompt: x[T, I] -> float32[T, O].

    Args:
      x: float.
      w: float[O, I].
      bank: signs and scales.
      slot: integer or int32[]; one on the device outside 0..M-1 reads as the base.
      implementation: who computes it.

    Raises:
      ValueError: a shape, a dtype or a slot on the host is wrong, or the implementation unknown or
        not to be had.
    """
    name = "bitdelta_matmul"
    slot = np.asarray(slot) if on_host(slot) else slot
    made, slots = _checked(name, x, w, bank, slot.reshape(-1), 1)
    slot = slots[0]
    if _on_card(implementation, made):
        mosaic, words = _kernels(bank, w)
        return mosaic.bitdelta_matmul(x, w, words, slot, interpret=_interpreter())
    bank = cast(SignBank, bank)
    if _on_cpu(implementation, x, w, True):
        slots = jnp.broadcast_to(slot, x.shape[:1])
        return cpu.bitdelta_matmul(x, w, bank, slots, True)
    return reference.bitdelta_matmul(x, w, bank, slot)


def bitdelta_matmul_mixed(
    x: jax.Array,
    w: jax.Array,
    bank: Bank,
    slots: Any,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Rows of any variants in any order, as in a decode step: x[B, I] -> float32[B, O].

    Args:
      x: float.
      w: float[O, I].
      bank: signs and scales.
      slots: int32[B]; -1 is the base, and so is any other on the device outside 0..M-1.
      implementation: who computes it.

    Raises:
      ValueError: as in `bitdelta_matmul`.
    """
    name = "bitdelta_matmul_mixed"
    check_rows(name, x, w)
    made, slots = _checked(name, x, w, bank, slots, x.shape[0])
    if _on_card(implementation, made):
        mosaic, words = _kernels(bank, w)
        return mosaic.bitdelta_matmul_mixed(x, w, words, slots, interpret=_interpreter())
    bank = cast(SignBank, bank)
    if _on_cpu(implementation, x, w, True):
        return cpu.bitdelta_matmul(x, w, bank, slots, False)
    return reference.bitdelta_matmul_mixed(x, w, bank, slots)


def bitdelta_matmul_segments(
    x: jax.Array,
    w: jax.Array,
    bank: Bank,
    slots: Any,
    ends: Any,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Several prompts' rows, one after the other: x[T, I] -> float32[T, O].

    Args:
      x: float.
      w: float[O, I].
      bank: signs and scales.
      slots: int32[S], a segment's variant, as in `bitdelta_matmul_mixed`.
      ends: int32[S], the row after a segment's last; rising, 0..T. Rows behind the last are the
        base's.
      implementation: who computes it.

    Raises:
      ValueError: as in `bitdelta_matmul`.
    """
    name = "bitdelta_matmul_segments"
    check_rows(name, x, w)
    ends = check_ends(name, ends, x.shape[0])
    made, slots = _checked(name, x, w, bank, slots, ends.shape[0])
    if _on_card(implementation, made):
        mosaic, words = _kernels(bank, w)
        return mosaic.bitdelta_matmul_segments(x, w, words, slots, ends, interpret=_interpreter())
    bank = cast(SignBank, bank)
    if _on_cpu(implementation, x, w, True):
        rows = reference.row_slots(slots, ends, x.shape[0])
        return cpu.bitdelta_matmul(x, w, bank, rows, True)
    return reference.bitdelta_matmul_segments(x, w, bank, slots, ends)


def bitdelta_embed(
    ids: jax.Array,
    w: jax.Array,
    bank: Bank,
    slots: Any,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Tokens' rows of an embedding, each in its own variant: ids[B, T] -> float32[B, T, D].

    Args:
      ids: int32, 0..V-1; on the device one outside is not looked at, and any row may come.
      w: float[V, D].
      bank: signs and scales.
      slots: int32[B], as in `bitdelta_matmul_mixed`.
      implementation: who computes it.

    Raises:
      ValueError: as in `bitdelta_matmul`.
    """
    name = "bitdelta_embed"
    check_arrays(name, ids=ids, w=w)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name}: ids are {ids.dtype}{list(ids.shape)}; expected int32 [B, T]")
    if on_host(ids) and ids.size and not 0 <= ids.min() <= ids.max() < w.shape[0]:
        raise ValueError(
            f"{name}: ids go from {ids.min()} to {ids.max()}; expected 0..{w.shape[0] - 1}, the "
            "rows of w"
        )
    made = _check(name, w, bank)
    slots = check_slots(name, slots, ids.shape[0], bank.scale.shape[0])
    if _on_card(implementation, made):
        mosaic, words = _kernels(bank, w)
        return mosaic.bitdelta_embed(ids, w, words, slots)
    bank = cast(SignBank, bank)
    # Of few tokens only: XLA gathers many rows faster than one thread adds signs to them.
    if _on_cpu(implementation, w, w, ids.shape[1] == 1):
        return cpu.bitdelta_embed(ids.astype(jnp.int32), w, bank, slots)
    return reference.bitdelta_embed(ids, w, bank, slots)


def _checked(
    name: str, x: jax.Array, w: jax.Array, bank: Any, slots: Any, count: int
) -> tuple[bool, jax.Array]:
    """Checks a product's arguments; see `_check`, and the slots as int32[count]."""
    check_rows(name, x, w)
    return _check(name, w, bank), check_slots(name, slots, count, bank.scale.shape[0])


def _check(name: str, w: jax.Array, bank: Any) -> bool:
    """Checks a bank; whether it is in the Hopper kernels' order."""
    if isinstance(bank, SignBank):
        check_bank(name, w, bank)
        return False
    if not hasattr(bank, "scale"):
        raise ValueError(f"{name}: bank is a {type(bank).__name__}; expected a SignBank")
    if bank.scale.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{name}: scale is {list(bank.scale.shape)}; expected [M, levels, {w.shape[0]}] for w "
            f"{list(w.shape)}"
        )
    return True


def _on_card(implementation: str, made: bool) -> bool:
    if made and implementation not in ("auto", "mosaic"):
        raise ValueError(
            f"the bank is in the order of the Hopper kernels; implementation {implementation!r} "
            "takes a SignBank"
        )
    return made or implementation == "mosaic"


def _kernels(bank: Any, w: jax.Array) -> tuple[Any, KernelBank]:
    """The Hopper kernels, and the bank in their order."""
    # Not before they are asked for: Pallas takes a second to import.
    from pallas_kernels.bitdelta_matmul import mosaic

    if isinstance(bank, KernelBank):
        return mosaic, bank
    return mosaic, mosaic.to_kernel_order(bank.bits, bank.scale, w)


def _interpreter() -> Any:
    """Parameters of the interpreter where it is not for a card, else None."""
    if target.platform() == "gpu":
        return None
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()


def _on_cpu(implementation: str, x: jax.Array, w: jax.Array, wanted: bool) -> bool:
    match implementation:
        case "auto":
            return wanted and cpu.takes(x, w) and cpu.available()
        case "reference":
            return False
        case "cpu" if cpu.takes(x, w) and cpu.available():
            return True
        case "cpu":
            raise ValueError(
                f"no CPU kernel for x {x.dtype} and w {w.dtype} here; it takes float32 or bfloat16 "
                "of either, and has to be built: python -m pallas_kernels.cpu_build"
            )
        case _:
            raise ValueError(
                f"implementation is {implementation!r}; expected 'auto', 'reference', 'cpu' or "
                "'mosaic'"
            )
