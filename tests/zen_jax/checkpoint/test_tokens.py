"""Which tokenizers conversion takes, and which it refuses before anything is published."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zen_jax.checkpoint import hf
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.tokenizer import Tokenizer

Change = Callable[[Path], object]
ROWS = 40


def _write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def _ends(name: str, value: Any) -> Change:
    """Sets the end of answers in a JSON file, which may be a new one."""

    def change(folder: Path) -> None:
        file = folder / name
        settings = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(settings | {"eos_token_id": value}))

    return change


def _in_place(make: Callable[[Path], object], name: str = "tokenizer.json") -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _with_tokens(*more: tuple[int, bool], eos: int | None = None) -> Change:
    """Adds tokens by (id, special); one of them is named the end."""

    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        whole = json.loads(file.read_text())
        flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        for token, special in more:
            added = {"id": token, "content": f"<{token}>", "special": special, **flags}
            whole["added_tokens"].append(added)
            whole["model"]["vocab"][f"<{token}>"] = token
        file.write_text(json.dumps(whole))
        if eos is not None:
            _write("tokenizer_config.json", json.dumps({"eos_token": f"<{eos}>"}))(folder)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "empty": (_write("tokenizer.json", ""), "tokenizer.json is no tokenizer: "),
    "junk": (_write("tokenizer.json", "\x00junk\n\n}"), "tokenizer.json is no tokenizer: "),
    "list": (_write("tokenizer.json", "[]"), "tokenizer.json is no tokenizer: "),
    "object": (_write("tokenizer.json", "{}"), "tokenizer.json is no tokenizer: "),
    "number": (_write("tokenizer.json", "7"), "tokenizer.json is no tokenizer: "),
    "null": (_write("tokenizer.json", "null"), "tokenizer.json is no tokenizer: "),
    "no text": (
        lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe"),
        "tokenizer.json is not UTF-8",
    ),
    "no tokens": (
        _write(
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}, '
            '"decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, '
            '"use_regex": false}}',
        ),
        "tokenizer.json has no token for text",
    ),
    "dangling": (
        _in_place(lambda path: path.symlink_to("nothing")),
        "tokenizer.json is a link to nothing; expected a file",
    ),
    "folder": (_in_place(Path.mkdir), "tokenizer.json is a folder or a device; expected a file"),
    "pipe": (_in_place(os.mkfifo), "tokenizer.json is a folder or a device; expected a file"),
    "loop": (
        _in_place(lambda path: path.symlink_to("tokenizer.json")),
        "tokenizer.json is a link to nothing",
    ),
    "template": (
        _in_place(Path.mkdir, "chat_template.jinja"),
        "chat_template.jinja is a folder or a device",
    ),
    "end of text": (_ends("config.json", "x"), "config.json has eos_token_id 'x'; expected an id"),
    "far end": (
        _ends("config.json", 10**12),
        "config.json has eos_token_id 1000000000000; the model's tokens are 0 to 39",
    ),
    "mixed ends": (_ends("config.json", [1, "a"]), "config.json has eos_token_id [1, 'a']"),
    "no end": (_ends("config.json", {}), "config.json has eos_token_id {}; expected an id"),
    "generation": (
        _ends("generation_config.json", [2, ROWS]),
        "generation_config.json has eos_token_id 40; the model's tokens are 0 to 39",
    ),
    "unknown end": (
        _write("tokenizer_config.json", '{"eos_token": "<|none|>"}'),
        "tokenizer_config.json: eos_token is '<|none|>', which the vocabulary lacks",
    ),
    "named end": (
        _with_tokens((ROWS, True), eos=ROWS),
        "tokenizer_config.json has an eos_token with the id 40; the model's tokens are 0 to 39",
    ),
    "too many": (
        _with_tokens((ROWS, False)),
        "tokenizer.json turns text into tokens up to 40; the model's are 0 to 39",
    ),
}


@pytest.mark.parametrize("change,problem", REFUSED.values(), ids=REFUSED)
def test_what_no_request_could_use_is_refused(
    family, store: Store, tmp_path: Path, change: Change, problem: str
) -> None:
    source = family.write(tmp_path / "source", family.tuned)
    change(source)
    before = sorted(store.path.rglob("*"))
    for convert in (
        lambda: convert_base(source, tmp_path / "new"),
        lambda: convert_variant(source, store.path, "v"),
    ):
        with pytest.raises(SourceError) as error:
            convert()
        assert str(error.value).startswith("source: ") and problem in str(error.value)
        assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)
    assert not (tmp_path / "new").exists()
    assert sorted(store.path.rglob("*")) == before


def test_a_file_that_may_not_be_read_is_named(
    sources, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(hf, "_tokenizer_file", refuse)
    with pytest.raises(SourceError) as error:
        convert_variant(sources[1], store.path, "v")
    assert str(error.value) == "tuned: config.json cannot be read (Permission denied)"


def test_a_link_to_a_file_is_followed(family, store: Store, tmp_path: Path) -> None:
    source = family.write(tmp_path / "source", family.tuned)
    whole = (source / "tokenizer.json").rename(tmp_path / "blob")
    (source / "tokenizer.json").symlink_to(whole)
    convert_variant(source, store.path, "v")
    assert store.tokenizer_files(store.variant("v"))["tokenizer.json"] == whole.read_bytes()


def test_special_tokens_without_a_row_are_warned_of(family, store: Store, tmp_path: Path) -> None:
    source = family.write(tmp_path / "source", family.tuned)
    _with_tokens((ROWS - 1, False), (ROWS, True))(source)
    warning = "tokenizer.json has tokens up to 40; the model has none beyond 39, so they cannot be "
    for summary in (
        convert_base(source, tmp_path / "new"),
        convert_variant(source, store.path, "v"),
    ):
        assert summary.warnings == (warning + "used",)
    assert Store(tmp_path / "new").base().made["warnings"] == [warning + "used"]
    assert store.manifest(store.variant("v")).made["warnings"] == [warning + "used"]


def test_a_base_without_a_tokenizer_leaves_it_to_its_variants(
    family, sources, tmp_path: Path
) -> None:
    base = family.write(tmp_path / "base", family.base)
    bare = family.write(tmp_path / "bare", family.tuned)
    for folder in (base, bare):
        (folder / "tokenizer.json").unlink()
    warning = ("there is no tokenizer.json, so no request can be put to it",)
    assert convert_base(base, tmp_path / "s").warnings == warning
    assert convert_variant(bare, tmp_path / "s", "bare").warnings == warning
    assert convert_variant(sources[1], tmp_path / "s", "whole").warnings == ()
    store = Store(tmp_path / "s")
    tokenizer = Tokenizer.from_folder(store.tokenizer_folder(store.variant("whole")))
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_a_tokenizer_that_is_lent_has_to_go_with_the_variants_own_files(
    family, store: Store, tmp_path: Path
) -> None:
    source = family.write(tmp_path / "source", family.tuned)
    (source / "tokenizer.json").unlink()
    _write("tokenizer_config.json", '{"eos_token": "<|tuned|>"}')(source)
    with pytest.raises(SourceError) as error:
        convert_variant(source, store.path, "v")
    assert str(error.value).startswith("source, which takes the base's tokenizer.json: tokenizer_c")
    assert store.names() == ["one"]


def test_shards_that_cut_nothing_are_said(sources, tmp_path: Path) -> None:
    uncut = convert_base(sources[0], tmp_path / "seven", shards=7)
    line = "no matrix divides by 7 shards, so each is one file"
    assert uncut.warnings == (line,) and str(uncut).splitlines()[-1] == f"  warning: {line}"
    assert convert_variant(sources[1], tmp_path / "seven", "v").warnings == ()
    assert convert_base(sources[0], tmp_path / "two", shards=2).warnings == ()
    assert convert_base(sources[0], tmp_path / "one").warnings == ()
