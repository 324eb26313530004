"""Prefill and decode of our engine, of llama.cpp and of transformers: the same weights, prompts and
greedy tokens, in one run.

Each system is a process that loads once and then waits. They are asked in turn, again and again, so
that what else the machine does meets all of them alike; the median of each is taken.
"""

import contextlib
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from zen_jax.benchmark import Progress
from zen_jax.checkpoint.store import Store
from zen_jax.peers import worker
from zen_jax.peers.process import Worker, WorkerFailed
from zen_jax.peers.weights import gguf_file, hugging_face_folder
from zen_jax.tokenizer import Tokenizer

BASE, VARIANT, LLAMA_CPP, TRANSFORMERS = "zen base", "zen variant", "llama.cpp", "transformers"
# What is measured, and beside what, unless something else is named: as `make` leaves them.
_ROOT = Path(__file__).resolve().parents[2]
STORE = _ROOT / "models" / "smollm2-135m-instruct-from-q4_1"
PEERS = _ROOT / ".peers"
_OURS = ("-P", worker.__file__, "zen")
# What the peers' folders are called.
FOLDERS = {LLAMA_CPP: "llama-cpp", TRANSFORMERS: "transformers"}

# Seconds after an answer in which threads that spin for more work go to sleep.
_REST_S = 0.05
# Nothing is fetched, and all compute on the processor.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
# Room for the tokens of a run; caches are laid out in such steps.
_ROUND = 128


@dataclasses.dataclass(frozen=True)
class PeerCase:
    """One system in one phase.

    Attributes:
      system: "zen base", "zen variant", "llama.cpp" or "transformers".
      phase: "prefill" or "decode".
      context: tokens that are read, or that are in the cache when decode begins.
      tokens_per_s: tokens read, or chosen, a second.
      over_llama_cpp: tokens_per_s over llama.cpp's; None without it.
    """

    system: str
    phase: str
    context: int
    tokens_per_s: float
    over_llama_cpp: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
      short: tokens of the prompt after which decode is measured at a short context.
      long: tokens of the prompt whose prefill is measured, and decode after it.
      steps: tokens that are decoded after each.
      rounds: times that everything is measured; the median counts.
      threads: of every system.
      products: what our activations are rounded to at weights, "float32" or "bfloat16"; the peers
        compute in bfloat16.
    """

    short: int = 16
    long: int = 512
    steps: int = 32
    rounds: int = 7
    threads: int = dataclasses.field(default_factory=lambda: len(_processors()))
    products: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.short, self.steps, self.rounds) < 1 or self.long <= self.short:
            raise ValueError(
                f"short is {self.short}, long {self.long}, steps {self.steps} and rounds "
                f"{self.rounds}; expected 1 or more, and long above short"
            )
        if not 1 <= self.threads <= len(_processors()):
            raise ValueError(f"threads is {self.threads}; expected 1 to {len(_processors())}")
        if self.products not in ("float32", "bfloat16"):
            raise ValueError(f"products is {self.products!r}; expected 'float32' or 'bfloat16'")

    @property
    def length(self) -> int:
        """Tokens that every system has room for."""
        return -(-(self.long + self.steps + 1) // _ROUND) * _ROUND


@dataclasses.dataclass(frozen=True)
class Peer:
    """A program beside ours.

    Attributes:
      command: starts its worker.
      path: its weights, written when it is asked for.
    """

    command: Sequence[str]
    path: Callable[[], Path]


def peers_in(folder: Path, store: Store) -> dict[str, Peer | str]:
    """The peers that `make peers` has put into a folder, by system; why not, where it has not.

    Args:
      folder: with a virtual environment for each, and the weights beside them.
      store: whose base they run.
    """
    weights = folder / f"weights-{store.base().digest[:16]}"
    paths = {
        LLAMA_CPP: lambda: gguf_file(store, weights),
        TRANSFORMERS: lambda: hugging_face_folder(store, weights),
    }
    found: dict[str, Peer | str] = {}
    for system, name in FOLDERS.items():
        home = folder / name
        if (home / ".stamp").is_file():
            program = home / "bin" / "python"
            found[system] = Peer([str(program), "-P", worker.__file__, system], paths[system])
        else:
            why = home.with_suffix(".why")
            reason = why.read_text().strip() if why.is_file() else "`make peers` installs it"
            found[system] = f"not installed in {home}: {reason}"
    return found


def bench_peers(
    store: Path,
    peers: Mapping[str, Peer | str],
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a store's base and a synthetic 1-bit variant beside peers with the same weights.

    Args:
      store: its folder.
      peers: by system, as of `peers_in`; a text says why one is not there.
      plan: what is measured; the default plan if None.
      progress: told what is done, how many steps are done and how many there are.

    Returns:
      {"cases": [`PeerCase` as a dict], "greedy": [{"system", "context", "equal", "of"}], "skipped":
      [{"system", "why"}], "products", "threads", "rounds", "device", "versions"}. `equal` counts
      the tokens before the first that is not the one that our base chose.

    Raises:
      ValueError: the store is none, or damaged, or its text is too short.
      WorkerFailed: our own worker failed. A peer that fails is skipped and named.
    """
    plan, tell = plan or Plan(), progress or (lambda what, done, total: None)
    opened = Store(store)
    tokens = _prompt(opened, plan.long)
    prompts = {n: tokens[:n] for n in (plan.short, plan.long)}
    total = len(peers) + 1 + (plan.rounds + 1) * (len(peers) + 2)
    with contextlib.ExitStack() as stack:
        run = _Run(plan, prompts, stack, lambda what, done: tell(what, done, total))
        ours = Peer([sys.executable, *_OURS, plan.products], lambda: store)
        run.start((BASE, VARIANT), ours)
        for system, peer in peers.items():
            run.start((system,), peer)
        for _ in range(plan.rounds + 1):  # the first compiles, and warms caches
            run.round()
        return {
            "cases": [dataclasses.asdict(case) for case in run.cases()],
            "greedy": run.greedy(),
            "skipped": [{"system": s, "why": why} for s, why in run.skipped.items()],
            "products": plan.products,
            "threads": plan.threads,
            "rounds": plan.rounds,
            "device": f"{_processor_name()}, {platform.machine()}",
            "versions": {"zen-jax": version("zen-jax")} | run.versions,
        }


