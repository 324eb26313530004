"""The Hopper kernels in the interpreter, with races looked for, beside float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul import mosaic_rows
from pallas_kernels.packing import pack_signs

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def races() -> bool:
    """Whether the kernel interpreted last had a race."""
    return gpu_callbacks.get_races().races_found


class Case:
    """A random weight and bank, with its signs in float64."""

    def __init__(self, outputs: int, size: int, variants: int, levels: int = 1) -> None:
        rng = np.random.default_rng(outputs + size)
        self.w = jnp.asarray(rng.normal(0, 0.02, (outputs, size)), jnp.bfloat16)
        self.signs = rng.choice([-1.0, 1.0], (variants, levels, outputs, size))
        self.scale = rng.uniform(1e-4, 1e-2, (variants, levels, outputs)).astype(np.float32)
        self.words = layout.to_kernel_order(jnp.asarray(pack_signs(self.signs)), size)

    def rows(self, count: int) -> jnp.ndarray:
        """Rows with a mean, as activations have, in bfloat16."""
        rng = np.random.default_rng(count)
        return jnp.asarray(rng.normal(0.5, 1, (count, self.w.shape[1])), jnp.bfloat16)

    def term(self, x: jnp.ndarray, slots: np.ndarray) -> np.ndarray:
        """alpha (x S^T) of each row's variant."""
        valid = (slots >= 0) & (slots < len(self.signs))
        whole = (self.scale[..., None] * self.signs).sum(1)[np.where(valid, slots, 0)]
        wide = np.asarray(x, np.float64)
        return np.where(valid[:, None], np.einsum("ti,toi->to", wide, whole), 0)

    def base(self, x: jnp.ndarray) -> np.ndarray:
        """x W^T."""
        return np.asarray(x, np.float64) @ np.asarray(self.w, np.float64).T


# Rows, O, I, variants, levels; slots come in any order, -1 and one too large among them.
MIXED = [(13, 100, 1000, 3, 2), (40, 128, 500, 5, 1), (3, 130, 200, 2, 1)]


@pytest.mark.parametrize("rows, outputs, size, variants, levels", MIXED)
def test_mixed_rows(rows: int, outputs: int, size: int, variants: int, levels: int) -> None:
    case = Case(outputs, size, variants, levels)
    x = case.rows(rows)
    slots = np.random.default_rng(rows).integers(-1, variants + 1, rows).astype(np.int32)
    tuning = mosaic_rows.RowsTuning(chunk=256, splits=2 if size == 1000 else 1)
    got = mosaic_rows.rows_matmul(
        x, case.w, case.words, case.scale, slots, tuning=tuning, interpret=INTERPRET
    )
    assert not races()
    np.testing.assert_allclose(got, case.base(x) + case.term(x, slots), rtol=1e-5, atol=1e-5)
