"""An answer's tokens as text: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from zen_jax.tokenizer import IncrementalDecoder, Tokenizer


class StopFinder:
    """Looks for stop strings in a text that comes in pieces; however it is cut, it finds the same.

    Text that may begin a stop string is held back until it can no longer match. Of several stop
    strings the one that is complete first counts; of those complete at the same character, the
    longest. Nothing that was given out has to be taken back.

    Attributes:
      matched: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes the stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, heed: bool = True) -> str:
        """The text that is certain now; after a match, what was in front of it, then nothing.

        Args:
          text: what comes next.
          heed: whether a stop string that is complete inside it ends the text.
        """
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        known, whole = len(self._held), self._held + text
        found = self._first(whole, known) if heed else None
        if found is not None:
            start, self.matched = found
            self._held = ""
            return whole[:start]
        self._held = self._beginning(whole)
        return whole[: len(whole) - len(self._held)]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, after: int) -> tuple[int, str] | None:
        """The first stop string that ends beyond `after`, and where it starts."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(after - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _beginning(self, text: str) -> str:
        """The longest end of the text that is a stop string's beginning, but not all of it."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return end
        return ""


class AnswerText:
    """One answer's text, token by token.

    All that `push` and `flush` give, joined, is the text of the tokens up to the stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """Begins behind a prompt.

        Args:
          tokenizer: whose tokens come.
          stops: texts in front of which the answer ends.
          min_tokens: no stop string counts that is complete within so many tokens.
        """
        self._decoder = IncrementalDecoder(tokenizer, continues=True)
        self._finder = StopFinder(stops)
        self._free = min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._finder.matched

    def push(self, token_id: int) -> str:
        """The text that is certain now, perhaps none.

        Raises:
          ValueError: the id is negative.
        """
        heed, self._free = self._free <= 0, self._free - 1
        return self._finder.push(self._decoder.push(token_id), heed)

    def flush(self) -> str:
        """What is left at the end: text held back, and U+FFFD for an unfinished character."""
        text = self._finder.push(self._decoder.flush(), heed=False)
        return text + self._finder.flush()
