"""LoRA adapters as PEFT keeps them: a folder with adapter_config.json and safetensors.

Opening one reads headers only. What would change the arithmetic in a way that is not computed here
(DoRA, biases, and whatever this version does not know) is refused by name, and so is a file whose
tensors are not those that its settings call for; every problem is reported, not the first.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from zen_jax.checkpoint.hf import listed
from zen_jax.checkpoint.safetensors import (
    DTYPES,
    SourceError,
    SourceTensor,
    read_header,
    read_json,
    read_tensor,
)
from zen_jax.layout import EMBED, HEAD
from zen_jax.merge.lora import Factors, scaling

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings that an adapter is read by.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_READ |= {"target_modules", "exclude_modules", "modules_to_save", "init_lora_weights", "bias"}
_READ |= {"layers_to_transform", "layers_pattern"}
# Settings that say how it came about or where it is used, and nothing of what it computes.
_NEUTRAL = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_NEUTRAL |= {"inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"}
_NEUTRAL |= {"loftq_config", "runtime_config"}
# Starts that leave the base as it is; the others (PiSSA, OLoRA, CorDA, LoftQ) change its weights.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# A pattern of a stranger's settings is no longer than this.
_LONGEST_PATTERN = 1000
_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.weight)?")
_COPY = ".base_layer.weight"
_LAYER = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """The factors of one weight W [O, I]: W + scale b a.

    Attributes:
      a: the tensor of the file that is a [R, I], or for an embedding its transpose [I, R].
      b: likewise b [O, R], for an embedding [R, O].
      scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    a: SourceTensor
    b: SourceTensor
    scale: float

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(a [R, I], b [O, R]) as stored, without the scale.

        Raises:
          SourceError: the file has become shorter.
        """
        a, b = read_tensor(self.a), read_tensor(self.b)
        if _is_embedding(self.a.name):
            a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        return a, b


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An opened adapter that fits a base.

    Attributes:
      path: its folder.
      settings: adapter_config.json as it is.
      weights: by Hugging Face tensor of the base.
      saved: tensors that were trained whole, by the same names.
      copies: of the base's own embedding or head, which PEFT puts beside the factors of one; they
        are the base's again.
    """

    path: Path
    settings: Mapping[str, Any]
    weights: Mapping[str, AdaptedWeight]
    saved: Mapping[str, SourceTensor]
    copies: Mapping[str, SourceTensor]

    @property
    def name(self) -> str:
        """The folder's own name, without the path to it."""
        return self.path.resolve().name


def open_adapter(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> PeftAdapter:
    """Opens an adapter and compares it with its base; no tensor is read.

    Args:
      path: a folder with adapter_config.json and adapter_model.safetensors.
      shapes: of the base's tensors by Hugging Face name; a tied base's head need not be among them.

    Raises:
      SourceError: it is none, is of a kind that is not computed here, or does not fit; all problems
        are named together.
    """
    if not path.is_dir():
        raise SourceError(str(path), f"is not a folder; expected one with {CONFIG} and {WEIGHTS}")
    settings = read_json(path / CONFIG)
    problems = _refusals(settings)
    if problems:
        raise SourceError(path.name, problems)
    others = [p.name for p in sorted(path.glob("adapter_model.*")) if p.suffix in (".bin", ".pt")]
    if others and not (path / WEIGHTS).exists():
        raise SourceError(path.name, f"{others[0]} is not read, save it as safetensors")
    known = {HEAD: shapes[EMBED], **shapes}
    try:
        return _fitted(path, settings, known)
    except re.error as error:
        problem = f"{CONFIG} has a pattern that is none ({error}): {error.pattern!r:.80}"
        raise SourceError(path.name, problem) from error


def _refusals(settings: Mapping[str, Any]) -> list[str]:
    """What is asked for that is not computed here, each by its setting's name."""
    problems = []
    if settings.get("peft_type") != "LORA":
        problems.append(f"peft_type is {settings.get('peft_type')!r}; only LORA is read")
    if settings.get("use_dora"):
        problems.append(
            "use_dora is set; DoRA scales each output, which a low-rank part cannot say"
        )
    if settings.get("bias", "none") != "none" or settings.get("lora_bias"):
        named = "lora_bias" if settings.get("lora_bias") else "bias"
        problems.append(f"{named} is {settings[named]!r}; adapters with biases are not read")
    if settings.get("init_lora_weights", True) not in _STARTS:
        start = settings["init_lora_weights"]
        problems.append(f"init_lora_weights is {start!r}, which changes the base's own weights")
    unknown = set(settings) - _READ - _NEUTRAL - {"use_dora", "bias", "lora_bias"}
    problems += [
        f"{key} is {settings[key]!r:.60}, which this version does not compute"
        for key in sorted(unknown)
        if settings[key] not in (None, False, [], {}, "")
    ]
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or type(alpha) not in (int, float):
        problems.append(f"r is {rank!r} and lora_alpha {alpha!r}; expected two numbers")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(key) or {}, dict):
            problems.append(f"{key} is {settings[key]!r:.60}; expected an object")
    if not isinstance(settings.get("target_modules"), str | list):
        problems.append("target_modules is no list of names and no pattern")
    return problems


