"""Make the golden adapters: small random LoRA adapters of the golden bases, as PEFT saves them, and
what PEFT computes with them.

The tests compare our model with these numbers and so need neither torch nor PEFT. Run this only to
add a case or to change one; a second run writes the same bytes:

    python3.11 -m venv V
    V/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    V/bin/python tests/golden/make_lora_goldens.py

Each case of `CASES` becomes `tests/golden/lora/NAME/`: what PEFT's save_pretrained writes
(adapter_config.json, adapter_model.safetensors), plus `golden.npz`, computed in float64:

    tokens      int32[B, T]
    base        [B, T, V]    logits of the base alone
    logits      [B, T, V]    with the adapter on

`combined.safetensors` has what PEFT's add_weighted_adapter makes of the cases "one" and "two" with
weights of a half: METHOD.WEIGHT.lora_A and .lora_B, and of both alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
TIES_DENSITY = 0.5


@dataclass(frozen=True)
class Case:
    """One adapter: of which base, with which settings of `peft.LoraConfig`."""

    name: str
    base: str
    settings: dict[str, Any]
    seed: int


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = (
    Case("one", "llama_tied", {"r": 4, "lora_alpha": 8, "target_modules": ALL}, 1),
    Case("two", "llama_tied", {"r": 4, "lora_alpha": 8, "target_modules": ALL}, 2),
    Case(
        "patterns",
        "llama_tied",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"down_proj": 5, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {"v_proj": 1.5},
            "exclude_modules": ["layers.0.self_attn.v_proj"],
        },
        3,
    ),
    Case(
        "rslora_regex",
        "qwen2_bias",
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": r".*\.(k_proj|gate_proj|o_proj)",
            "modules_to_save": ["lm_head", "input_layernorm"],
        },
        4,
    ),
    Case(
        "embedding",
        "llama_tied",
        {"r": 2, "lora_alpha": 8, "target_modules": ["embed_tokens", "up_proj"]},
        5,
    ),
)


def base_of(case: Case) -> Any:
    """The golden base in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / case.base, dtype=torch.float32, attn_implementation="eager"
    )
    return model.double().eval()


def fill(model: Any, seed: int) -> None:
    """Everything that an adapter would train, drawn from numpy's PCG64 and rounded to float32."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" not in name and "modules_to_save" not in name:
            continue
        values = rng.normal(0, 0.25, tuple(parameter.shape)).astype(np.float32)
        if "modules_to_save" in name:
            values = values * np.float32(0.2) + parameter.detach().numpy().astype(np.float32)
        parameter.data = torch.from_numpy(values).double()


@torch.no_grad()
def make(case: Case) -> None:
    """Write one case's folder."""
    folder = HERE / "lora" / case.name
    model = base_of(case)
    rng = np.random.Generator(np.random.PCG64(1000 + case.seed))
    tokens = rng.integers(0, model.config.vocab_size, (2, 10), dtype=np.int32)
    ids = torch.from_numpy(tokens).long()
    plain = model(input_ids=ids, use_cache=False).logits
    config = peft.LoraConfig(task_type="CAUSAL_LM", **case.settings)
    adapted = peft.get_peft_model(model, config).double().eval()
    fill(adapted, case.seed)
    logits = adapted(input_ids=ids, use_cache=False).logits
    adapted.to(torch.float32).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    settings["base_model_name_or_path"] = f"golden/{case.base}"
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    np.savez(
        folder / "golden.npz",
        tokens=tokens,
        base=plain.numpy().astype(np.float32),
        logits=logits.numpy().astype(np.float32),
    )
    far = float((logits - plain).abs().max())
    print(f"{case.name}: logits moved by {far:.2f} of {float(plain.abs().max()):.2f}")


@torch.no_grad()
def combine() -> None:
    """Write what PEFT makes of two adapters."""
    model = base_of(CASES[0])
    both = peft.PeftModel.from_pretrained(model, HERE / "lora" / "one", adapter_name="one")
    both.load_adapter(HERE / "lora" / "two", adapter_name="two")
    both = both.double()
    halves = (["one", "two"], [0.5, 0.5])
    both.add_weighted_adapter(*halves, "linear", combination_type="linear")
    both.add_weighted_adapter(*halves, "cat", combination_type="cat")
    both.add_weighted_adapter(*halves, "ties", combination_type="ties", density=TIES_DENSITY)
    tensors = {}
    for name, module in both.named_modules():
        if not hasattr(module, "lora_A") or not name.endswith(("q_proj", "down_proj")):
            continue
        weight = name.removeprefix("base_model.model.") + ".weight"
        for method in ("linear", "cat", "ties"):
            a, b = module.lora_A[method].weight, module.lora_B[method].weight
            scaled = b * module.scaling[method]
            tensors[f"{method}.{weight}.lora_A"] = a.numpy().astype(np.float32)
            tensors[f"{method}.{weight}.lora_B"] = scaled.numpy().astype(np.float32)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        HERE / "lora" / "combined.safetensors",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for chosen in CASES:
        make(chosen)
    combine()
