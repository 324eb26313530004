"""A model as a GGUF file in bfloat16, for programs that are fed tokens: it has no tokenizer."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from zen_jax.checkpoint.gguf import stored_name
from zen_jax.config import ModelConfig
from zen_jax.layout import EMBED

_FAMILIES = ("llama", "mistral")


def write_gguf(path: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes what llama.cpp's converter would make of a Llama-style model, without the tokenizer.

    Matrices are bfloat16, vectors float32. The rows of q and k lie as llama.cpp rotates them: the
    two halves of a head dealt out in pairs. The file appears whole or not at all.

    Args:
      path: the file; one that is there is replaced.
      config: the architecture.
      tensors: by Hugging Face name, any float dtype; a head only where it is not the embedding.

    Raises:
      ValueError: the architecture has something that this file has no place for.
    """
    if config.family not in _FAMILIES or config.rope_scaling is not None or any(config.windows):
        raise ValueError(
            f"no GGUF file is written for {config.family} with rope_scaling {config.rope_scaling} "
            f"and windows {config.windows[:1]}; expected {' or '.join(_FAMILIES)} without either"
        )
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(tensors[EMBED].shape[0])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, values in tensors.items():
        _add(writer, config, name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def _add(writer: gguf.GGUFWriter, config: ModelConfig, name: str, values: np.ndarray) -> None:
    if values.ndim == 1:
        writer.add_tensor(stored_name(name), values.astype(np.float32))
        return
    values = np.asarray(values).astype(ml_dtypes.bfloat16)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    turned = heads.get(name.split(".")[-2])
    if turned:
        halves = values.reshape(turned, 2, -1, values.shape[-1])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(stored_name(name), values.view(np.uint8), raw_dtype=kind)
