"""Any order of arrivals and priorities: the first in line runs, and nobody waits for ever."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.events import Arrived, Decode, Emit, Prefill, Sampled
from server.jobs import SchedulerConfig, State
from server.requests import Request
from server.scheduler import initial, plan
from zen_jax.residency import CacheConfig
from zen_jax.sampling import SamplingParams

AGEING_S, HIGHEST = 10.0, 3
# When each arrives after the one before, its priority, and how many tokens it wants.
ARRIVALS = st.lists(
    st.tuples(st.sampled_from((0.0, 1.0, 7.0, 30.0)), st.integers(0, HIGHEST), st.integers(1, 6)),
    min_size=1,
    max_size=25,
)


class Device:
    """Rows that say tokens 0, 1, 2 and so on, one a second, a call late as the real one."""

    def __init__(self, rows: int) -> None:
        config = SchedulerConfig(rows, ((1, 4), (1, 8), (2, 4)), ageing_s=AGEING_S)
        self.state: State = initial(config, CacheConfig(slots=1))
        self.now = 0.0
        self.held: dict[int, int] = {}
        self.under_way: list[Sampled] = []
        self.got: dict[str, list[int]] = {}

    def tick(self, arrivals: list[Arrived]) -> None:
        events, self.under_way = self.under_way, []
        self.state, actions = plan(self.state, [*events, *arrivals], self.now)
        for action in actions:
            match action:
                case Prefill(parts):
                    for part in parts:
                        start = self.held.get(part.ticket, 0) if part.start else 0
                        assert start == part.start, "parts come in their order"
                        self.held[part.ticket] = start + len(part.tokens)
                        if part.last:
                            self.say(part.ticket, part.turn)
                case Decode(rows, steps):
                    for _, ticket, turn in rows:
                        for _ in range(steps):
                            self.say(ticket, turn)
                case Emit(request_id, tokens, _):
                    self.got.setdefault(request_id, []).extend(tokens)
                case _:
                    raise AssertionError(action)

    def say(self, ticket: int, turn: int) -> None:
        prompt = len(self.state.jobs[ticket].request.token_ids)
        self.under_way.append(Sampled(ticket, turn, (self.held[ticket] - prompt,)))
        self.held[ticket] += 1


@given(ARRIVALS, st.integers(1, 3))
def test_whoever_is_first_in_line_runs_and_all_is_said_once(arrivals: Any, rows: int) -> None:
    device, waiting = Device(rows), []
    at = 0.0
    for i, (gap, priority, limit) in enumerate(arrivals):
        at += gap
        sampling = SamplingParams(max_tokens=limit)
        request = Request(f"r{i}", None, (1,) * (1 + i % 11), sampling, 0, priority=priority)
        waiting.append(Arrived(request, frozenset(), limit, at))
    due: dict[str, Arrived] = {arrived.request.id: arrived for arrived in waiting}
    while waiting or device.state.jobs:
        now = [arrived for arrived in waiting if arrived.at <= device.now]
        waiting = [arrived for arrived in waiting if arrived.at > device.now]
        device.tick(now)
        check_order(device.state)
        device.now += 1.0
        assert device.now < 2000, "somebody waits for ever"
    assert device.got == {i: list(range(arrived.limit)) for i, arrived in due.items()}


def check_order(state: State) -> None:
    """Who waits goes behind all that run, or before some of no less priority."""

    def turn(ticket: int) -> tuple[float, int]:
        arrived = state.jobs[ticket].arrived
        return arrived.at - arrived.request.priority * AGEING_S, ticket

    running = [ticket for ticket in state.rows if ticket is not None]
    assert list(state.ready) == sorted(state.ready, key=turn)
    for ticket in state.ready:
        assert len(running) == state.config.rows, "no row is free while somebody waits"
        for other in running:
            mine, theirs = (state.jobs[t].request.priority for t in (ticket, other))
            assert turn(other) < turn(ticket) or theirs >= mine


@given(st.integers(0, HIGHEST), st.integers(1, 20))
def test_a_stream_of_higher_priority_cannot_hold_one_up_for_longer_than_its_worth(
    priority: int, limit: int
) -> None:
    """One row, and a request of the highest priority every second, each of which takes two."""
    device = Device(1)
    sampling = SamplingParams(max_tokens=limit)
    patient = Request("patient", None, (1,), sampling, 0, priority=priority)
    device.tick([Arrived(patient, frozenset(), limit, 0.0)])
    before = 0
    while len(device.got.get("patient", ())) < limit:
        device.now += 1.0
        name = f"r{device.now}"
        other = Request(name, None, (1,), SamplingParams(max_tokens=2), 0, priority=HIGHEST)
        device.tick([Arrived(other, frozenset(), 2, device.now)])
        before = sum(name != "patient" for name in device.got)
        assert device.now < 2000
    # As many as come before their arrivals outweigh the wait, and no more.
    assert before <= (HIGHEST - priority) * AGEING_S + 1
