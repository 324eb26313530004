"""Text to tokens and back, as a checkpoint's tokenizer files say. Files are data, never code.

Text that a user typed never becomes a special token, whatever is in it: "<|eos|>" in a prompt is
seven plain characters. Special tokens come from three places only: the tokenizer's own start of a
text, the literal text of a chat template, and callers that pass ids. Special are the tokens that
tokenizer.json marks so, and those that the configuration names as the begin or the end.

Decoding works on bytes, so that a character spread over several tokens appears when it is whole.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import tokenizers

from zen_jax.chat_template import ChatTemplate
from zen_jax.spelling import Spelling
from zen_jax.tokenizer_files import (
    ENDS_IN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    chat_template,
    end_ids,
    json_of,
    of_library,
    read_files,
    text_of,
    token_names,
)

MAX_TOKENS = 4 * 1024 * 1024
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """A checkpoint's tokenizer, its special tokens and its chat template. Safe to share by threads.

    Attributes:
      eos_ids: tokens that end an answer.
      bos_id: the token that begins a text, if there is one.
      vocab_size: one more than the highest token id.
      text_size: one more than the highest id that a user's text can become.
      spelling: how its tokens stand for text.
    """

    eos_ids: frozenset[int]
    bos_id: int | None
    vocab_size: int
    text_size: int
    spelling: Spelling

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Takes the parts that `from_folder` reads.

        Args:
          backend: the tokenizer proper; becomes this object's own.
          names: "bos_token", "eos_token" and such -> the token's text, as templates call them.
          eos_ids: tokens that end an answer, besides "eos_token".
          add_bos: whether a text begins with "bos_token"; None leaves it to the backend.
          chat_template: Jinja source.

        Raises:
          ValueError: a named token is not in the vocabulary, or the tokenizer is of a kind that
            cannot be decoded here.
        """
        self._names = dict(names or {})
        self._backend = backend
        every = set(backend.get_vocab().values())
        self.vocab_size = 1 + max(every, default=-1)
        if self.vocab_size > MAX_TOKENS:
            raise ValueError(f"a token has the id {self.vocab_size - 1}; expected < {MAX_TOKENS}")
        backend.no_truncation()
        backend.no_padding()
        ids = {name: self._id_of(name) for name in ("bos_token", "eos_token")}
        self.bos_id, eos_id = ids["bos_token"], ids["eos_token"]
        self.eos_ids = eos_ids if eos_id is None else eos_ids | {eos_id}
        self._mark_special({*self.eos_ids, *(i for i in ids.values() if i is not None)})
        backend.encode_special_tokens = True

        added = backend.get_added_tokens_decoder()
        self._special = {token.content: token for token in added.values() if token.special}
        self._special_ids = {token.content: i for i, token in added.items() if token.special}
        self.text_size = 1 + max(every - set(self._special_ids.values()), default=-1)
        # The unknown token stands for text that has no other; that is no harm unless it ends one.
        unknown = {self._names.get("unk_token"), getattr(backend.model, "unk_token", None)}
        harmless = {i for text, i in self._special_ids.items() if text in unknown} - self.eos_ids
        self._never = frozenset(self._special_ids.values()) - harmless
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._find_special = re.compile("|".join(longest_first) or r"(?!)")

        self._later = _without_first_prefix(backend)
        self._start = self._start_ids(add_bos)
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self.spelling = Spelling.of(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads a Hugging Face folder.

        tokenizer.json is needed. tokenizer_config.json names special tokens and holds the chat
        template, unless that lies in chat_template.jinja. An answer ends at the ids that
        generation_config.json gives, or else config.json, and at the named "eos_token".

        Args:
          folder: holds these files; any other is left alone.

        Raises:
          ValueError: a file is missing, too large, damaged, or says what cannot be honoured.
        """
        try:
            return cls.from_files(read_files(folder))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """As `from_folder`, from the contents of the files by their names.

        Raises:
          ValueError: as `from_folder`; the file at fault is named.
        """
        source = text_of(files, TOKENIZER)
        if source is None:
            raise ValueError(f"{TOKENIZER} is missing; save the tokenizer in the fast format")
        backend = of_library(lambda: tokenizers.Tokenizer.from_str(source), "is no tokenizer")
        config = json_of(files, TOKENIZER_CONFIG)
        add_bos = config.get("add_bos_token")
        if not isinstance(add_bos, bool | None):
            raise ValueError(
                f"{TOKENIZER_CONFIG}: add_bos_token is {add_bos!r}; expected true or false"
            )
        ids = (end_ids(files, name) for name in ENDS_IN)
        return cls(
            backend,
            names=token_names(config),
            eos_ids=next((found for found in ids if found is not None), frozenset()),
            add_bos=add_bos,
            chat_template=chat_template(files, config),
        )

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text in which nothing is special.

        Args:
          text: what a user typed.
          add_bos: begin as the tokenizer begins a text. Many have no such token; nothing is put
            in front then.

        Raises:
          ValueError: the text is not valid Unicode.
        """
        return [*(self._start if add_bos else ()), *self._plain(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens.

        Special tokens are left out, as are ids beyond the vocabulary; every maximal part of an
        invalid or unfinished character becomes one U+FFFD.

        Raises:
          ValueError: an id is negative.
        """
        decoder = IncrementalDecoder(self)
        return "".join([decoder.push(i) for i in ids]) + decoder.flush()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        The template's special tokens become special; the same characters inside a message do not.
        Everything else is tokenised as in the rendered text as a whole.

        Args:
          messages: each {"role", "content"}; a role is one of `ROLES`.

        Raises:
          ValueError: there is no template, a message is malformed, or the template fails, refuses
            the messages or passes a limit. The text of no message is repeated.
        """
        template = self._template
        if template is None:
            raise ValueError("this model has no chat template; send a prompt instead of messages")
        _check_messages(messages)
        contents = [message["content"] for message in messages]
        away = self._stand_ins(contents)
        back = {ord(stand_in): chr(c) for c, stand_in in away.items()}

        def rendered(contents: Iterable[str]) -> list[str | int]:
            said = [{**m, "content": c} for m, c in zip(messages, contents, strict=True)]
            pieces = self._split(self._render(template, said))
            return [p if isinstance(p, int) else p.translate(back) for p in pieces]

        # Hidden whole, messages cannot be the source of a special token. Templates may look into
        # them, though, so it is better to hide no more than the special tokens that were typed,
        # as long as that lets no other in.
        hidden = rendered(c.translate(away) for c in contents)
        pieces = rendered(
            self._find_special.sub(lambda match: match.group().translate(away), c) for c in contents
        )
        if _tokens_in(pieces) != _tokens_in(hidden):
            pieces = hidden
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._plain(piece, first=place == 0)
        return ids

    def token_bytes(self, token_id: int, first: bool = False) -> bytes | None:
        """What a token adds to a text's UTF-8, or None for one that is special or unknown.

        Args:
          token_id: any id.
          first: the token begins a text, where some tokenizers drop the mark of a space.

        Raises:
          ValueError: the id is negative.
        """
        if token_id in self._bytes and not first:
            return self._bytes[token_id]
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._special:
            return None
        spelled = self.spelling.spell(token, first)
        if not first:
            self._bytes[token_id] = spelled
        return spelled

    def name_of(self, token_id: int) -> str:
        """What the vocabulary calls a token, special ones too; "" for an unknown id.

        Raises:
          ValueError: the id is negative.
        """
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._backend.id_to_token(token_id) or ""

    @functools.cached_property
    def longest_bytes(self) -> int:
        """The most bytes of a typed text that one token stands for, but for unknown tokens."""
        plain = self._backend.get_vocab().keys() - self._special.keys()
        spelled = [len(self.spelling.spell(token)) for token in plain]
        if not self.spelling.byte_level:  # the mark of a space can be typed as well
            spelled += [len(token.encode()) for token in plain]
        return max(spelled, default=0)

    def _id_of(self, name: str) -> int | None:
        token = self._names.get(name)
        token_id = None if token is None else self._backend.token_to_id(token)
        if token is not None and token_id is None:
            raise ValueError(f"{TOKENIZER_CONFIG}: {name} is {token!r}, which the vocabulary lacks")
        return token_id

    def _mark_special(self, ids: set[int]) -> None:
        """Makes tokens special that the configuration uses so but tokenizer.json leaves plain."""
        added = self._backend.get_added_tokens_decoder()
        for i in ids:
            content = self._backend.id_to_token(i) if i < self.vocab_size else None
            if content is not None and not (i in added and added[i].special):
                token = tokenizers.AddedToken(content, special=True, normalized=False)
                self._backend.add_special_tokens([token])

    def _start_ids(self, add_bos: bool | None) -> tuple[int, ...]:
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos_token is true, but bos_token names no token")
        encoding = of_library(lambda: self._backend.encode("a"), "cannot be used")
        if add_bos is not None:
            return (self.bos_id,) if add_bos and self.bos_id is not None else ()
        return tuple(encoding.ids[: len(list(takewhile(bool, encoding.special_tokens_mask)))])

    def _plain(self, text: str, first: bool = True) -> list[int]:
        """Ids of text without special tokens in it; `first` when nothing is before it."""
        backend = self._backend if first else self._later
        try:
            # Unlike `encode`, it lets other threads run meanwhile.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # the library's answer to lone surrogates
            raise ValueError("the text is not valid Unicode: it has a lone surrogate") from None
        ids = encoding.ids
        if self._never.isdisjoint(ids):
            return ids
        # Some vocabularies hold the special tokens' text as whole words. Taken apart after its
        # first character, it has to be spelled.
        token = next(i for i in ids if i in self._never)
        content = self._backend.id_to_token(token) or ""
        head, rest = content[:1], content[1:]
        if not rest or content not in text:
            raise ValueError(f"the text cannot be told from the special token {content!r}")
        parts = text.split(content)
        closed = [part + head for part in parts[:-1]] + parts[-1:]
        pieces = [closed[0], *(rest + part for part in closed[1:])]
        return [i for at, p in enumerate(pieces) for i in self._plain(p, first and at == 0)]

    def _stand_ins(self, contents: Sequence[str]) -> dict[int, str]:
        """A private character in place of every character of the contents but spaces, as a table
        for `str.translate`."""
        used = set().union(*contents)
        wanted = sorted(ord(c) for c in used if not c.isspace())
        unused = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used)
        table = dict(zip(wanted, unused, strict=False))
        if len(table) < len(wanted):
            raise ValueError(f"the messages have {len(wanted)} different characters; too many")
        return table

    def _render(self, template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
        return template.render(
            {
                **self._names,
                "messages": messages,
                "add_generation_prompt": True,
                "tools": None,
                "documents": None,
            }
        )

    def _split(self, text: str) -> Iterator[str | int]:
        """Text and the special tokens in it, in turn; a token may swallow spaces beside it."""
        at, swallow = 0, False
        for match in self._find_special.finditer(text):
            token = self._special[match.group()]
            before = text[at : match.start()]
            before = before.lstrip() if swallow else before
            yield before.rstrip() if token.lstrip else before
            yield self._special_ids[match.group()]
            at, swallow = match.end(), token.rstrip
        yield text[at:].lstrip() if swallow else text[at:]


class IncrementalDecoder:
    """Turns one answer's tokens into text as they come; all pieces joined are the whole's `decode`.

    A piece never ends inside a character. The work for a token does not grow with their number.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False) -> None:
        """Starts at the beginning of an answer.

        Args:
          tokenizer: whose tokens come.
          continues: the text goes on from a prompt, so a space at its start is kept even where
            the tokenizer drops one at the start of a text.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._spaces = 0 if continues else tokenizer.spelling.spaces

    def push(self, token_id: int) -> str:
        """The text that is certain now, perhaps none.

        Raises:
          ValueError: the id is negative.
        """
        spelled = self._tokenizer.token_bytes(token_id, self._first)
        if spelled is None:
            return ""
        self._first = False
        return self._begin(self._utf8.decode(spelled))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character is unfinished, else nothing."""
        return self._begin(self._utf8.decode(b"", final=True))

    def _begin(self, text: str) -> str:
        """`text` without the spaces that are to be dropped at the start."""
        while self._spaces and text:
            if text[0] != " ":
                self._spaces = 0
            else:
                text, self._spaces = text[1:], self._spaces - 1
        return text


def _without_first_prefix(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for text that follows a special token: one that puts a space before the first
    word of a text only must put none here."""
    state = json.loads(backend.to_str()) if "first" in str(backend.pre_tokenizer) else {}
    pre_tokenizer = state.get("pre_tokenizer") or {}
    steps = [
        step
        for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        if step.get("prepend_scheme") == "first"
    ]
    if not steps:
        return backend
    for step in steps:
        step["prepend_scheme"] = "never"
    later = tokenizers.Tokenizer.from_str(json.dumps(state))
    later.encode_special_tokens = True
    return later


def _tokens_in(pieces: Sequence[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ValueError(f"there are {len(messages)} messages; expected 1 to {MAX_MESSAGES}")
    for place, message in enumerate(messages):
        if set(message) != {"role", "content"}:
            raise ValueError(f"message {place} has to have a role and a content, nothing else")
        if message["role"] not in ROLES:
            raise ValueError(f"message {place} has an unknown role; known are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"message {place} has a content that is no text")
