"""How tokens stand for text: what a tokenizer's decoder does, told token by token, in bytes.

`tokenizers` decodes whole sequences only. Here each token has bytes of its own, which a stream can
join as they come. Two kinds of decoder are known: byte-level ones, and those of SentencePiece,
which mark spaces and may fall back to tokens such as "<0xE2>" for single bytes.
"""

import dataclasses
import json
import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a tokenizer's tokens stand for text.

    Attributes:
      byte_level: a token's characters each stand for a byte.
      byte_fallback: a token "<0xE2>" is that byte.
      replacements: (from, to) in order, for tokens that are not byte-level.
      spaces: how many spaces are dropped at the start of a text.
      dropped: what is dropped from a text's first token, or "".
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    spaces: int = 0
    dropped: str = ""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "Spelling":
        """Reads a tokenizer's decoder.

        Raises:
          ValueError: it has none, or one of another kind.
        """
        decoder = backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        match state:
            case {"type": "ByteLevel"}:
                return cls(byte_level=True)
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                dropped = "" if scheme == "never" else mark
                return cls(replacements=((mark, " "),), dropped=dropped)
            case {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
                return cls(byte_level=True)
            case {"type": "Sequence", "decoders": list(steps)}:
                return cls._of_steps(steps)
        raise _unknown(state)

    @classmethod
    def _of_steps(cls, steps: list[object]) -> "Spelling":
        """A sequence as SentencePiece models have it; spaces are dropped after fusing only."""
        spelling, fused = cls(), False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    pairs = (*spelling.replacements, (old, new))
                    spelling = dataclasses.replace(spelling, replacements=pairs)
                case {"type": "ByteFallback"}:
                    spelling = dataclasses.replace(spelling, byte_fallback=True)
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": int(n), "stop": 0} if fused:
                    spelling = dataclasses.replace(spelling, spaces=n)
                case _:
                    raise _unknown(step)
        return spelling

    def spell(self, token: str, first: bool = False) -> bytes:
        """A token's bytes.

        Args:
          token: as the vocabulary has it.
          first: it begins a text.
        """
        if self.byte_level:
            if all(c in _BYTE_OF for c in token):
                return bytes(_BYTE_OF[c] for c in token)
            return token.encode()  # an added token with characters of its own
        if first and self.dropped:
            token = token.replace(self.dropped, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def _unknown(step: object) -> ValueError:
    return ValueError(
        f"tokenizer.json decodes by {json.dumps(step)}; known are ByteLevel, Metaspace, and "
        "Replace, ByteFallback, Fuse and Strip in sequence"
    )


def _bytes_of_characters() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: visible Latin-1 ones for
    themselves, the others from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    spare = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in visible} | spare


_BYTE_OF = _bytes_of_characters()
