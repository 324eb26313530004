"""A GGUF file's tokenizer settings as the files of a Hugging Face folder.

Byte-level BPE of the kinds in `_KINDS` is read, and SentencePiece's BPE as Llama 2 and Mistral have
it. Another kind is refused: a tokenizer that is nearly right gives answers that are nearly right.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.config import ModelConfig

_TEMPLATE = "tokenizer.chat_template"
_MAX_TEMPLATE = 2**20
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# SentencePiece's mark of a space, and the longest token whose parts are looked for.
_MARK = "\u2581"
_LONGEST = 256
# What a text is first cut into; the patterns are those of the published tokenizers.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_DIGITS = {"type": "Digits", "individual_digits": True}
# pre-tokenizer -> (step before the bytes or None, normalizer, whole words first, begins with bos)
_KINDS: Mapping[str, tuple[Any, str | None, bool, bool]] = {
    "gpt-2": (None, None, False, False),
    "smollm": (_DIGITS, None, False, False),
    "starcoder": (_DIGITS, None, False, False),
    "refact": (_DIGITS, None, False, False),
    "qwen2": (_QWEN2, "NFC", False, False),
    "llama-bpe": (_LLAMA3, None, True, True),
}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_files(
    where: str, settings: Mapping[str, Any], config: ModelConfig
) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and config.json.

    Args:
      where: the file's name, for errors.
      settings: the file's, by its own keys.
      config: the architecture; bounds the number of tokens.

    Raises:
      SourceError: the tokenizer is of a kind that is not read, or damaged.
    """
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in settings.items()
        if key.startswith("tokenizer.ggml.")
    }
    model, pre = own.get("model"), own.get("pre")
    sentence_piece = model == "llama"
    if not sentence_piece and (model != "gpt2" or not isinstance(pre, str) or pre not in _KINDS):
        raise SourceError(
            where,
            f"has a tokenizer of the kind {model!r:.40}, {pre!r:.40}; read are 'llama', and 'gpt2' "
            f"with {', '.join(_KINDS)}. Convert the model's Hugging Face folder instead",
        )
    tokens = _tokens(where, own, config.vocab_size)
    template = settings.get(_TEMPLATE)
    if not isinstance(template, str | None) or len(template or "") > _MAX_TEMPLATE:
        raise SourceError(where, f"has a chat template that is no text below {_MAX_TEMPLATE} bytes")
    ids = {name: _token_id(where, own, name, tokens) for name in {*_NAMED.values(), *_ENDS}}
    named = {name: tokens[i] for name, key in _NAMED.items() if (i := ids[key]) is not None}
    begins = sentence_piece or _KINDS[own["pre"]][3]
    add_bos = bool(own.get("add_bos_token", begins)) and "bos_token" in named
    described = (_sentence_piece if sentence_piece else _byte_level)(where, own, tokens)
    tokenizer_config = {"add_bos_token": add_bos, **named}
    if template is not None:
        tokenizer_config["chat_template"] = template
    ends = sorted({i for name in _ENDS if (i := ids[name]) is not None})
    return {
        "config.json": _json(config.to_hf()),
        "generation_config.json": _json({"eos_token_id": ends} if ends else {}),
        "tokenizer.json": _json(_tokenizer(described, _added(where, own, tokens))),
        "tokenizer_config.json": _json(tokenizer_config),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def _texts(where: str, own: Mapping[str, Any], key: str) -> list[str]:
    value = own.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SourceError(where, f"has no list of texts tokenizer.ggml.{key}")
    return value


def _tokens(where: str, own: Mapping[str, Any], limit: int) -> list[str]:
    tokens = _texts(where, own, "tokens")
    if not 1 <= len(tokens) <= limit:
        raise SourceError(where, f"has {len(tokens)} tokens; its embedding has {limit} rows")
    if len(set(tokens)) < len(tokens):
        seen = set[str]()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise SourceError(where, f"has the token {twice!r:.60} twice")
    return tokens


def _token_id(where: str, own: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    value = own.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise SourceError(where, f"has {name} {value!r}; there are {len(tokens)} tokens")
    return value


def _tokenizer(described: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    rest = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    bpe = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None}
    bpe |= {"end_of_word_suffix": None, **described["model"]}
    return {**rest, "added_tokens": added, **described, "model": bpe}


def _byte_level(where: str, own: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The parts of tokenizer.json of a tokenizer whose characters stand for bytes."""
    step, normalizer, whole_words, _ = _KINDS[own["pre"]]
    prefix = bool(own.get("add_space_prefix", False))
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    cut: dict[str, Any] = byte_level | {"use_regex": not isinstance(step, str)}
    if isinstance(step, str):
        step = {
            "type": "Split",
            "pattern": {"Regex": step},
            "behavior": "Isolated",
            "invert": False,
        }
    if step is not None:
        cut = {"type": "Sequence", "pretokenizers": [step, cut]}
    return {
        "normalizer": None if normalizer is None else {"type": normalizer},
        "pre_tokenizer": cut,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges(where, own, tokens),
        },
    }


def _sentence_piece(where: str, own: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The parts of tokenizer.json of a tokenizer that marks spaces and falls back to bytes."""
    unknown = _token_id(where, own, "unknown_token_id", tokens)
    if unknown is None:
        raise SourceError(where, "has no unknown_token_id, which SentencePiece's tokenizers have")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    unmark = {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}
    prefix, strip = [], []
    if own.get("add_space_prefix", True):
        prefix = [{"type": "Prepend", "prepend": _MARK}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    bytes_and_all = [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": bytes_and_all},
        "model": {
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges_by_score(where, own, tokens),
        },
    }


def _merges_by_score(where: str, own: Mapping[str, Any], tokens: list[str]) -> list[list[str]]:
    """Every two tokens that join to a third, the third's score deciding which are joined first."""
    scores, kinds = own.get("scores"), own.get("token_type")
    if not isinstance(scores, list) or not isinstance(kinds, list):
        raise SourceError(where, "lacks tokenizer.ggml.scores or tokenizer.ggml.token_type")
    if not len(scores) == len(kinds) == len(tokens):
        raise SourceError(where, f"has scores or token types that do not fit {len(tokens)} tokens")
    if not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise SourceError(where, "has a token's score that is no finite number")
    known = set(tokens)
    found: list[tuple[float, int, list[str]]] = []
    for place, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != _NORMAL:
            continue
        if len(token) > _LONGEST:
            raise SourceError(where, f"has a token of {len(token)} characters; at most {_LONGEST}")
        for at in range(1, len(token)):
            if token[:at] in known and token[at:] in known:
                found.append((-score, place, [token[:at], token[at:]]))
    return [pair for _, _, pair in sorted(found, key=lambda each: each[:2])]


def _merges(where: str, own: Mapping[str, Any], tokens: list[str]) -> list[list[str]]:
    known, merges = set(tokens), []
    for text in _texts(where, own, "merges"):
        pair = text.split(" ")
        if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
            raise SourceError(where, f"has the merge {text!r:.60}, which its tokens do not allow")
        merges.append(pair)
    return merges


def _added(where: str, own: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    kinds = own.get("token_type", [])
    if not isinstance(kinds, list) or (kinds and len(kinds) != len(tokens)):
        raise SourceError(where, f"has token types that do not fit its {len(tokens)} tokens")
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for i, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
