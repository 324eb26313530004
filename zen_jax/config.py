"""What a model is: its architecture, read from a Hugging Face configuration.

Knows nothing of sizes of batches or caches (``EngineConfig``) nor of where weights lie. A setting
that would change the arithmetic and is not implemented is an error, never ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any, Literal, cast, get_args

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
    "model_type": get_args(Family),
    "rope_interleaved": (False, None),
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
# What each of the others has to be; None, or absence, leaves it at its default.
_NUMBER = (int, float)
_DERIVED: Mapping[str, tuple[type, ...]] = {
    "num_key_value_heads": (int,),
    "head_dim": (int,),
    "rope_theta": _NUMBER,
    "rope_scaling": (dict,),
    "rope_parameters": (dict,),
    "tie_word_embeddings": (bool,),
    "sliding_window": (int,),
    "use_sliding_window": (bool,),
    "max_window_layers": (int,),
    "layer_types": (list,),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Settings of which 0 makes no sense.
_AT_LEAST_ONE = frozenset(
    {*_READ.values(), "num_key_value_heads", "head_dim", "sliding_window"} - {"rms_norm_eps"}
)
# Beyond any model; a configuration is not trusted, and shapes are listed before files are read.
_MAX_LAYERS, _MAX_SIZE = 1024, 2**31 - 1
# What Hugging Face takes for granted where a configuration says nothing.
_KV_HEADS: Mapping[str, int | None] = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128
_QWEN_WINDOW_LAYERS = 28


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's stretching of the rotary embedding's long waves.

    Attributes:
      factor: by how much the longest waves are stretched.
      low_freq_factor: waves longer than original_max_position / this are stretched whole.
      high_freq_factor: waves shorter than original_max_position / this are left alone.
      original_max_position: positions that the model was first trained on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                f"llama3 rope has factor {self.factor}, low_freq_factor {self.low_freq_factor}, "
                f"high_freq_factor {self.high_freq_factor}; expected 1 or more, and 0 < low < high"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer of the Llama, Mistral and Qwen families.

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
      family: whose layout it is; qwen2 adds biases to q, k and v, qwen3 norms q and k by head.
      rope_scaling: a number for linear scaling of positions, Llama 3's rule, or None.
      windows: for each layer how many of the last tokens a query sees, its own counted; None sees
        all. Empty: all layers see all.
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
    family: Family = "llama"
    rope_scaling: float | Llama3Rope | None = None
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is not int:
                continue
            most = _MAX_LAYERS if field.name == "num_layers" else _MAX_SIZE
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number 1 to {most}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it has to divide num_heads {self.num_heads}"
            )
        if not (0 < self.rms_norm_eps < 1 and 0 < self.rope_theta < float("inf")):
            raise ValueError(
                f"rms_norm_eps is {self.rms_norm_eps} and rope_theta {self.rope_theta}; "
                "expected a small and a finite positive number"
            )
        if isinstance(self.rope_scaling, float) and not 0 < self.rope_scaling < float("inf"):
            raise ValueError(f"rope_scaling is {self.rope_scaling}; expected a positive factor")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries; the model has {self.num_layers} layers"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows are {self.windows}; expected positive sizes or None")

    @property
    def qkv_bias(self) -> bool:
        """Whether biases are added to q, k and v."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normed before they are turned."""
        return self.family == "qwen3"

    def window(self, layer: int) -> int | None:
        """How many of the last tokens a query of this layer sees; None: all."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a Hugging Face ``config.json``.

        Args:
          config: the parsed file.

        Raises:
          ValueError: a needed setting is missing, a setting has a value that is not implemented,
            or a setting is not known here and might change the arithmetic.
        """
        missing = [key for key in ["model_type", *_READ.values()] if key not in config]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}; is it a Llama-style model?")
        _check_types(config)
        for key, allowed in _FIXED.items():
            if key in config and config[key] not in allowed:
                raise ValueError(
                    f"config.json sets {key} to {config[key]!r}; implemented is "
                    + ", ".join(repr(value) for value in allowed if value is not None)
                )
        unknown = sorted(set(config) - _IGNORED - set(_FIXED) - set(_READ.values()) - set(_DERIVED))
        if unknown:
            named = ", ".join(key if key.isidentifier() else shortened(key) for key in unknown[:20])
            raise ValueError(
                f"config.json has settings that are not known here: {named}; "
                "they might change what the model computes, so it is refused"
            )
        family, heads = config["model_type"], config["num_attention_heads"]
        default_dim = _QWEN3_HEAD_DIM if family == "qwen3" else config["hidden_size"] // heads
        theta, scaling = _rope(config)
        return cls(
            **{name: config[key] for name, key in _READ.items()},
            num_kv_heads=config.get("num_key_value_heads") or _KV_HEADS[family] or heads,
            head_dim=config.get("head_dim") or default_dim,
            rope_theta=theta,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            family=family,
            rope_scaling=scaling,
            windows=_windows(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """The settings of a Hugging Face ``config.json`` that `from_hf` reads back as equal."""
        settings = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            **{key: getattr(self, name) for name, key in _READ.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if isinstance(self.rope_scaling, Llama3Rope):
            settings["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_position,
            }
        elif self.rope_scaling is not None:
            settings["rope_scaling"] = {"rope_type": "linear", "factor": self.rope_scaling}
        size = next((window for window in self.windows if window is not None), None)
        if self.family == "mistral" or size is not None:
            settings["sliding_window"] = size
        if self.family in ("qwen2", "qwen3"):
            settings["use_sliding_window"] = size is not None
        if self.windows and self.family != "mistral":
            settings["layer_types"] = [
                "full_attention" if window is None else "sliding_attention"
                for window in self.windows
            ]
        return settings

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        layer = 2 * d + 2 * (self.num_heads + self.num_kv_heads) * h * d + 3 * f * d
        layer += (self.num_heads + 2 * self.num_kv_heads) * h if self.qkv_bias else 0
        layer += 2 * h if self.qk_norm else 0
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * d + self.num_layers * layer + d


def _check_types(config: Mapping[str, Any]) -> None:
    """Makes sure that every setting that is read is of its kind, before it is used."""
    kinds: dict[str, tuple[type, ...]] = {key: (int,) for key in _READ.values()}
    kinds |= {"rms_norm_eps": _NUMBER, "model_type": (str,), "hidden_act": (str,), **_DERIVED}
    for key, kind in kinds.items():
        value: Any = config.get(key)
        optional = key in _DERIVED or key == "hidden_act"
        if value is None and optional:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            expected = " or ".join(each.__name__ for each in kind)
            raise ValueError(f"config.json sets {key} to {value!r}; expected {expected}")
        if kind == _NUMBER:
            _finite(key, value)
        elif isinstance(value, int):
            least, most = int(key in _AT_LEAST_ONE), _MAX_LAYERS if "layers" in key else _MAX_SIZE
            if not least <= value <= most:
                raise ValueError(f"config.json sets {key} to {value!r}; expected {least} to {most}")


def _finite(name: str, value: Any) -> float:
    """A number of a configuration, which may be anything that JSON holds."""
    try:
        if not isinstance(value, bool) and isinstance(value, _NUMBER) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"config.json sets {name} to {shortened(value)}; expected a finite number")


def _rope(config: Mapping[str, Any]) -> tuple[float, float | Llama3Rope | None]:
    """Theta and scaling, from the places where old and new configurations keep them."""
    new, old = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    theta = new.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    theta = _finite("rope_theta", theta)
    rule = new if new.get("rope_type", "default") != "default" or not old else old
    rule.pop("rope_theta", None)
    kind = rule.pop("rope_type", None) or rule.pop("type", None) or "default"
    rule.pop("type", None)
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if not isinstance(kind, str) or kind not in names or set(rule) != set(names[kind]):
        raise ValueError(
            f"config.json sets rope scaling {kind!r} with {sorted(rule)}; implemented are "
            "'default', 'linear' with factor, and 'llama3' with its four settings"
        )
    numbers = [_finite(f"rope scaling {kind!r}, {name}", rule[name]) for name in names[kind]]
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, numbers[0]
    factor, low, high, original = numbers
    return theta, Llama3Rope(factor, low, high, int(original))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window; empty when every layer sees everything."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    if family == "mistral":
        size = config.get("sliding_window", _MISTRAL_WINDOW)
        return () if size is None else (size,) * layers
    size = config.get("sliding_window")
    if family == "llama":
        if size is not None:
            raise ValueError(f"config.json sets sliding_window to {size!r} in a Llama model")
        return ()
    kinds = config.get("layer_types")
    if not config.get("use_sliding_window") or size is None:
        if kinds and any(kind != "full_attention" for kind in kinds):
            raise ValueError("config.json has sliding layer_types, but no sliding window in use")
        return ()
    if kinds is None:
        first = config.get("max_window_layers", _QWEN_WINDOW_LAYERS)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ValueError(
            f"config.json has layer_types {shortened(kinds)}; expected {layers} of "
            "'full_attention' and 'sliding_attention'"
        )
    windows = tuple(cast(int, size) if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
