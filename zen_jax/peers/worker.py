"""A process that holds one model in one system and answers requests in JSON, a line each.

    python -P zen_jax/peers/worker.py SYSTEM [OPTION ...] < requests > replies

    {"do": "load", "path": P, "threads": N, "length": S}           -> {"versions": {NAME: VERSION}}
    {"do": "run", "prompt": [ID, ...], "steps": K, "variant": B}   -> {"prefill_s", "decode_s",
                                                                       "tokens": [ID, ...]}
    what goes wrong                                                -> {"error": TEXT}

A run reads the prompt and chooses a token, then K more, each the likeliest, each brought to the
host before its run ends; `tokens` are all K + 1. Seconds are of the work alone. The file is run by
other Pythons than ours, from 3.11 on, so it imports nothing of the project but for our own engine.
It ends with its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

# Tokens that llama.cpp takes in at once; what its own benchmark takes too.
_BATCH = 512


class Model(Protocol):
    """A system with its weights loaded."""

    versions: dict[str, str]

    def read(self, prompt: Sequence[int], variant: bool) -> int:
        """Forgets everything, reads a prompt and gives the token that follows."""
        ...

    def go_on(self, token: int, steps: int) -> list[int]:
        """The tokens after the newest one, which is `token`."""
        ...


class LlamaCpp:
    """llama.cpp through the functions of its own library; path is a GGUF file."""

    def __init__(self, path: str, threads: int, length: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]
        import numpy as np

        self._c, self._np = llama_cpp, np
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise ValueError(f"{path} was not loaded")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = length
        settings.n_batch = settings.n_ubatch = _BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise ValueError(f"no context of {length} tokens was made")
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def read(self, prompt: Sequence[int], variant: bool) -> int:
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, False)
        for start in range(0, len(prompt) - _BATCH, _BATCH):
            self._take(prompt[start : start + _BATCH])
        return self._take(prompt[(len(prompt) - 1) // _BATCH * _BATCH :])

    def go_on(self, token: int, steps: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(steps):
            token = self._take([token])
            tokens.append(token)
        return tokens

    def _take(self, tokens: Sequence[int]) -> int:
        """Takes tokens in; gives the likeliest next one."""
        array = (self._c.llama_token * len(tokens))(*tokens)
        status = self._c.llama_decode(
            self._context, self._c.llama_batch_get_one(array, len(tokens))
        )
        if status:
            raise ValueError(f"llama_decode says {status}")
        logits = self._c.llama_get_logits_ith(self._context, -1)
        return int(self._np.ctypeslib.as_array(logits, (self._size,)).argmax())


class Transformers:
    """transformers on torch's CPU; path is a Hugging Face folder."""

    def __init__(self, path: str, threads: int, length: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, local_files_only=True
        ).eval()
        self._cache: Any = None
        self.versions = {name: version(name) for name in ("torch", "transformers")}

    def read(self, prompt: Sequence[int], variant: bool) -> int:
        self._cache = None
        return self._take(prompt)

    def go_on(self, token: int, steps: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(steps):
            token = self._take([token])
            tokens.append(token)
        return tokens

    def _take(self, tokens: Sequence[int]) -> int:
        """Takes tokens in; gives the likeliest next one."""
        with self._torch.inference_mode():
            out = self._model(
                input_ids=self._torch.tensor([list(tokens)]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache = out.past_key_values
        return int(out.logits[0, -1].argmax())


def _ours(path: str, threads: int, length: int, products: str) -> Model:
    from zen_jax.peers.ours import Ours

    return Ours(path, threads, length, products)


# (path, threads, length, options of the command line) -> the loaded model.
Load = Callable[..., Model]
SYSTEMS: dict[str, Load] = {
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "zen": _ours,
}


def pin(threads: int) -> None:
    """Keeps this process to so many of its processors, where that can be done; before threads are
    started."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def answer(
    load: Load, options: Sequence[str], model: Model | None, request: Mapping[str, Any]
) -> tuple[Model, dict[str, Any]]:
    """(model, reply) to a request; see the top of this file."""
    if request["do"] == "load":
        pin(request["threads"])
        model = load(request["path"], request["threads"], request["length"], *options)
        return model, {"versions": model.versions}
    if model is None:
        raise ValueError("nothing is loaded")
    start = time.perf_counter()
    first = model.read(request["prompt"], request["variant"])
    read = time.perf_counter()
    more = model.go_on(first, request["steps"])
    done = time.perf_counter()
    return model, {"prefill_s": read - start, "decode_s": done - read, "tokens": [first, *more]}


def main(arguments: Sequence[str]) -> None:
    """Answers until the input ends."""
    # Whatever a library prints is none of the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    load, options, model = SYSTEMS[arguments[0]], arguments[1:], None
    for line in sys.stdin:
        try:
            model, reply = answer(load, options, model, json.loads(line))
        except Exception as error:
            told = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {told[0]}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
