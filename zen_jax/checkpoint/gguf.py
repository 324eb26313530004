"""A checkpoint in a GGUF file: configuration, tensors and tokenizer, as a Hugging Face folder's.

Tensors have Hugging Face names and are decoded one at a time. Where all matrices of a file are of
one float type, they keep it; what is quantised, or mixed, becomes bfloat16. Vectors keep their own
type. Llama files hold the rows of q and k in another order, pairs of a rotation side by side; they
are put back. Nothing of a file is run.
"""

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from zen_jax.checkpoint.gguf_header import Header, StoredTensor, read_header
from zen_jax.checkpoint.gguf_tokenizer import tokenizer_files
from zen_jax.checkpoint.safetensors import DTYPES, SourceError
from zen_jax.config import ModelConfig
from zen_jax.layout import EMBED, HEAD, tensor_shapes

SUFFIX = ".gguf"
_FLOATS = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_QUANTISED = frozenset(
    GGMLQuantizationType[name]
    for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
)
_TOP = {
    EMBED: "token_embd.weight",
    HEAD: "output.weight",
    "model.norm.weight": "output_norm.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROPE = "rope_freqs.weight"

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Settings read apart from these two tables.
_READ_APART = frozenset(
    {
        "attention.sliding_window",
        "attention.value_length",
        "expert_count",
        "rope.dimension_count",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.type",
        "vocab_size",
    }
)
# The rule of Llama 3.1 to 3.3: files keep what it comes to for each frequency, not its settings.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor as it comes out.

    Attributes:
      dtype: "BF16" and so on, see `zen_jax.checkpoint.safetensors.DTYPES`.
      shape: as in Hugging Face checkpoints.
      stored: where and how it lies in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: StoredTensor

    @property
    def size(self) -> int:
        """Bytes once it is read."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An opened file whose tensors are exactly those its settings call for.

    Attributes:
      path: the file.
      config: its architecture.
      tensors: by Hugging Face name; `HEAD` only where the file has one of its own.
      settings: the file's own, by its own keys.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, GgufTensor]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file's own name, without the path to it."""
        return self.path.name

    @property
    def coding(self) -> str:
        """What most weights are coded in, "Q4_1" for instance."""
        sizes = Counter[str]()
        for tensor in self.tensors.values():
            sizes[tensor.stored.kind.name] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    @property
    def files(self) -> tuple[Path, ...]:
        """What the weights are read from."""
        return (self.path,)

    def read(self, name: str) -> np.ndarray:
        """One tensor, decoded a block of rows at a time; its values are not checked.

        Raises:
          SourceError: the file has become shorter.
        """
        tensor = self.tensors[name]
        values = np.empty(tensor.shape, DTYPES[tensor.dtype])
        rows = values.reshape(-1, tensor.shape[-1])
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is counted later
            for start, block in _blocks(self.path, tensor.stored):
                rows[start : start + len(block)] = block
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        turned = heads.get(name.split(".")[-2])
        if self.settings["general.architecture"] == "llama" and turned:
            values = _pairs_apart(values, turned)
        return values

    def check_spare_head(self) -> None:
        """Nothing to do: a head in a GGUF file is its own."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of a Hugging Face folder that say what the settings say of text.

        Raises:
          SourceError: the tokenizer is of a kind that is not read, or damaged.
        """
        return tokenizer_files(self.name, self.settings, self.config)


def _pairs_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """[heads * H, I] with each pair of a rotation side by side -> first halves, then second."""
    rows, size = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, size)


def _blocks(path: Path, stored: StoredTensor) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows in float32 or their own float type) of a tensor seen as a matrix."""
    rows = math.prod(stored.shape[:-1])
    row_bytes = stored.size // rows
    step = max(1, _BLOCK // stored.shape[-1])
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for row in range(0, rows, step):
            count = min(step, rows - row)
            data = _read(handle, path, stored, row * row_bytes, count * row_bytes)
            if stored.kind in _FLOATS:
                block = data.view(DTYPES[_FLOATS[stored.kind]])
            else:
                block = dequantize(data.reshape(count, row_bytes), stored.kind)
            yield row, block.reshape(count, stored.shape[-1])
    finally:
        os.close(handle)


def _read(handle: int, path: Path, stored: StoredTensor, start: int, size: int) -> np.ndarray:
    data = np.empty(size, np.uint8)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(handle, [view[done:]], stored.start + start + done)
        if count == 0:
            raise SourceError(path.name, f"ended inside {stored.name!r}; was it changed meanwhile?")
        done += count
    return data


def open_gguf(path: Path) -> GgufFile:
    """Opens a file and checks that it is whole; no tensor is read but Llama 3's rope factors.

    Raises:
      SourceError: it is damaged, or of an architecture or with a setting that is not known here,
        or names, shapes or types are not what its settings call for; all problems are named.
    """
    header = read_header(path)
    config = _config(path, header)
    expected = tensor_shapes(config)
    named = {stored_name(name): name for name in expected}
    problems = [
        f"lacks {stored!r}, which its settings call for"
        for stored in sorted(named.keys() - header.tensors.keys())
    ]
    extra = sorted(header.tensors.keys() - named.keys() - {_ROPE})
    if extra:
        more = f" and {len(extra) - 4} more" if len(extra) > 4 else ""
        listed = ", ".join(map(repr, extra[:4]))
        problems.append(f"has {listed}{more}, which this architecture does not use")
    found = {hf: header.tensors[n] for n, hf in named.items() if n in header.tensors}
    for name, stored in found.items():
        if stored.shape != expected[name]:
            problems.append(
                f"{stored.name!r} has shape {stored.shape}; its settings say {expected[name]}"
            )
        if stored.kind not in _FLOATS and stored.kind not in _QUANTISED:
            problems.append(f"{stored.name!r} is coded in {stored.kind.name}, which is not read")
    if problems:
        raise SourceError(path.name, problems)
    tensors = {
        name: GgufTensor(dtype, expected[name], found[name])
        for name, dtype in _dtypes(found).items()
    }
    return GgufFile(path, config, tensors, header.settings)


def _dtypes(found: Mapping[str, StoredTensor]) -> dict[str, str]:
    """What each tensor becomes: one type for all matrices, its own for each vector."""
    kinds = {tensor.kind for tensor in found.values() if len(tensor.shape) > 1}
    only = kinds.pop() if len(kinds) == 1 else None
    matrices = "BF16" if only is None else _FLOATS.get(only, "BF16")
    return {
        name: matrices if len(tensor.shape) > 1 else _FLOATS.get(tensor.kind, "BF16")
        for name, tensor in found.items()
    }


def stored_name(name: str) -> str:
    """A Hugging Face tensor's name -> what files call it."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TOP[name]
    layer, inner, suffix = match.groups()
    return f"blk.{layer}.{_IN_LAYER[inner]}.{suffix}"