def _fitted(
    path: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> PeftAdapter:
    """Sorts the file's tensors by weight and checks names, shapes, ranks and types."""
    tensors = read_header(path / WEIGHTS)
    problems, pairs, saved, copies = list[str](), dict[str, dict[str, SourceTensor]](), {}, {}
    for name, tensor in tensors.items():
        own = name.removeprefix(PREFIX)
        factor = _FACTOR.fullmatch(own)
        copied = own.endswith(_COPY)
        weight = f"{factor[1]}.weight" if factor else own.replace(".modules_to_save.default", "")
        weight = own.removesuffix(_COPY) + ".weight" if copied else weight
        if tensor.dtype not in DTYPES:
            problems.append(f"{name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}")
        elif own == name or weight not in shapes:
            problems.append(f"{name} belongs to no weight of the base")
        elif factor:
            side = "a" if factor[2] in ("lora_A", "lora_embedding_B") else "b"
            pairs.setdefault(weight, {})[side] = tensor
        else:
            (copies if copied else saved)[weight] = tensor
    weights: dict[str, AdaptedWeight] = {}
    for weight, pair in sorted(pairs.items()):
        if set(pair) != {"a", "b"}:
            problems.append(f"{weight} has one of its two factors only")
            continue
        problem, found = _adapted(weight, pair["a"], pair["b"], settings, shapes[weight])
        problems += [problem] if problem else []
        weights[weight] = found
    problems += _astray(settings, pairs, saved, shapes)
    if problems:
        raise SourceError(path.name, problems)
    return PeftAdapter(path, settings, weights, saved, copies)


def _adapted(
    weight: str,
    a: SourceTensor,
    b: SourceTensor,
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
) -> tuple[str, AdaptedWeight]:
    """A weight's factors, and what is wrong with them, if anything is."""
    module = weight.removesuffix(".weight")
    rank = _by_pattern(settings.get("rank_pattern") or {}, module, settings["r"])
    alpha = _by_pattern(settings.get("alpha_pattern") or {}, module, settings["lora_alpha"])
    embedding = _is_embedding(a.name)
    want = [(rank, *shape[1:]), (*shape[:1], rank)]
    found = [tuple(reversed(t.shape)) if embedding else t.shape for t in (a, b)]
    problem = ""
    if embedding != _is_embedding(b.name) or (embedding and weight != EMBED):
        problem = f"{weight} has factors of an embedding; expected those of a matrix"
    elif found != want or len(shape) != 2:
        problem = (
            f"{weight} has factors {found[0]} and {found[1]}; {CONFIG} says {want[0]}, {want[1]}"
        )
    elif type(alpha) not in (int, float):
        problem = f"{weight} has alpha {alpha!r:.40}; expected a number"
    try:
        scale = scaling(rank, alpha, bool(settings.get("use_rslora")))
    except (ValueError, TypeError) as error:
        problem, scale = problem or f"{weight}: {error}", 0.0
    return problem, AdaptedWeight(a, b, scale)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT has it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({_short(pattern)})$", module):
            return value
    return default


def _astray(
    settings: Mapping[str, Any],
    pairs: Iterable[str],
    saved: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Weights that have factors and should not, or lack those that they should have."""
    problems = []
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    whole = settings.get("modules_to_save") or []
    meant = {n for n in matrices if _is_target(settings, n.removesuffix(".weight"))}
    meant -= {n for n in matrices if any(_under(n, module) for module in whole)}
    for name in sorted(set(pairs) - meant):
        problems.append(f"{name} has factors; target_modules does not name it")
    for name in sorted(meant - set(pairs)):
        problems.append(f"{name} lacks factors; target_modules names it")
    called = {n for n in shapes if any(_under(n, module) for module in whole)}
    for name in sorted(set(saved) - called):
        problems.append(f"{name} was saved whole; modules_to_save does not name it")
    lacking = [m for m in whole if not any(_under(n, m) for n in saved)]
    if lacking:
        problems.append(f"{listed(lacking)} of modules_to_save is not in the file")
    return problems


def _under(name: str, module: str) -> bool:
    """Whether a tensor is of a module that goes by the last parts of its name."""
    own = name.rsplit(".", 1)[0]
    return own == module or own.endswith(f".{module}")


def _is_target(settings: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT adapts a module, by target_modules, exclude_modules and layers_to_transform."""
    if _named(settings.get("exclude_modules") or [], module):
        return False
    target = settings["target_modules"]
    if target == "all-linear":
        return f"{module}.weight" not in (EMBED, HEAD)
    if not _named(target, module):
        return False
    layers = settings.get("layers_to_transform")
    if isinstance(target, str) or module in target or layers is None or layers == []:
        return True
    patterns = settings.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = _LAYER.match(module)
    if patterns:
        tries = (re.match(rf"(?:^|.*?\.){_short(p)}\.(?P<index>\d+)\.", module) for p in patterns)
        found = next(filter(None, tries), None)
    wanted = [layers] if isinstance(layers, int) else layers
    return found is not None and int(found["index"]) in wanted


def _named(what: str | list[str], module: str) -> bool:
    """Whether a pattern matches a module's whole name, or a list has the end of it."""
    if isinstance(what, str):
        return re.fullmatch(_short(what), module) is not None
    return any(module == name or module.endswith(f".{name}") for name in what)


def _short(pattern: str) -> str:
    if len(pattern) > _LONGEST_PATTERN:
        raise SourceError(CONFIG, f"has a pattern of {len(pattern)} characters: {pattern[:40]!r}")
    return pattern


def _is_embedding(name: str) -> bool:
    return "lora_embedding_" in name


# ---- writing


def copy_name(weight: str) -> str:
    """What PEFT calls the base's own tensor beside factors of it."""
    return PREFIX + weight.removesuffix(".weight") + _COPY


def factor_names(weight: str) -> tuple[str, str]:
    """What PEFT calls a weight's (a, b) in its file."""
    module = PREFIX + weight.removesuffix(".weight")
    if weight == EMBED:
        return f"{module}.lora_embedding_B", f"{module}.lora_embedding_A"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def write_adapter(
    folder: Path,
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Writes an adapter with PEFT's settings; whole or not at all.

    Args:
      folder: where to; nothing may be there.
      factors: (a [R, I], b [O, R]) by Hugging Face tensor, without the scale; a rank that is not
        `rank` is kept in rank_pattern, with an alpha that leaves the scale as it is.
      rank: R of most.
      alpha, rslora: what scales them.
      more: further files of the folder.

    Raises:
      ValueError: something is at that place already.
    """
    scale = scaling(rank, alpha, rslora)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, (a, b) in factors.items():
        one, other = factor_names(name)
        turned = (a.T, b.T) if name == EMBED else (a, b)
        tensors |= zip((one, other), map(np.ascontiguousarray, turned), strict=True)
        own = a.shape[0]
        if own != rank:
            module = re.escape(name.removesuffix(".weight"))
            ranks[module], alphas[module] = own, scale * (own**0.5 if rslora else own)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": sorted(name.removesuffix(".weight") for name in factors),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_dora": False,
        "modules_to_save": None,
        "base_model_name_or_path": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    write_folder(folder, tensors, settings, more or {})


def write_folder(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    more: Mapping[str, bytes],
) -> None:
    """Writes a PEFT folder: whole or not at all.

    Raises:
      ValueError: something is at that place already.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another place")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / CONFIG).write_text(
        json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    for name, data in more.items():
        (temporary / name).write_bytes(data)
    for path in temporary.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    temporary.rename(folder)


def read_factors(adapter: PeftAdapter) -> dict[str, Factors]:
    """Every weight's factors in float32, the scale folded into b.

    Raises:
      SourceError: the adapter has tensors that were trained whole, which have no factors, or values
        that are not finite.
    """
    if adapter.saved:
        raise SourceError(adapter.name, f"{listed(sorted(adapter.saved))} was trained whole")
    found: dict[str, Factors] = {}
    for name, weight in adapter.weights.items():
        a, b = (part.astype(np.float32) for part in weight.read())
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise SourceError(adapter.name, f"{name} has values that are NaN or infinite")
        found[name] = Factors(a, b * np.float32(weight.scale))
    return found
