"""Whether a checkpoint's tokenizer files will serve, looked at before they are published.

They are opened as a server opens them, and their tokens compared with the rows of the model.
"""

from collections.abc import Mapping, Sequence

from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.config import ModelConfig
from zen_jax.tokenizer import Tokenizer
from zen_jax.tokenizer_files import ENDS_IN, TOKENIZER, TOKENIZER_CONFIG, end_ids


def check_tokenizer(
    where: str, files: Mapping[str, bytes], config: ModelConfig, borrowed: Sequence[str] = ()
) -> list[str]:
    """Makes sure that requests can be put to a model by the tokenizer files beside it.

    Args:
      where: the checkpoint's name, for errors.
      files: what is to be published, contents by name.
      config: the model's architecture.
      borrowed: names of those that are the base's.

    Returns:
      What the manifest is to warn of, one line each.

    Raises:
      SourceError: a file cannot be read, an end of answers is no token of the model, or text can
        become a token that it has no row for.
    """
    rows = config.vocab_size
    try:
        _check_ends(files, rows)
        if TOKENIZER not in files:
            return [f"there is no {TOKENIZER}, so no request can be put to it"]
        tokenizer = Tokenizer.from_files(files)
        _check_size(tokenizer, rows)
    except ValueError as error:
        lent = f", which takes the base's {', '.join(borrowed)}" if borrowed else ""
        raise SourceError(where + lent, str(error)) from None
    if tokenizer.vocab_size > rows:
        more = f"{TOKENIZER} has tokens up to {tokenizer.vocab_size - 1}"
        return [f"{more}; the model has none beyond {rows - 1}, so they cannot be used"]
    return []


def _check_ends(files: Mapping[str, bytes], rows: int) -> None:
    for name in ENDS_IN:
        beyond = sorted(i for i in end_ids(files, name) or () if i >= rows)
        if beyond:
            raise ValueError(
                f"{name} has eos_token_id {beyond[0]}; the model's tokens are 0 to {rows - 1}"
            )


def _check_size(tokenizer: Tokenizer, rows: int) -> None:
    if not tokenizer.text_size:
        raise ValueError(f"{TOKENIZER} has no token for text")
    if tokenizer.text_size > rows:
        raise ValueError(
            f"{TOKENIZER} turns text into tokens up to {tokenizer.text_size - 1}; the model's are "
            f"0 to {rows - 1}"
        )
    beyond = sorted(i for i in tokenizer.eos_ids if i >= rows)
    if beyond:
        raise ValueError(
            f"{TOKENIZER_CONFIG} has an eos_token with the id {beyond[0]}; the model's tokens are "
            f"0 to {rows - 1}"
        )
