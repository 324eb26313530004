"""How fast the worker goes: its decode steps, its queue, and how much of the time is the host's."""

from __future__ import annotations

from math import inf

# Weight of the newest measurement in a running mean.
_NEWEST = 0.2

_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 30.0


class Pace:
    """Running means, in seconds of the worker's clock.

    Attributes:
        step_s: of a decode step, from when the device could begin it until its tokens were read;
            without end until the first.
    """

    def __init__(self) -> None:
        self.step_s = inf
        self._read_at = 0.0
        self._host_s = self._device_s = 0.0

    def read(self, steps: int, launched_at: float, now: float) -> None:
        """The tokens of a call of so many decode steps, 0 for prompts, were read just now."""
        if steps:
            step_s = (now - max(launched_at, self._read_at)) / steps
            newest = _NEWEST if self.step_s < inf else 1.0
            self.step_s = step_s if newest == 1.0 else self.step_s + newest * (step_s - self.step_s)
        self._read_at = now

    def ticked(self, host_s: float, device_s: float) -> None:
        """A round took the worker's thread so long, and it then waited so long for the device."""
        self._host_s += _NEWEST * (host_s - self._host_s)
        self._device_s += _NEWEST * (device_s - self._device_s)

    @property
    def host_share(self) -> float:
        """The share of a round that the worker's thread spends on anything but waiting for the
        device: what it plans, launches and tells, most of it while the device computes."""
        whole = self._host_s + self._device_s
        return self._host_s / whole if whole > 0 else 0.0


class QueuePace:
    """How fast requests leave the queue for rows, as a running mean in seconds a request."""

    def __init__(self, now: float) -> None:
        self._interval_s = 0.0
        self._left_at = now

    def moved(self, left: int, before: int, now: float) -> None:
        """So many left the queue just now, of which `before` were there."""
        if left and before:
            interval = (now - self._left_at) / left
            self._interval_s += _NEWEST * (interval - self._interval_s)
        if left or not before:
            self._left_at = now

    def retry_after_s(self, waiting: int) -> float:
        """Half the time in which so many that wait will have got their rows."""
        return min(max(self._interval_s * waiting / 2, _LEAST_RETRY_S), _MOST_RETRY_S)
