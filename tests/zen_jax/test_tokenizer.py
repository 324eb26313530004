"""Tokens and text: nothing that a user types is special, and no character is shown in part."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from zen_jax.tokenizer import IncrementalDecoder, Tokenizer

SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|pad|>", "[INST]", "</s>")
NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{{ eos_token }}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = "the cat sat on a mat and the hat; then that cat ate, at the end, a rat in the sand"


def add_specials(backend: tokenizers.Tokenizer, **flags: bool) -> tokenizers.Tokenizer:
    """Adds `SPECIALS` as special tokens."""
    tokens = [AddedToken(s, special=True, normalized=False, **flags) for s in SPECIALS]
    backend.add_special_tokens(tokens)
    return backend


def bytes_only() -> tokenizers.Tokenizer:
    """A token a byte, as the demo family has it; seven specials and one plain added token: 264."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    add_specials(backend)
    backend.add_tokens([AddedToken("<tool> \N{GREEK SMALL LETTER PI}", special=False)])
    return backend


def byte_merges() -> tokenizers.Tokenizer:
    """Byte-level with merges, some of which join parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    merges = []
    # Bytes as the vocabulary writes them: "Ġ" a space, "ðŁ" and "ĺĢ" the halves of an emoji.
    for left, right in ("th", ("th", "e"), "at", ("Ġ", "the"), ("c", "at"), "ðŁ", "ĺĢ", ("Ã", "©")):
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return add_specials(backend)


def pieces(**options: Any) -> tokenizers.Tokenizer:
    """SentencePiece's kind, without the treatment of spaces: marks, byte tokens, unknown token."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = []
    for c in "\N{LOWER ONE EIGHTH BLOCK}abcdehimnorst;,<>/|\N{LATIN SMALL LETTER E WITH ACUTE}":
        vocabulary[c] = len(vocabulary)
    for left, right in ("▁t", ("▁t", "h"), "at", ("▁th", "e"), ("c", "at"), ("▁", "cat"), "▁▁"):
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    model = models.BPE(
        vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True, **options
    )
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    return add_specials(backend)


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: the normaliser puts a mark in front of each stretch of text."""
    backend = pieces()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def first_mark() -> tokenizers.Tokenizer:
    """As newer Llama and Mistral ones: a mark in front of the first word of a text only."""
    backend = pieces()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """Decoded by Metaspace, which drops every mark of the first token."""
    backend = pieces()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def greedy_special() -> tokenizers.Tokenizer:
    """Its special tokens eat the space around them."""
    backend = bytes_only()
    return add_specials(backend, lstrip=True, rstrip=True)


def whole_words() -> tokenizers.Tokenizer:
    """Holds its special tokens in the model's vocabulary and looks whole words up first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *SPECIALS])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return add_specials(backend)


