"""The calls of the last minutes, for operators who look: how many, how fast, how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from server.records import CallRecord

WINDOW_S = 300.0
_MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds that half of the calls, and all but a hundredth, did not pass."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Calls that ended of late.

    Attributes:
        window_s: how far back it reaches, in seconds.
        finished: calls that ended well.
        failed: in any other way.
        prompt_tokens_per_s: of calls that ended.
        answer_tokens_per_s: likewise.
        ttft: from a call's arrival to its first token; None while none ended well.
        tpot: a token after the first; None while no answer had two.
        ttft_by_model: likewise, of each model's own calls.
    """

    window_s: float
    finished: int
    failed: int
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    ttft_by_model: dict[str, Quantiles]


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    model: str
    well: bool
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float | None
    tpot_s: float | None


class Recent:
    """Remembers calls; `observe` is an observer of them, on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes a clock, in seconds, and begins to remember."""
        self._clock, self._since = clock, clock()
        self._calls: deque[_Ended] = deque(maxlen=_MOST_CALLS)

    @property
    def uptime_s(self) -> float:
        """Since it was made, in seconds."""
        return self._clock() - self._since

    def observe(self, record: CallRecord) -> None:
        """Remembers a call that is over."""
        firsts = [finish.timings.first_token_s for finish in record.finishes]
        ttft_s = record.queued_s + min(firsts) if firsts else None
        ended = _Ended(
            self._clock(),
            record.model,
            record.code == "OK",
            record.prompt_tokens,
            record.answer_tokens,
            ttft_s,
            _tpot_s(record),
        )
        self._calls.append(ended)

    def summary(self) -> Summary:
        """What is remembered of the window."""
        now = self._clock()
        window_s = min(WINDOW_S, now - self._since)
        calls = [call for call in self._calls if call.at > now - WINDOW_S]
        if calls and len(self._calls) == _MOST_CALLS:  # older ones are forgotten
            window_s = min(window_s, now - self._calls[0].at)
        seconds = max(window_s, 1e-9)
        by_model: dict[str, list[float]] = {}
        for call in calls:
            if call.ttft_s is not None:
                by_model.setdefault(call.model, []).append(call.ttft_s)
        return Summary(
            window_s,
            sum(call.well for call in calls),
            sum(not call.well for call in calls),
            sum(call.prompt_tokens for call in calls) / seconds,
            sum(call.answer_tokens for call in calls) / seconds,
            _quantiles(call.ttft_s for call in calls),
            _quantiles(call.tpot_s for call in calls),
            {name: Quantiles(*_ranks(sorted(times))) for name, times in by_model.items()},
        )


def _tpot_s(record: CallRecord) -> float | None:
    """Of a single answer: the time after its first message, by the tokens that came in it."""
    if record.samples != 1 or len(record.pieces) < 2:
        return None
    (first_at, first_tokens), (last_at, _) = record.pieces[0], record.pieces[-1]
    later = record.answer_tokens - first_tokens
    return (last_at - first_at) / later if later > 0 else None


def _quantiles(times: Iterable[float | None]) -> Quantiles | None:
    known = sorted(time for time in times if time is not None)
    return Quantiles(*_ranks(known)) if known else None


def _ranks(times: Sequence[float]) -> tuple[float, float]:
    """By nearest rank: the least time that so large a share did not pass."""
    p50, p99 = (times[ceil(share * len(times)) - 1] for share in (0.5, 0.99))
    return p50, p99
