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
        ({"ggml__model": "bert"}, "a tokenizer of the kind 'bert', 'smollm'"),
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


PIECES = ["▁", "t", "h", "e", "th", "▁t", "▁th", "the", "▁the"]
SPELLED = {
    "ggml__model": "llama",
    "ggml__pre": "default",
    "ggml__tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES],
    "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * 9,
    "ggml__scores": [0.0] * 259 + [-90.0, -91.0, -92.0, -93.0, -1.0, -2.0, -4.0, -3.0, -5.0],
    "ggml__merges": None,
    "ggml__unknown_token_id": 0,
    "ggml__bos_token_id": 1,
    "ggml__eos_token_id": 2,
    "chat_template": "<s>{{ messages[0].content }}",
}


def test_sentence_piece(tokenizer) -> None:
    made = tokenizer(**SPELLED)
    piece = {text: 259 + i for i, text in enumerate(PIECES)}
    assert made.encode("the") == [1, piece["▁the"]]
    assert made.encode("thee h", add_bos=False) == [piece[text] for text in ("▁the", "e", "▁", "h")]
    # What no piece spells is spelled in bytes.
    assert made.encode("tä", add_bos=False) == [piece["▁t"], 3 + 0xC3, 3 + 0xA4]
    for text in ("the  the", " t", "tä\n", "</s>e"):
        ids = made.encode(text)
        assert made.decode(ids) == text and 2 not in ids
    assert made.eos_ids == frozenset({2})
    assert made.chat([{"role": "user", "content": "the</s>"}])[:2] == [1, piece["▁the"]]


@pytest.mark.parametrize(
    ("th", "he", "pieces"), [(-1.0, -2.0, ["▁", "th", "e"]), (-2.0, -1.0, ["▁", "t", "he"])]
)
def test_the_scores_decide_what_is_joined_first(tokenizer, th, he, pieces) -> None:
    tokens = [*SPELLED["ggml__tokens"][:259], "▁", "t", "h", "e", "th", "he"]
    settings = {
        "ggml__tokens": tokens,
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "ggml__scores": [0.0] * 263 + [th, he],
    }
    made = tokenizer(**(SPELLED | settings))
    assert [tokens[i] for i in made.encode("the", add_bos=False)] == pieces


def test_no_space_in_front_where_the_file_says_so(tokenizer) -> None:
    made = tokenizer(**SPELLED, ggml__add_space_prefix=False)
    piece = {text: 259 + i for i, text in enumerate(PIECES)}
    assert made.encode("the", add_bos=False) == [piece["the"]]
    assert made.decode([piece["▁the"], piece["the"]]) == " thethe"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ggml__scores": None}, "lacks tokenizer.ggml.scores"),
        ({"ggml__scores": [0.0]}, "scores or token types that do not fit 268 tokens"),
        ({"ggml__scores": [float("nan")] * 268}, "score that is no finite number"),
        ({"ggml__unknown_token_id": None}, "has no unknown_token_id"),
        (
            {"ggml__tokens": [*SPELLED["ggml__tokens"][:-1], "x" * 257]},
            "a token of 257 characters; at most 256",
        ),
    ],
)
def test_sentence_piece_that_is_damaged(tokenizer, settings, problem: str) -> None:
    with pytest.raises(SourceError) as error:
        tokenizer(**(SPELLED | settings))
    assert problem in str(error.value)


def test_the_files_are_those_of_a_folder(small, weights, write_gguf, tmp_path) -> None:
    files = open_gguf(write_gguf(tmp_path / "m.gguf", small, weights(small))).tokenizer_files()
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [0]}
    assert json.loads(files["config.json"])["num_hidden_layers"] == 2
    assert json.loads(files["tokenizer_config.json"])["bos_token"] == "<|im|>"
