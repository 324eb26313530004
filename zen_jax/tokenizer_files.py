"""What the files of a tokenizer say: how large they may be, the names, ends and template they give.

Knows nothing of tokens' texts; see `zen_jax.tokenizer`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
ENDS_IN = ("generation_config.json", "config.json")  # the first that says anything decides
FILES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, *ENDS_IN)
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # the largest published ones have some 40 MB
MAX_CONFIG_BYTES = 16 * 1024 * 1024  # a tokenizer_config.json may list thousands of added tokens


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of those of `FILES` that a folder has, by name.

    Raises:
      ValueError: one is too large.
    """
    files = {}
    for path in (folder / name for name in FILES):
        if path.is_file():
            _check_size(path.name, path.stat().st_size)
            files[path.name] = path.read_bytes()
    return files


def _check_size(name: str, size: int) -> None:
    limit = MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_CONFIG_BYTES
    if size > limit:
        raise ValueError(f"{name} has {size} bytes; at most {limit} are read")


def text_of(files: Mapping[str, bytes], name: str) -> str | None:
    """A file's text, or None when there is no such file.

    Raises:
      ValueError: it is too large, or no UTF-8.
    """
    if name not in files:
        return None
    _check_size(name, len(files[name]))
    try:
        return files[name].decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None


def of_library[T](call: Callable[[], T], problem: str) -> T:
    """What the library `tokenizers` answers.

    Raises:
      ValueError: one line about tokenizer.json, whatever the library raised.
    """
    try:
        return call()
    except BaseException as error:
        # The library raises plain Exception, and for some damage its Rust code panics, which
        # derives from BaseException and would end the thread.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{TOKENIZER} {problem}: {reason}") from None


def json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object, empty when there is no such file.

    Raises:
      ValueError: it is no such object.
    """
    text = text_of(files, name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds a {type(value).__name__}; expected an object")
    return value


def token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """ "bos_token" and such -> the token's text, which a file may write as text or as an object.

    Args:
      config: what tokenizer_config.json holds.

    Raises:
      ValueError: it writes something else.
    """
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if value is None:
            continue
        if not isinstance(value, str):
            shown = f"{value!r:.80}"
            raise ValueError(f"{TOKENIZER_CONFIG}: {name} is {shown}; expected a token's text")
        names[name] = value
    return names


def end_ids(files: Mapping[str, bytes], name: str) -> frozenset[int] | None:
    """The tokens that one of `ENDS_IN` says end an answer, or None if it says nothing of them.

    Raises:
      ValueError: it is damaged, or names anything but ids.
    """
    value = json_of(files, name).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        shown = f"{value!r:.80}"
        raise ValueError(f"{name} has eos_token_id {shown}; expected an id or a list of them")
    return frozenset(ids)


def chat_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The source of the chat template, if there is one.

    Args:
      files: contents by name.
      config: what tokenizer_config.json holds.

    Raises:
      ValueError: it is no text.
    """
    template = text_of(files, TEMPLATE)
    if template is not None:
        return template
    value = config.get("chat_template")
    if isinstance(value, list):  # several by name; "default" is the one for conversations
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        value = named.get("default")
    if not isinstance(value, str | None):
        raise ValueError(
            f"{TOKENIZER_CONFIG}: chat_template is neither a text nor a list with a default"
        )
    return value
