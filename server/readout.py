"""Calls under way on the device, and what is read of them once they are done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.events import Part, Sampled, Ticket
from zen_jax.logprobs import Fetched
from zen_jax.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of a prompt's tokens that come with a call.

    Attributes:
        request_id: whose.
        place: of the prompt in the call.
        start: the position of the first token that the call reads.
        first: the prompt's first token, which nothing predicts.
        targets: the tokens that are judged: from start + 1 on.
        top: how many likeliest tokens are asked for.
    """

    request_id: str
    place: int
    start: int
    first: int
    targets: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A call under way.

    Attributes:
        sampled: on the device, `zen_jax.sampler.Sampled`, [*, places].
        rows: whose the tokens are: place, ticket and turn.
        tops: for each row, how many likeliest tokens go with each of its own; None for no
            log-probabilities.
        steps: decode steps that they come from; 0 after prompts.
        at: when it was launched.
        prompts: of which prompts log-probabilities come with it.
    """

    sampled: Any
    rows: tuple[tuple[int, Ticket, int], ...]
    tops: tuple[int | None, ...]
    steps: int
    at: float
    prompts: tuple[PromptPart, ...] = ()

    def tokens(self) -> Iterator[Sampled]:
        """Waits for the tokens, and yields each row's. Only what was asked for is fetched."""
        tokens = np.atleast_2d(np.asarray(self.sampled.token))
        wanted = any(top is not None for top in self.tops)
        logprobs = Fetched(self.sampled.logprobs, tokens.shape) if wanted else None
        for (place, ticket, turn), top in zip(self.rows, self.tops, strict=True):
            own = tokens[:, place].tolist()
            steps = [step for step, token in enumerate(own) if token >= 0]
            entries = ()
            if logprobs is not None and top is not None:
                entries = tuple(logprobs.of(own[step], (step, place), top) for step in steps)
            yield Sampled(ticket, turn, tuple(own[step] for step in steps), entries)

    def judged(self) -> Iterator[tuple[str, int, list[TokenLogprobs]]]:
        """Waits for log-probabilities of prompts' tokens.

        Yields:
            A request's id, the position of the first of its tokens, and theirs.
        """
        if not self.prompts:
            return
        logprobs = Fetched(self.sampled.prompt, np.shape(self.sampled.prompt.own))
        for part in self.prompts:
            entries = [
                logprobs.of(token, (part.place, i), part.top)
                for i, token in enumerate(part.targets)
            ]
            if part.start == 0:
                yield part.request_id, 0, [TokenLogprobs(part.first, None), *entries]
            else:
                yield part.request_id, part.start + 1, entries


def prompt_part(part: Part, place: int) -> PromptPart | None:
    """What of a prompt's log-probabilities comes with a part of it; None if it is not wanted.

    Each position judges the token after it; that of the last is sampled, not judged.
    """
    request = part.arrived.request
    top = request.sampling.prompt_logprobs
    targets = request.token_ids[part.start + 1 : part.start + len(part.tokens) + 1]
    if top is None or not (targets or part.start == 0):
        return None
    return PromptPart(request.id, place, part.start, request.token_ids[0], targets, top)
