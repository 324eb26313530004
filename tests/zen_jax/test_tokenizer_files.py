"""Reading a tokenizer from a folder: which file says what, and which ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from zen_jax import tokenizer_files as module
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.bytes_tokenizer import BOS, CHAT_TEMPLATE, EOS, VOCAB_SIZE, build_tokenizer

NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder whose tokenizer begins texts by itself."""
    backend = build_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>",
        special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)],
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config", {**NAMES, "chat_template": CHAT_TEMPLATE})
    write(tmp_path, "config", {"eos_token_id": 5})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    """Writes NAME.json."""
    (folder / f"{name}.json").write_text(json.dumps(value))


def test_reads_a_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.bos_id == BOS
    assert tokenizer.eos_ids == {5, EOS}
    text = "longer than four, shorter or longer than sixteen"
    ids = tokenizer.encode(text, add_bos=False)
    assert len(ids) == len(text)
    assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]
    assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == tokenizer.bos_id


def test_tokenizer_json_is_enough(folder: Path) -> None:
    for name in ("tokenizer_config", "config"):
        (folder / f"{name}.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


@pytest.mark.parametrize(("add_bos", "count"), [(True, 1), (False, 0), (None, 0)])
def test_the_configuration_decides_on_bos(folder: Path, add_bos: bool | None, count: int) -> None:
    source = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer", {**source, "post_processor": None})  # begins texts with nothing
    write(folder, "tokenizer_config", {**NAMES, "add_bos_token": add_bos})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a")[:-1] == [tokenizer.bos_id] * count


@pytest.mark.parametrize(
    ("generation", "model", "want"),
    [
        (7, 8, {7}),
        ([7, 9], 8, {7, 9}),
        (None, 8, {8}),
        (None, [8, 9], {8, 9}),
        ([], 8, set()),
        (None, None, set()),
        (10**12, 8, {10**12}),
    ],
)
def test_eos_comes_from_generation_config_first(
    folder: Path, generation: Any, model: Any, want: set[int]
) -> None:
    write(folder, "tokenizer_config", {})
    write(folder, "generation_config", {"eos_token_id": generation})
    write(folder, "config", {"eos_token_id": model})
    assert Tokenizer.from_folder(folder).eos_ids == want


def test_named_tokens_are_special_though_tokenizer_json_calls_them_plain(folder: Path) -> None:
    backend = build_tokenizer()
    backend.add_tokens([AddedToken("<end>", special=False), AddedToken("<stop>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    end, stop = backend.token_to_id("<end>"), backend.token_to_id("<stop>")
    write(folder, "tokenizer_config", {"eos_token": {"content": "<end>", "special": True}})
    write(folder, "generation_config", {"eos_token_id": [stop]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == {end, stop}
    assert {end, stop}.isdisjoint(tokenizer.encode("<end> <stop>"))
    assert tokenizer.decode([end, stop]) == ""


def test_where_the_chat_template_lies(folder: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    write(folder, "tokenizer_config", {"chat_template": named})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.chat(message)) == "yes"
    (folder / "chat_template.jinja").write_text("of its own")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.chat(message)) == "of its own"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokenizer_config", [], "expected an object"),
        ("tokenizer_config", {"eos_token": "<|none|>"}, r"eos_token is '<\|none\|>'"),
        ("tokenizer_config", {"bos_token": 5}, "bos_token is 5"),
        ("tokenizer_config", {"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ("tokenizer_config", {"add_bos_token": True}, "bos_token names no token"),
        ("tokenizer_config", {"chat_template": 5}, "chat_template"),
        ("tokenizer_config", {"chat_template": "x" * 300_000}, "300000 characters"),
        ("generation_config", {"eos_token_id": "2"}, "eos_token_id '2'"),
        ("generation_config", {"eos_token_id": [1, -1]}, "eos_token_id"),
        ("generation_config", {"eos_token_id": True}, "eos_token_id"),
        ("config", {"eos_token_id": 1.5}, "eos_token_id"),
        ("tokenizer", {}, "no tokenizer"),
    ],
)
def test_files_that_make_no_sense_are_named(
    folder: Path, name: str, value: Any, reason: str
) -> None:
    write(folder, name, value)
    with pytest.raises(ValueError, match=reason) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder) in str(caught.value)


def test_missing_damaged_and_huge_files_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json is not UTF-8"):
        Tokenizer.from_folder(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        Tokenizer.from_folder(folder)
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 are read"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(folder)


def test_token_ids_out_of_all_proportion_are_refused(folder: Path) -> None:
    source = json.loads((folder / "tokenizer.json").read_text())
    source["model"]["vocab"]["A"] = 2**31
    write(folder, "tokenizer", source)
    with pytest.raises(ValueError, match=str(2**31)):
        Tokenizer.from_folder(folder)


def test_a_tokenizer_that_fails_at_every_text_is_refused(folder: Path) -> None:
    source = json.loads((folder / "tokenizer.json").read_text())
    source["model"] = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}
    write(folder, "tokenizer", {**source, "added_tokens": [], "post_processor": None})
    for add_bos in (None, False):
        write(folder, "tokenizer_config", {"add_bos_token": add_bos})
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used: WordLevel error"):
            Tokenizer.from_folder(folder)


def test_which_tokens_text_can_become(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).text_size == 256
    write(folder, "tokenizer_config", {})
    source = json.loads((folder / "tokenizer.json").read_text())
    source["added_tokens"][-1]["special"] = False
    write(folder, "tokenizer", source)
    assert Tokenizer.from_folder(folder).text_size == VOCAB_SIZE


def test_a_panic_in_the_library_is_an_error_like_any_other(folder: Path) -> None:
    source = json.loads((folder / "tokenizer.json").read_text())
    source["model"]["vocab"]["th"] = VOCAB_SIZE
    source["model"]["merges"] = [["t", "h"]]
    source["model"]["continuing_subword_prefix"] = "longer than a token"
    write(folder, "tokenizer", source)
    with pytest.raises(ValueError, match="no tokenizer"):
        Tokenizer.from_folder(folder)
