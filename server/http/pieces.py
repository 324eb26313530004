"""A call's answers as they come: pieces of text with their tokens, and what they add up to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zen.v1 import generate_pb2 as pb
from zen_jax.tokenizer import IncrementalDecoder, Tokenizer

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
# What OpenAI gives for a token that cannot come; JSON has no infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token with its log-probability.

    Attributes:
        text: its own; what is no text by itself is written as "bytes:\\xe2\\x82".
        bytes: in UTF-8, or None for a special token.
        logprob: natural logarithm, or None for a prompt's first token.
    """

    text: str
    bytes: list[int] | None
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A token of a text, and the likeliest ones in its place.

    Attributes:
        token: the token.
        top: the likeliest, as many as were asked for.
        offset: characters of the text in front of it.
    """

    token: Spelled
    top: Sequence[Spelled]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer at a time.

    Attributes:
        index: which answer.
        first: whether nothing came of it before.
        text: more of it.
        entries: one for each token, where asked for.
        finish: why it ended, in the last piece.
    """

    index: int
    first: bool
    text: str
    entries: Sequence[Entry]
    finish: str | None


class Spelling:
    """Tokens as text by themselves, each worked out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def spell(self, token_id: int, logprob: float | None) -> Spelled:
        """A token with its log-probability."""
        if logprob is not None and not logprob >= _LEAST_LOGPROB:
            logprob = _LEAST_LOGPROB
        if token_id not in self._known:
            self._known[token_id] = self._spell(token_id)
        return Spelled(*self._known[token_id], logprob)

    def _spell(self, token_id: int) -> tuple[str, list[int] | None]:
        spelled = self.tokenizer.token_bytes(token_id)
        if spelled is None:
            return self.tokenizer.name_of(token_id), None
        try:
            return spelled.decode(), list(spelled)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), list(spelled)


class Track:
    """One answer's tokens, and where in its text each stands."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = IncrementalDecoder(spelling.tokenizer, continues=True)
        self._offset = 0

    def prompt(self, given: Sequence[pb.TokenLogprobs], text: str) -> list[Entry]:
        """The tokens of a prompt of that text, which stands in front of the answer."""
        answer, self._decoder = self._decoder, IncrementalDecoder(self._spelling.tokenizer)
        entries = self.answer(given)
        self._decoder, self._offset = answer, len(text)
        return entries

    def answer(self, given: Sequence[pb.TokenLogprobs]) -> list[Entry]:
        """The next tokens of the answer."""
        spell = self._spelling.spell
        entries: list[Entry] = []
        for one in given:
            own = spell(one.token_id, one.logprob if one.HasField("logprob") else None)
            top = map(spell, one.top_ids, one.top_logprobs)
            entries.append(Entry(own, tuple(top), self._offset))
            self._offset += len(self._decoder.push(one.token_id))
        return entries


class Counts:
    """The tokens of all answers to one prompt."""

    def __init__(self) -> None:
        self.prompt = self.completion = 0
        self.cached: int | None = None

    def add(self, usage: pb.Usage) -> None:
        """Takes a sample's; the prompt, which all have, counts once, as it was read first."""
        self.prompt = usage.prompt_tokens
        self.completion += usage.completion_tokens
        cached = usage.cached_tokens
        self.cached = cached if self.cached is None else min(self.cached, cached)


def usage_of(counts: Sequence[Counts]) -> dict[str, Any]:
    """What OpenAI's clients read of the counts of all prompts."""
    prompt = sum(c.prompt for c in counts)
    completion = sum(c.completion for c in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached or 0 for c in counts)},
    }


def told(message: pb.GenerateResponse) -> Sequence[pb.TokenLogprobs]:
    """The tokens of a piece that are of its text: one that ended it is not."""
    ended = message.completion.HasField("matched_stop_token_id")
    return message.logprobs[:-1] if ended else message.logprobs


def finish_of(message: pb.GenerateResponse) -> str | None:
    """Why a sample ended; None if it has not."""
    if not message.HasField("completion"):
        return None
    return _FINISH_REASONS[message.completion.finish_reason]
