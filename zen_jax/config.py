"""What a model is: its architecture, read from a Hugging Face configuration.

Knows nothing of sizes of batches or caches (``EngineConfig``) nor of where weights lie. A setting
that would change the arithmetic and is not implemented is an error, never ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Settings that do not change what an inference pass computes.
_IGNORED = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)
# Settings that are implemented for one value only.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "model_type": ("llama",),
    "rope_interleaved": (False, None),
    "rope_scaling": (None,),
}
_READ = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer of the Llama family.

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: F.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; N is a multiple of it.
      head_dim: H, even.
      max_position: the most tokens a sequence may have.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary embedding's frequencies.
      tie_word_embeddings: the head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} is {value!r}; expected a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it has to divide num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a Hugging Face ``config.json``.

        Args:
          config: the parsed file.

        Raises:
          ValueError: a needed setting is missing, a setting has a value that is not implemented, or
            a setting is not known here and might change the arithmetic.
        """
        missing = [key for key in ["model_type", *_READ.values()] if key not in config]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}; is it a Llama-style model?")
        for key, allowed in _FIXED.items():
            if key in config and config[key] not in allowed:
                raise ValueError(
                    f"config.json sets {key} to {config[key]!r}; implemented is {allowed[0]!r}"
                )
        rope = config.get("rope_parameters") or {}
        if set(rope) - {"rope_theta", "rope_type"} or rope.get("rope_type", "default") != "default":
            raise ValueError(f"config.json sets rope_parameters to {rope!r}; only plain rope works")
        known = _IGNORED | set(_FIXED) | set(_READ.values())
        known |= {"num_key_value_heads", "head_dim", "rope_theta", "rope_parameters"}
        known |= {"tie_word_embeddings"}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(
                f"config.json has settings that are not known here: {', '.join(unknown)}; "
                "they might change what the model computes, so it is refused"
            )
        heads = config["num_attention_heads"]
        return cls(
            **{name: config[key] for name, key in _READ.items()},
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The settings of a Hugging Face ``config.json`` that `from_hf` reads back to an equal
        value."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            **{key: getattr(self, name) for name, key in _READ.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
        }

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        layer = 2 * d + 2 * (self.num_heads + self.num_kv_heads) * h * d + 3 * f * d
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * d + self.num_layers * layer + d
