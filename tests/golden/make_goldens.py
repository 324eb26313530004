"""Make the golden files: tiny random checkpoints and what transformers computes with them.

The tests compare our model with these numbers and so need neither torch nor transformers. Run this
only to add a case or to change one; a second run writes the same bytes:

    python3.11 -m venv V
    V/bin/pip install torch==2.13.0 transformers==5.24.0
    V/bin/python tests/golden/make_goldens.py

Each case of `CASES` becomes `tests/golden/NAME/`: a Hugging Face folder (config.json,
model.safetensors) plus `golden.npz`. Weights are drawn from numpy's PCG64 and rounded to bfloat16,
so they are exact in every dtype. Values are computed in float64 (transformers itself takes RMSNorm
and the rotary angles to float32) and stored as float32:

    tokens      int32[B, T]      the input of everything below
    embed       [B, T, D]        embedder
    attn_norm   [B, T, D]        layer 0, norm before attention
    q           [B, T, N, H]     layer 0, after the q norm if there is one and rotary embedding
    k           [B, T, K, H]     layer 0, likewise
    attn        [B, T, D]        layer 0, attention with its output projection
    mlp_norm    [B, T, D]        layer 0, norm before the MLP
    mlp         [B, T, D]        layer 0, MLP
    layer       [B, T, D]        layer 0, output
    final_norm  [B, T, D]        norm after the last layer
    logits      [B, T, V]
    prompt      int32[P]         start of the greedy continuation
    greedy      int32[12]        the 12 tokens that follow it
    margin      [12]             logit of each of these above the runner-up
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).resolve().parent
GREEDY_TOKENS = 12
# The least lead of a greedy token over the runner-up, so that float32 rounding decides nothing.
LEAST_MARGIN = 1e-3


@dataclass(frozen=True)
class Case:
    """One golden folder: which architecture, which settings, and how they are written down.

    Attributes:
        name: the folder.
        model: transformers' class of the model, e.g. "LlamaForCausalLM".
        settings: keyword arguments of its config.
        length: T, tokens a row of the recorded forward pass.
        prompt: P, tokens of the prompt of the greedy continuation.
        dtype: how the weights are stored.
        classic: write config.json as it was before transformers 5 and as most published checkpoints
            still have it: `rope_theta`, `rope_scaling` and `torch_dtype` at the top level.
    """

    name: str
    model: str
    settings: dict[str, Any]
    length: int = 12
    prompt: int = 6
    dtype: str = "bfloat16"
    classic: bool = False
    seed: int = 0


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """The `rope_parameters` of a config; no scaling unless `rope_type` says so."""
    return {"rope_type": "default", "rope_theta": theta, **scaling}


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = (
    # Tied, grouped queries (3 query heads to a kv head), a width that no power of two divides.
    Case(
        "llama_tied",
        "LlamaForCausalLM",
        {
            **SMALL,
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope(100_000.0),
        },
        seed=1,
    ),
    # Untied, a head size that is not D/N, no grouping, another theta and a large epsilon.
    Case(
        "llama_untied",
        "LlamaForCausalLM",
        {
            **SMALL,
            "hidden_size": 48,
            "head_dim": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-3,
            "rope_parameters": rope(500_000.0),
        },
        dtype="float32",
        classic=True,
        seed=2,
    ),
    # Llama 3's rope scaling: all three ranges of frequencies, and positions past the original 16.
    Case(
        "llama3_rope",
        "LlamaForCausalLM",
        {
            **SMALL,
            "hidden_size": 32,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": rope(
                10_000.0,
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
        length=40,
        prompt=20,
        classic=True,
        seed=3,
    ),
    # Sliding window of 5: the last tokens see neither the first nor each other's whole past.
    Case(
        "mistral_window",
        "MistralForCausalLM",
        {
            **SMALL,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "sliding_window": 5,
            "rope_parameters": rope(10_000.0),
        },
        length=16,
        prompt=8,
        seed=4,
    ),
    # Biases on q, k and v, none on o.
    Case(
        "qwen2_bias",
        "Qwen2ForCausalLM",
        {
            **SMALL,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": rope(1_000_000.0),
        },
        seed=5,
    ),
    # RMSNorm over each head of q and k before the rotary embedding; head size is not D/N.
    Case(
        "qwen3_norm",
        "Qwen3ForCausalLM",
        {
            **SMALL,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "rope_parameters": rope(1_000_000.0),
        },
        seed=6,
    ),
)


def build(case: Case) -> Any:
    """A float64 model in evaluation mode whose weights are random bfloat16 values."""
    model_class = getattr(transformers, case.model)
    config = model_class.config_class(**case.settings)
    config._attn_implementation = "sdpa"  # keeps float64; the eager softmax goes through float32
    model = model_class(config).to(torch.float64).eval()
    rng = np.random.Generator(np.random.PCG64(case.seed))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            draw = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)))
            if parameter.ndim == 2:
                # Attention far from uniform, embeddings small beside what the layers add.
                draw = draw * (0.2 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5)
            else:
                draw = 0.3 * draw + (0.0 if name.endswith("bias") else 1.0)
            parameter.copy_(draw.to(torch.bfloat16).to(torch.float64))
    return model


@contextmanager
def recording(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, a forward pass leaves the outputs of layer 0's parts in the dict that is given."""
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    points = {
        "embed": model.model.embed_tokens,
        "attn_norm": layer.input_layernorm,
        "attn": layer.self_attn,
        "mlp_norm": layer.post_attention_layernorm,
        "mlp": layer.mlp,
        "layer": layer,
        "final_norm": model.model.norm,
        "logits": model.lm_head,
    }

    def hook(name: str) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return keep

    modeling: Any = sys.modules[type(model).__module__]
    rotate = modeling.apply_rotary_pos_emb

    def keep_rotated(*args: Any, **kwargs: Any) -> Any:
        q, k = rotate(*args, **kwargs)
        seen.setdefault("q", q.transpose(1, 2))  # [B, N, T, H] -> [B, T, N, H]; layer 0 comes first
        seen.setdefault("k", k.transpose(1, 2))
        return q, k

    handles = [module.register_forward_hook(hook(name)) for name, module in points.items()]
    modeling.apply_rotary_pos_emb = keep_rotated
    try:
        yield seen
    finally:
        modeling.apply_rotary_pos_emb = rotate
        for handle in handles:
            handle.remove()


