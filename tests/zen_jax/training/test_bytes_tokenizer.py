"""The family's tokenizer: a byte is a token, as Hugging Face's library reads it too."""

import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from zen_jax.training import bytes_tokenizer
from zen_jax.training.bytes_tokenizer import BOS, CHAT_TEMPLATE, SPECIALS, decode, encode

TEXTS = ["table\n", "Grüße, naïve façade – 東京 🙂", "", "".join(map(chr, range(256)))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    bytes_tokenizer.write_tokenizer(folder, 1024)
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_is_its_own_token(written: Path, text: str) -> None:
    library = Tokenizer.from_file(str(written / "tokenizer.json"))
    assert library.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert library.encode(text).ids == [BOS, *text.encode()]
    assert encode(text) == list(text.encode())
    assert decode([BOS, *encode(text), bytes_tokenizer.EOS]) == text
    assert library.decode([BOS, *encode(text)], skip_special_tokens=True) == text


def test_special_tokens_have_their_ids(written: Path) -> None:
    library = Tokenizer.from_file(str(written / "tokenizer.json"))
    assert [library.token_to_id(name) for name in SPECIALS] == list(range(256, 264))
    assert library.get_vocab_size() == bytes_tokenizer.VOCAB_SIZE
    config = json.loads((written / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"]["257"]["content"] == config["eos_token"]
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == 257


def test_typed_text_never_makes_a_special_token() -> None:
    assert encode("<|task|>u") == list(b"<|task|>u")


def test_the_chat_template_is_a_line_a_message() -> None:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    said = template.render(bos_token="<|bos|>", messages=[{"role": "user", "content": "table"}])
    assert said == "<|bos|>table\n"