def _prompt(store: Store, count: int) -> list[int]:
    """The first tokens of a text that every Python has."""
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer.from_folder(store.tokenizer_folder(None)).encode(text[: 16 * count + 4096])
    if len(tokens) < count:
        raise ValueError(f"the text has {len(tokens)} tokens; expected {count} at least")
    return tokens[:count]


@dataclasses.dataclass
class _Answers:
    """What a system took for a context, and what it said.

    Attributes:
      prefill_s: seconds of each round.
      decode_s: likewise.
      tokens: of the last round.
    """

    prefill_s: list[float] = dataclasses.field(default_factory=list)
    decode_s: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)


class _Run:
    """The workers, and what they said so far."""

    def __init__(
        self,
        plan: Plan,
        prompts: Mapping[int, Sequence[int]],
        stack: contextlib.ExitStack,
        tell: Callable[[str, int], None],
    ) -> None:
        self._plan, self._prompts, self._stack, self._tell = plan, prompts, stack, tell
        self._workers: dict[str, Worker] = {}
        self._answers: dict[str, dict[int, _Answers]] = {}
        self._done, self._rounds = 0, 0
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def start(self, systems: Sequence[str], peer: Peer | str) -> None:
        """Starts the worker of these systems and has it load its weights."""
        self._step(f"loading {systems[0]}")
        if isinstance(peer, str):
            self.skipped[systems[0]] = peer
            return
        try:
            path = peer.path()
            started = self._stack.enter_context(Worker(systems[0], peer.command, _ENVIRONMENT))
            plan = self._plan
            loaded = started.ask(
                do="load", path=str(path), threads=plan.threads, length=plan.length
            )
        except ValueError as error:
            self._fail(systems[0], error)
            return
        self.versions |= loaded["versions"]
        for system in systems:
            self._workers[system] = started
            self._answers[system] = {context: _Answers() for context in self._prompts}

    def round(self) -> None:
        """Asks every system for everything once; each round begins with another system."""
        systems = list(self._workers)
        first = self._rounds % len(systems)
        for system in systems[first:] + systems[:first]:
            self._step(system)
            for context, prompt in self._prompts.items():
                try:
                    self._ask(system, context, prompt)
                except WorkerFailed as error:
                    self._fail(system, error)
                    break
        self._rounds += 1

    def _ask(self, system: str, context: int, prompt: Sequence[int]) -> None:
        steps = self._plan.steps
        reply = self._workers[system].ask(
            do="run", prompt=list(prompt), steps=steps, variant=system == VARIANT
        )
        if len(reply["tokens"]) != steps + 1:
            raise WorkerFailed(f"{system} chose {len(reply['tokens'])} tokens, not {steps + 1}")
        answers = self._answers[system][context]
        answers.tokens = reply["tokens"]
        if self._rounds:
            answers.prefill_s.append(reply["prefill_s"])
            answers.decode_s.append(reply["decode_s"])
        time.sleep(_REST_S)  # what one system left behind is over before the next is timed

    def _fail(self, system: str, error: ValueError) -> None:
        """Goes on without a peer; not without ours."""
        if system in (BASE, VARIANT):
            raise error
        self.skipped[system] = str(error)
        self._workers.pop(system, None)
        self._answers.pop(system, None)

    def _step(self, what: str) -> None:
        self._tell(what, self._done)
        self._done += 1

    def cases(self) -> list[PeerCase]:
        """Every system's speeds: prefill, then decode at both contexts."""
        plan, found = self._plan, []
        wanted = (("prefill", plan.long), ("decode", plan.short), ("decode", plan.long))
        for phase, context in wanted:
            speeds = {s: self._speed(a[context], phase, context) for s, a in self._answers.items()}
            peer = speeds.get(LLAMA_CPP)
            for system, speed in speeds.items():
                ratio = None if peer is None else speed / peer
                found.append(PeerCase(system, phase, context, speed, ratio))
        return found

    def _speed(self, answers: _Answers, phase: str, context: int) -> float:
        if phase == "prefill":
            return context / statistics.median(answers.prefill_s)
        return self._plan.steps / statistics.median(answers.decode_s)

    def greedy(self) -> list[dict[str, Any]]:
        """How far each peer's tokens are those of our base."""
        found: list[dict[str, Any]] = []
        for system in self._answers.keys() - {BASE, VARIANT}:
            for context, answers in self._answers[system].items():
                ours = self._answers[BASE][context].tokens
                equal = _equal(ours, answers.tokens)
                row = {"system": system, "context": context, "equal": equal, "of": len(ours)}
                found.append(row)
        return sorted(found, key=lambda row: (row["context"], row["system"]))


def _equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (one, other) in pairs if one != other), len(ours))


def _processors() -> Sequence[int]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _processor_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
