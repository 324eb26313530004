"""Log-probabilities in host memory."""

from typing import Any

import numpy as np

from zen_jax.sampling import TokenLogprobs


class Fetched:
    """Log-probabilities of a call, brought into host memory."""

    def __init__(self, logprobs: Any, shape: tuple[int, int]) -> None:
        """Waits for them.

        Args:
          logprobs: `zen_jax.sampler.Logprobs`, [*].
          shape: what [*] is taken for, the same number of elements.
        """
        self._own = np.asarray(logprobs.own).reshape(shape)
        self._ids = np.asarray(logprobs.top_ids).reshape(*shape, -1)
        self._top = np.asarray(logprobs.top).reshape(*shape, -1)

    def of(self, token: int, at: tuple[int, int], top: int) -> TokenLogprobs:
        """Those of one token, with as many likeliest as are asked for."""
        ids, values = self._ids[at][:top].tolist(), self._top[at][:top].tolist()
        return TokenLogprobs(token, float(self._own[at]), tuple(ids), tuple(values))
