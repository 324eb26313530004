"""The demo family's tokenizer: a byte is a token, and eight special tokens follow.

Token i < 256 is byte i. No typed text ever becomes a special token here: `encode` maps bytes only.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|task|>",
    "<|reserved0|>",
    "<|reserved1|>",
    "<|reserved2|>",
    "<|reserved3|>",
)
BOS, EOS, PAD, TASK = range(256, 260)
VOCAB_SIZE = 256 + len(SPECIALS)
# What a user says is followed by a line's end; the answer comes after it.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of a text as token ids, without special tokens."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """The text of token ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the others for U+0100 onwards in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def build_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges, which puts <|bos|> in front when asked to."""
    characters = byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and
    generation_config.json into a folder that exists."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    added = {
        str(256 + i): {
            "content": s,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, s in enumerate(SPECIALS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **names,
    }
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    for name, value in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