def _config(path: Path, header: Header) -> ModelConfig:
    settings = header.settings
    kind, architecture = settings.get("general.type", "model"), settings.get("general.architecture")
    if kind != "model":
        raise SourceError(path.name, f"holds a {kind!r:.40}; expected a model")
    if architecture not in _ARCHITECTURES:
        raise SourceError(
            path.name,
            f"is of the architecture {architecture!r:.40}; read are {', '.join(_ARCHITECTURES)} "
            "(Mistral's files say llama)",
        )
    lead = f"{architecture}."
    own = {k.removeprefix(lead): _shortest(v) for k, v in settings.items() if k.startswith(lead)}
    unknown = sorted(own.keys() - _NEEDED.keys() - _OPTIONAL.keys() - _READ_APART)
    problems = [f"lacks the setting {lead}{key}" for key in _NEEDED if key not in own]
    if unknown:
        problems.append(
            f"has settings that are not known here: {', '.join(map(repr, unknown[:8]))}; they "
            "might change what the model computes, so it is refused"
        )
    if _TOP[EMBED] not in header.tensors:
        problems.append(f"lacks {_TOP[EMBED]!r}")
    for key in own.keys() & (_NEEDED.keys() | _OPTIONAL.keys()):
        if type(own[key]) not in (int, float) or not 0 < own[key] < 2**31:
            problems.append(f"gives {lead}{key} as {own[key]!r:.40}; expected one positive number")
    if not problems and own["block_count"] > len(header.tensors):
        problems.append(
            f"has {lead}block_count {own['block_count']}, and {len(header.tensors)} tensors"
        )
    if problems:
        raise SourceError(path.name, problems)
    try:
        return _checked_config(architecture, own, header, path)
    except SourceError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise SourceError(path.name, f"{error} (from its {lead}* settings)") from error


def _shortest(value: Any) -> Any:
    """A float32 as the decimal that it was made from: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _checked_config(
    architecture: str, own: Mapping[str, Any], header: Header, path: Path
) -> ModelConfig:
    window = own.get("attention.sliding_window")
    family = "mistral" if architecture == "llama" and window else architecture
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": header.tensors[_TOP[EMBED]].shape[0],
        "tie_word_embeddings": _TOP[HEAD] not in header.tensors,
        **{hf: own[key] for key, hf in _NEEDED.items()},
        **{hf: own[key] for key, hf in _OPTIONAL.items() if key in own},
    }
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    # Qwen3's default in Hugging Face is 128; a GGUF file that says nothing means D / N.
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if window:
        if family != "mistral":
            raise ValueError(f"attention.sliding_window is {window!r} in a {architecture} model")
        config["sliding_window"] = window
    scaling, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        raise ValueError(f"rope.scaling.type is {scaling!r:.40}; read are 'none' and 'linear'")
    if _ROPE in header.tensors:
        config["rope_scaling"] = _llama3_rule(path, header.tensors[_ROPE], config)
    same = {
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "expert_count": 0,
    }
    for key, expected in same.items():
        if own.get(key, expected) != expected:
            raise ValueError(f"{key} is {own[key]!r}; implemented is {expected}")
    return ModelConfig.from_hf(config)


def _llama3_rule(path: Path, stored: StoredTensor, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Llama 3's rope that give a file's factors.

    Raises:
      ValueError: none of the published ones does.
    """
    half = config["head_dim"] // 2
    if stored.shape != (half,) or stored.kind != GGMLQuantizationType.F32:
        raise ValueError(f"{_ROPE} has shape {stored.shape}; expected float32 {(half,)}")
    factors = np.concatenate([block.reshape(-1) for _, block in _blocks(path, stored)])
    theta = config.get("rope_theta", 10000.0)
    waves = 2 * np.pi * theta ** (np.arange(half) / half)
    factor = float(factors.max())
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((_LLAMA3_POSITIONS / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if not (factor >= 1 and np.allclose(factors, expected, rtol=1e-4)):
        raise ValueError(
            f"{_ROPE} holds factors that are not Llama 3's with low_freq_factor {low}, "
            f"high_freq_factor {high} and {_LLAMA3_POSITIONS} positions"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        **_LLAMA3,
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }
