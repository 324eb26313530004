"""Which model a plan is of: a Hugging Face folder, its config.json, or a well-known name."""

import json
from pathlib import Path

from zen_jax.config import ModelConfig

# Sizes only; how positions are stretched changes neither bytes nor operations.
_KNOWN = {
    "llama-3.1-8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 131072),
    "llama-3.1-70b": ModelConfig(128256, 8192, 28672, 80, 64, 8, 128, 131072),
    "llama-3.1-405b": ModelConfig(128256, 16384, 53248, 126, 128, 8, 128, 131072),
    "mistral-7b": ModelConfig(32768, 4096, 14336, 32, 32, 8, 128, 32768, family="mistral"),
    "qwen2.5-7b": ModelConfig(152064, 3584, 18944, 28, 28, 4, 128, 32768, family="qwen2"),
    "qwen2.5-72b": ModelConfig(152064, 8192, 29568, 80, 64, 8, 128, 32768, family="qwen2"),
    "qwen3-8b": ModelConfig(151936, 4096, 12288, 36, 32, 8, 128, 40960, family="qwen3"),
    "qwen3-32b": ModelConfig(151936, 5120, 25600, 64, 64, 8, 128, 40960, family="qwen3"),
    "smollm2-135m": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True),
}
# A configuration is a page long; what is longer is none.
_MOST_BYTES = 1 << 20


def known_models() -> tuple[str, ...]:
    """Names that `read_model` knows without a file."""
    return tuple(_KNOWN)


def read_model(name: str) -> ModelConfig:
    """The configuration of a model.

    Args:
      name: a well-known name, a folder with config.json, or such a file.

    Raises:
      ValueError: there is no such model or file, or it is not one that is served here.
    """
    if name.lower() in _KNOWN:
        return _KNOWN[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"--model is {name!r}; expected a folder with config.json, such a file, or one of "
            f"{', '.join(_KNOWN)}"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; that is no config.json")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}; expected an object")
    return ModelConfig.from_hf(settings)
