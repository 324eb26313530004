"""The worker: what it answers, that libraries' prints do not disturb it, and each system in it."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import zen_jax
from zen_jax import benchmark_decode
from zen_jax.peers import worker
from zen_jax.peers.ours import Ours

_COUNTING = """
import os
from zen_jax import benchmark_decode
from zen_jax.peers import worker
class Counting:
    versions = {"counting": "1"}
    def __init__(self, path, threads, length, option):
        print("counting for", option, "on", len(os.sched_getaffinity(0)))
        os.write(1, b"from C\\n")
    def read(self, prompt, variant):
        if variant:
            raise KeyError("no variant")
        return prompt[-1] + 1
    def go_on(self, token, steps):
        return [token + 1 + i for i in range(steps)]
worker.SYSTEMS["counting"] = Counting
worker.main(["counting", "once"])
"""


def test_a_worker_answers_line_by_line() -> None:
    run = {"do": "run", "prompt": [3, 4], "steps": 2, "variant": False}
    requests = [
        run,
        {"do": "load", "path": "P", "threads": 1, "length": 8},
        run,
        run | {"variant": True},
        {"do": "run"},
    ]
    done = subprocess.run(
        [sys.executable, "-c", _COUNTING],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    early, loaded, ran, failed, short = map(json.loads, done.stdout.splitlines())
    assert early == {"error": "ValueError: nothing is loaded"}
    assert loaded == {"versions": {"counting": "1"}}
    assert ran["tokens"] == [5, 6, 7] and ran["prefill_s"] >= 0 and ran["decode_s"] >= 0
    assert failed == {"error": "KeyError: 'no variant'"} and short == {
        "error": "KeyError: 'prompt'"
    }
    assert sorted(done.stderr.splitlines()) == ["counting for once on 1", "from C"]


def test_a_worker_for_other_pythons_imports_nothing_of_the_project() -> None:
    """Nor what only later Pythons or our packages have."""
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, worker.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"zen_jax", "numpy", "jax", "torch"} & set(done.stdout.split())


def test_our_engine_chooses_the_likeliest_tokens(demo_store: Path, monkeypatch) -> None:
    monkeypatch.setattr(benchmark_decode, "_SCALE", 0.05)  # enough to be seen in the tokens
    ours = Ours(str(demo_store), 1, 96, "float32")
    prompt = list(b"The river")
    family, want = zen_jax.load(demo_store), list(prompt)
    while len(want) < len(prompt) + 20:
        padded = want + [0] * (len(prompt) + 20 - len(want))
        logits = family["base"].logits([padded])[0, len(want) - 1]
        want.append(int(logits.argmax()))
    want = want[len(prompt) :]
    first = ours.read(prompt, variant=False)
    assert [first, *ours.go_on(first, 19)] == want  # several calls of several steps
    varied = ours.read(prompt, variant=True)
    assert [varied, *ours.go_on(varied, 19)] != want
    # Nothing of the run before is left, and there may be no step at all.
    assert ours.read(prompt, variant=False) == first and ours.go_on(first, 0) == []
    assert ours.go_on(first, 1) == want[1:2]
    assert ours.versions.keys() == {"jax"}


def test_llama_cpp_reads_a_prompt_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library: the likeliest token is the number of tokens it holds."""
    taken: list[list[int]] = []

    def decode(context: object, batch: Sequence[int]) -> int:
        taken.append(list(batch))
        return 1 if 99 in batch else 0

    def logits(context: object, place: int) -> object:
        assert place == -1
        values = np.zeros(2048, np.float32)
        values[sum(map(len, taken))] = 1
        return values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    settings = SimpleNamespace()
    library = SimpleNamespace(
        llama_model_default_params=lambda: None,
        llama_model_load_from_file=lambda path, params: path == b"there",
        llama_context_default_params=lambda: settings,
        llama_init_from_model=lambda model, given: given,
        llama_model_get_vocab=lambda model: model,
        llama_vocab_n_tokens=lambda vocabulary: 2048,
        llama_get_memory=lambda context: context,
        llama_memory_clear=lambda memory, data: taken.clear(),
        llama_token=ctypes.c_int32,
        llama_batch_get_one=lambda array, count: array[:count],
        llama_decode=decode,
        llama_get_logits_ith=logits,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setattr(worker, "version", lambda name: "1")
    model = worker.LlamaCpp("there", 3, 640)
    assert (settings.n_ctx, settings.n_threads, settings.n_threads_batch) == (640, 3, 3)
    for size, batches in ((1, [1]), (512, [512]), (513, [512, 1]), (1024, [512, 512])):
        prompt = [7] * (size - 1) + [8]
        assert model.read(prompt, False) == size
        assert [len(batch) for batch in taken] == batches and taken[-1][-1] == 8
    assert model.go_on(1024, 2) == [1025, 1026] and taken[-2:] == [[1024], [1025]]
    with pytest.raises(ValueError, match="llama_decode says 1"):
        model.go_on(99, 1)
    with pytest.raises(ValueError, match="elsewhere was not loaded"):
        worker.LlamaCpp("elsewhere", 3, 640)
