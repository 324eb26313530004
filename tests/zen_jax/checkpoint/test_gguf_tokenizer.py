"""A GGUF file's tokenizer comes out as files that this project's tokenizer reads."""

import json
from pathlib import Path

import pytest

from zen_jax.checkpoint.gguf import open_gguf
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(small, weights, write_gguf, tmp_path: Path):
    """(settings to change) -> the tokenizer of a file with them."""

    def make(**settings) -> Tokenizer:
        changed = {f"tokenizer.{key}".replace("__", "."): v for key, v in settings.items()}
        file = write_gguf(tmp_path / "m.gguf", small, weights(small), settings=changed)
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        for name, data in open_gguf(file).tokenizer_files().items():
            (folder / name).write_bytes(data)
        return Tokenizer.from_folder(folder)

    return make


def test_merges_special_tokens_and_bytes(tokenizer) -> None:
    made = tokenizer()
    h, space = 2 + ord("h"), 2 + 32
    # "the" is one token and " the" another; digits stand alone; what is typed is never special.
    assert made.encode("the the") == [259, 260]
    assert made.encode("th12") == [258, 2 + ord("1"), 2 + ord("2")]
    assert made.encode("h h") == [h, space, h]
    typed = made.encode("<|end|>ä")
    assert 0 not in typed and 1 not in typed
    assert made.decode(typed) == "<|end|>ä"
    assert made.eos_ids == frozenset({0}) and made.bos_id == 1
    assert made.chat([{"role": "user", "content": "h<|im|>"}])[:2] == [1, h]


def test_a_text_begins_as_the_file_says(tokenizer) -> None:
    assert tokenizer(ggml__add_bos_token=True).encode("h") == [1, 2 + ord("h")]
    assert tokenizer(ggml__add_bos_token=False).encode("h") == [2 + ord("h")]


def test_ends_of_an_answer_are_gathered(tokenizer) -> None:
    assert tokenizer(ggml__eot_token_id=1).eos_ids == frozenset({0, 1})


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123", ["a", " 123"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("qwen2", "a 123\n\nb", ["a", " ", "1", "2", "3", "\n\n", "b"]),
        ("llama-bpe", "a 1234\n\nb", ["a", " ", "123", "4", "\n\n", "b"]),
    ],
)
def test_each_kind_cuts_text_its_own_way(tokenizer, tmp_path, pre: str, text: str, pieces) -> None:
    tokenizer(ggml__pre=pre)
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    found = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ggml__model": "llama"}, "a tokenizer of the kind 'llama', 'smollm'"),
        ({"ggml__pre": "tekken"}, "a tokenizer of the kind 'gpt2', 'tekken'"),
        ({"ggml__pre": None}, "a tokenizer of the kind 'gpt2', None"),
        ({"ggml__tokens": None}, "has no list of texts tokenizer.ggml.tokens"),
        ({"ggml__tokens": ["a"] * 300}, "has 300 tokens; its embedding has 272 rows"),
        ({"ggml__tokens": ["a", "a"]}, "has the token 'a' twice"),
        ({"ggml__token_type": [1]}, "token types that do not fit its 261 tokens"),
        ({"ggml__merges": ["a b c"]}, "has the merge 'a b c'"),
        ({"ggml__merges": ["a b"]}, "has the merge 'a b', which its tokens do not allow"),
        ({"ggml__eos_token_id": 261}, "has eos_token_id 261; there are 261 tokens"),
        ({"chat_template": "x" * (2**20 + 1)}, "a chat template that is no text below"),
    ],
)
def test_what_is_not_read_is_refused(tokenizer, settings, problem: str) -> None:
    with pytest.raises(SourceError) as error:
        tokenizer(**settings)
    assert problem in str(error.value)


def test_the_files_are_those_of_a_folder(small, weights, write_gguf, tmp_path) -> None:
    files = open_gguf(write_gguf(tmp_path / "m.gguf", small, weights(small))).tokenizer_files()
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [0]}
    assert json.loads(files["config.json"])["num_hidden_layers"] == 2
    assert json.loads(files["tokenizer_config.json"])["bos_token"] == "<|im|>"
