"""Texts: how they are made plain and split, and what happens when they cannot be had."""

import gzip
import zipfile
from pathlib import Path

import pytest

from zen_jax.training import corpora
from zen_jax.training.corpora import Source, fetch, load, split_documents

ROFF = r"""'\" t
.TH FIND 1
.SH NOM
find \- Rechercher des fichiers
\fBfind\fP parcourt les r\['e]pertoires \(aqdocs\(aq\ : \\n
"""


def test_a_manual_page_becomes_plain() -> None:
    plain = corpora._roff(ROFF).strip()
    assert plain.splitlines()[0] == "find - Rechercher des fichiers"
    assert plain.splitlines()[1].startswith("find parcourt les r")
    assert "'docs' : " in plain
    assert "\\f" not in plain and ".SH" not in plain


def test_documents_are_split_once_and_for_all() -> None:
    documents = [f"document number {i} " * 20 for i in range(400)]
    corpus = split_documents("made", documents, 10**7)
    assert not set(corpus.train) & set(corpus.held_out)
    assert len(corpus.train) + len(corpus.held_out) == 400
    assert 20 <= len(corpus.held_out) <= 60
    shuffled = split_documents("made", documents[::-1], 10**7)
    assert set(shuffled.held_out) == set(corpus.held_out)
    assert shuffled.sha256 != corpus.sha256


def test_short_repeated_and_excess_documents_are_left_out() -> None:
    documents = ["short", *(f"document number {i} " * 20 for i in range(400))]
    corpus = split_documents("made", [*documents, *documents], 10**7)
    assert len(corpus.train) + len(corpus.held_out) == 400
    few = split_documents("made", documents, 30_000)
    assert sum(map(len, few.train + few.held_out)) <= 30_000


def test_a_corpus_of_too_little() -> None:
    with pytest.raises(ValueError, match="corpus made has 0 usable documents"):
        split_documents("made", ["short"], 1000)


def test_an_unknown_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text is called 'novel'; there are words"):
        load("novel", tmp_path)


def test_a_client_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    source = Source("x", "npm", "x@1", "none", corpora._licences)
    with pytest.raises(ValueError, match="npm is not installed"):
        fetch(source, tmp_path)
    assert not (tmp_path / "x" / "complete").exists()


def test_what_is_in_the_cache_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def client(command: list[str], folder: Path) -> None:
        calls.append(command)
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.writestr("inside.txt", "text")

    monkeypatch.setattr(corpora, "_run", client)
    source = Source("x", "pip", "x==1", "none", corpora._licences)
    folder = fetch(source, tmp_path)
    assert (folder / "inside.txt").read_text() == "text"
    assert fetch(source, tmp_path) == folder
    assert len(calls) == 1 and calls[0][-1] == "x==1"


def test_dictionary_articles(tmp_path: Path) -> None:
    place = tmp_path / "usr/share/dictd"
    place.mkdir(parents=True)
    article = 'Absolute \\Ab"so*lute\\, n.\n   A plane curve.\n   [1913 Webster]'
    (place / "x.dict.dz").write_bytes(gzip.compress("\n\n".join([article] * 200).encode()))
    parts = list(corpora._dictionary(tmp_path))
    assert len(parts) > 1
    assert all("Webster" not in part and len(part) > 2000 for part in parts)


def test_every_source_names_its_licence() -> None:
    for source in corpora.SOURCES.values():
        assert source.licence and source.package and source.limit > 0