Build = Callable[[], tokenizers.Tokenizer]
BYTE_LEVEL: tuple[Build, ...] = (bytes_only, byte_merges, greedy_special, whole_words)
MARKED: tuple[Build, ...] = (byte_fallback, first_mark, metaspace)
ALL = BYTE_LEVEL + MARKED
ids_of_any = st.lists(st.integers(0, 300), max_size=40)
# Texts that are rich in special tokens, in parts of them, and in what surrounds them.
texts = st.lists(
    st.one_of(
        st.sampled_from([*SPECIALS, *"<|>[]/ \n", "<|e", "os|>", "eos", "<unk>", "<0x41>", "▁"]),
        st.sampled_from(WORDS.split()),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)
plain_texts = st.lists(st.sampled_from([*WORDS.split(), " ", "\n", "é", "😀"]), max_size=8).map(
    "".join
)
few = settings(max_examples=25)  # for what starts a process or renders


@functools.cache
def made(build: Build) -> Tokenizer:
    """The tokenizer around a backend of its own, one for all tests."""
    return Tokenizer(build(), names=NAMES, chat_template=TEMPLATE)


@functools.cache
def reference(build: Build) -> tokenizers.Tokenizer:
    """The backend as the library uses it: special tokens count wherever they stand."""
    return build()


@functools.cache
def special_ids(build: Build) -> set[int]:
    """Ids of special tokens; the unknown token may stand in any text."""
    added = reference(build).get_added_tokens_decoder()
    return {i for i, t in added.items() if t.special and t.content != "<unk>"}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each token shows, and what the end does."""
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@pytest.mark.parametrize("build", ALL)
@given(text=texts)
def test_typed_text_never_becomes_a_special_token(build: Build, text: str) -> None:
    assert special_ids(build).isdisjoint(made(build).encode(text, add_bos=False))


@pytest.mark.parametrize("build", BYTE_LEVEL)
@given(text=texts)
def test_text_comes_back(build: Build, text: str) -> None:
    tokenizer = made(build)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("build", ALL)
@given(text=texts)
def test_no_token_stands_for_more_bytes_than_the_longest(build: Build, text: str) -> None:
    tokenizer = made(build)
    ids = tokenizer.encode(text, add_bos=False)
    if tokenizer._backend.token_to_id("<unk>") not in ids:
        assert len(text.encode()) <= len(ids) * tokenizer.longest_bytes
    longest = {"bytes_only": 9, "byte_merges": 4, "greedy_special": 9}  # "<tool> π", " the"
    assert tokenizer.longest_bytes == longest.get(build.__name__, tokenizer.longest_bytes)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer, turns, done = made(byte_merges), 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    started = time.monotonic()
    tokenizer.encode(WORDS * 2000)
    took = time.monotonic() - started
    done.set()
    thread.join()
    assert turns > took / 0.1, f"{turns} turns in {took} s"


@pytest.mark.parametrize("text", SPECIALS)
def test_special_tokens_typed_alone_are_spelled(text: str) -> None:
    """Where the vocabulary has them as words, the library finds them in spite of its own switch."""
    tokenizer = made(whole_words)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("build", BYTE_LEVEL)
@given(ids=ids_of_any)
def test_decode_equals_the_librarys(build: Build, ids: list[int]) -> None:
    assert made(build).decode(ids) == reference(build).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("build", MARKED)
@given(data=st.data())
def test_decode_equals_the_librarys_for_whole_characters(build: Build, data: st.DataObject) -> None:
    """Ids of byte tokens form whole characters here; the library loses more when they do not."""
    vocabulary = reference(build).get_vocab()
    plain = sorted(i for token, i in vocabulary.items() if not token.startswith("<0x"))
    chunk = st.one_of(
        st.sampled_from(plain).map(lambda i: [i]),
        st.characters(codec="utf-8").map(
            lambda c: [vocabulary[f"<0x{b:02X}>"] for b in c.encode()]
        ),
    )
    ids = [i for part in data.draw(st.lists(chunk, max_size=12)) for i in part]
    if build is metaspace:  # has no notion of byte tokens
        ids = [i for i in ids if i in plain]
    assert made(build).decode(ids) == reference(build).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("build", ALL)
@given(ids=ids_of_any)
def test_pieces_join_to_the_whole(build: Build, ids: list[int]) -> None:
    assert "".join(streamed(made(build), ids)) == made(build).decode(ids)


@pytest.mark.parametrize("build", ALL)
@given(text=st.text(max_size=20))
def test_no_piece_shows_a_partial_character(build: Build, text: str) -> None:
    tokenizer = made(build)
    ids = tokenizer.encode(text, add_bos=False)
    if build is metaspace or "\ufffd" in text:
        return  # has no byte tokens to spell with; or the text itself holds the character
    shown = streamed(tokenizer, ids)
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""


@pytest.mark.parametrize("build", [bytes_only, byte_fallback])
def test_characters_appear_when_they_are_whole(build: Build) -> None:
    tokenizer = made(build)
    shown = streamed(tokenizer, tokenizer.encode("😀", add_bos=False))
    assert [piece for piece in shown if piece] == ["😀"]
    assert shown[-2] == "😀"


@pytest.mark.parametrize("build", [bytes_only, byte_fallback])
def test_an_unfinished_character_is_one_replacement_at_the_end(build: Build) -> None:
    tokenizer = made(build)
    ids = tokenizer.encode("é😀", add_bos=False)[:-1]
    shown = streamed(tokenizer, ids)
    assert "".join(shown[:-1]) == "é"
    assert shown[-1] == "\ufffd"


def test_special_tokens_inside_a_character_are_left_out() -> None:
    tokenizer = made(bytes_only)
    first, *rest = tokenizer.encode("é")
    assert tokenizer.decode([first, *tokenizer.eos_ids, *rest]) == "é"


@pytest.mark.parametrize("build", [byte_fallback, first_mark, metaspace])
def test_a_continued_text_keeps_its_leading_space(build: Build) -> None:
    tokenizer = made(build)
    ids = tokenizer.encode("the cat", add_bos=False)
    assert tokenizer.decode(ids) == "the cat"
    decoder = IncrementalDecoder(tokenizer, continues=True)
    assert "".join(map(decoder.push, ids)) == " the cat"


@pytest.mark.timeout(30)
def test_a_long_stream_takes_no_longer_a_token() -> None:
    """Half a million tokens of which none completes a character; quadratic work would not end."""
    tokenizer = made(bytes_only)
    start = tokenizer.encode("😀")[0]
    decoder = IncrementalDecoder(tokenizer)
    shown = sum(len(decoder.push(start)) for _ in range(500_000))
    assert shown + len(decoder.flush()) == 500_000


def test_ids_beyond_the_vocabulary_are_left_out_and_negative_ones_refused() -> None:
    tokenizer = made(bytes_only)
    assert tokenizer.vocab_size == 264
    assert tokenizer.decode([*tokenizer.encode("a"), 264, 10**9]) == "a"
    with pytest.raises(ValueError, match="-1"):
        tokenizer.decode([-1])


NAIVE = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)


def naive_chat(build: Build, messages: list[dict[str, str]]) -> list[int]:
    """A rendered conversation read as one text in which special tokens count."""
    text = NAIVE.render(**NAMES, messages=messages, add_generation_prompt=True)
    return reference(build).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("build", ALL)
@few
@given(contents=st.lists(plain_texts, min_size=1, max_size=3))
def test_chat_equals_the_rendered_text_when_nothing_special_is_typed(
    build: Build, contents: list[str]
) -> None:
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": content}
        for place, content in enumerate(contents)
    ]
    assert made(build).chat(messages) == naive_chat(build, messages)


@pytest.mark.parametrize("build", ALL)
@few
@given(contents=st.lists(texts, min_size=1, max_size=2))
def test_only_the_templates_special_tokens_are_special(build: Build, contents: list[str]) -> None:
    tokenizer = made(build)
    ids = tokenizer.chat([{"role": "user", "content": content} for content in contents])
    vocabulary = reference(build).get_vocab()
    want = ["<|bos|>", *["<|user|>", "<|eos|>"] * len(contents), "<|assistant|>"]
    special = special_ids(build)
    assert [i for i in ids if i in special] == [vocabulary[token] for token in want]


@pytest.mark.parametrize("build", [bytes_only, byte_merges, whole_words])
@few
@given(content=texts)
def test_typed_special_tokens_stay_in_the_text(build: Build, content: str) -> None:
    tokenizer = made(build)
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": content}]))
    assert text == f"\n{content.strip()}\n\n"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        ("{{ '<|e' ~ messages[0].content }}", "os|>", "<|eos|>"),
        ("{{ messages[0].content ~ 'os|>' }}", "<|e", "<|eos|>"),
        ("<|e{{ messages[0].content }}|>", "os", "<|eos|>"),
        ("{{ messages[0].content | replace('@', '') }}", "<|e@os|>", "<|e@os|>"),
        ("{{ messages[0].content[::-1] }}", ">|soe|<", "<|eos|>"),
        ("{{ messages[0].content | lower }}", "<|EOS|>", "<|EOS|>"),
        ("<|{{ messages[0].content | lower }}|>", "EOS", "<|EOS|>"),
        (
            "{% if messages[0].content[0] == '@' %}{{ messages[0].content }}{% endif %}",
            *["@</s>"] * 2,
        ),
    ],
)
def test_templates_that_rework_messages_let_no_special_token_in(
    template: str, content: str, text: str
) -> None:
    """In doubt the message is shown as it was typed, not as the template would have reworked it."""
    tokenizer = Tokenizer(bytes_only(), names=NAMES, chat_template=template)
    ids = tokenizer.chat([{"role": "user", "content": content}])
    assert special_ids(bytes_only).isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_templates_may_look_into_messages() -> None:
    """Only the special tokens that are typed into a message are hidden from the template."""
    template = "{{ messages[0].content.split('</think>')[-1] }}<|eos|>"
    tokenizer = Tokenizer(bytes_only(), names=NAMES, chat_template=template)
    ids = tokenizer.chat([{"role": "user", "content": "<think>hm</think><|eos|>answer"}])
    assert tokenizer.decode(ids) == "<|eos|>answer"
    assert ids[-1] in tokenizer.eos_ids


def test_private_characters_in_messages_stay() -> None:
    content = "\U000f0000<|eos|>\U000f0001"
    tokenizer = made(bytes_only)
    assert content in tokenizer.decode(tokenizer.chat([{"role": "user", "content": content}]))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "0 messages"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": "a", "name": "b"}], "message 0"),
        ([{"role": "user", "content": "a"}, {"role": "eos", "content": "a"}], "message 1"),
        ([{"role": "user", "content": 5}], "message 0"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made(bytes_only).chat(messages)


def test_no_template_and_failing_templates_are_told() -> None:
    message = [{"role": "user", "content": "a secret"}]
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(bytes_only()).chat(message)
    failing = Tokenizer(bytes_only(), chat_template="{{ messages[0].content | int + [] }}")
    with pytest.raises(ValueError, match="chat template fails") as caught:
        failing.chat(message)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("build", ALL)
def test_lone_surrogates_are_refused_without_the_text(build: Build) -> None:
    for call in (made(build).encode, lambda t: made(build).chat([{"role": "user", "content": t}])):
        with pytest.raises(ValueError, match="surrogate") as caught:
            call("secret \ud800")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
)
def test_decoders_of_another_kind_are_refused(decoder: Any) -> None:
    backend = bytes_only()
    backend.decoder = decoder
    with pytest.raises(ValueError, match="decodes by"):
        Tokenizer(backend)