def greedy(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most likely 12 tokens after `prompt`, one full pass each, and their margins."""
    ids = torch.from_numpy(prompt).long()[None]
    margins = []
    for _ in range(GREEDY_TOKENS):
        best = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1][None]], dim=1)
    if min(margins) < LEAST_MARGIN:
        raise ValueError(f"a greedy token leads by {min(margins):.2e} only; choose another seed")
    return ids[0, len(prompt) :].numpy().astype(np.int32), np.array(margins, np.float32)


def write_config(case: Case, folder: Path) -> None:
    """Bring config.json into the layout that the case asks for, without transformers' version."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("transformers_version", None)
    config["dtype"] = case.dtype
    if case.classic:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        scaled = parameters["rope_type"] != "default"
        config["rope_scaling"] = parameters if scaled else None
        config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def make(case: Case) -> None:
    """Write one case's folder."""
    folder = HERE / case.name
    model = build(case)
    rng = np.random.Generator(np.random.PCG64(1000 + case.seed))
    vocabulary = case.settings["vocab_size"]
    tokens = rng.integers(0, vocabulary, (2, case.length), dtype=np.int32)
    prompt = rng.integers(0, vocabulary, case.prompt, dtype=np.int32)
    with recording(model) as seen:
        model(input_ids=torch.from_numpy(tokens).long(), use_cache=False)
    values = {name: value.numpy().astype(np.float32) for name, value in seen.items()}
    continuation, margin = greedy(model, prompt)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    write_config(case, folder)
    np.savez(
        folder / "golden.npz",
        tokens=tokens,
        prompt=prompt,
        greedy=continuation,
        margin=margin,
        **values,
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    scale = float(np.abs(values["logits"]).max())
    print(f"{case.name}: {size} bytes, logits to {scale:.1f}, least margin {margin.min():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for chosen in CASES:
        make(chosen)
