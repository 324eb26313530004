"""One request's answer on its way: tokens go in, what its caller is told comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from server.events import Emit
from server.requests import OnEvent, TokenEvent
from zen_jax.answer_text import AnswerText
from zen_jax.sampling import TokenLogprobs


@dataclass(slots=True)
class AnswerStream:
    """Where a request's events go, and how far its text has come.

    Attributes:
        on_event: None once its callback has failed.
        text: what was made of the tokens so far.
        prompt: log-probabilities of the prompt's tokens, until they are told.
        made: tokens of the answer so far, none behind a stop string.
    """

    on_event: OnEvent | None
    text: AnswerText
    prompt: list[TokenLogprobs] = field(default_factory=list)
    made: int = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come: no token after it is the caller's."""
        return self.text.matched is not None

    def judge(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Takes log-probabilities of a prompt's tokens from position `start` on.

        A row that was taken away reads its prompt again from the start.
        """
        self.prompt[start:] = entries

    def take(self, emit: Emit) -> TokenEvent | None:
        """What to tell of some tokens and of the end; None if that is nothing.

        The finish of a text that came to a stop string says so, whatever the scheduler, which
        knows no text, found meanwhile.
        """
        finish, tokens, text = emit.finish, emit.tokens, ""
        if self.stopped:
            if finish is None:
                return None
            tokens = ()
        by_token = finish is not None and finish.matched_stop is not None
        for i, token in enumerate(tokens):
            if by_token and i == len(tokens) - 1:  # no text
                break
            text += self.text.push(token)
            if self.stopped:
                tokens = tokens[: i + 1]
                break
        self.made += len(tokens)
        if finish is not None and not self.stopped:
            text += self.text.flush()
        elif finish is not None:
            finish = replace(
                finish,
                reason="stop",
                matched_stop=None,
                matched_text=self.text.matched,
                completion_tokens=self.made,
            )
        told, self.prompt = tuple(self.prompt), []
        logprobs = emit.logprobs[: len(tokens)]
        return TokenEvent(emit.request_id, text, tokens, finish, logprobs, told)
