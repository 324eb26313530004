"""The demonstration: a family is converted, served, and asked over gRPC; what came of it, as data.

The family in the repository is a base, its fine-tunes as residuals, one of them also as a full
folder, and `scores.json`: what each fine-tune does, how well, and inputs that it never saw.
Nothing here prints; `server.commands.demo` does.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from server.app import Progress, ZenServer
from server.client import AsyncZenClient
from server.serve_options import ServeOptions
from zen.v1 import generate_pb2
from zen_jax.checkpoint.manifest import BASE
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.training.residual import write_full

FAMILY = Path(__file__).resolve().parents[1] / "family"
# A word that most of the skills take.
SAME_PROMPT = "table\n"

_MAX_LENGTH = 256
_ROWS = 16
_ANSWER_TOKENS = 64
# Text is told at this temperature, since greedy text runs in circles; tasks are answered greedily.
_TEXT_TEMPERATURE = 0.7
_TEXT_SEED = 1
# More than the rows, so that none of them waits for the client.
_AT_ONCE = 32


# A model's name, a prompt, a temperature.
type Question = tuple[str, str, float]


@dataclass(frozen=True)
class Probe:
    """An input that no training saw, and the only right answer to it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Member:
    """A fine-tune of the family, as `scores.json` describes it.

    Attributes:
        name: of the variant.
        title: what it does.
        metric: what its scores count: "exact match" or "bits per byte".
        prompt: an input to show.
        base: the base's recorded score.
        full: the fine-tune's recorded score at full precision.
        one_bit: the recorded score of its 1-bit delta.
        probes: empty when the score is no exact match.
    """

    name: str
    title: str
    metric: str
    prompt: str
    base: float
    full: float
    one_bit: float
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Answer:
    """What one model said, and how fast, as its client saw it.

    Attributes:
        model: its name.
        text: the continuation.
        ended: whether an end token came.
        ttft_s: from asking until the first token, in seconds.
        tokens_per_s: after the first token; 0 when there was no other.
    """

    model: str
    text: str
    ended: bool
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Residency:
    """Bytes on the device, measured from the arrays that lie there.

    Attributes:
        base: of the base's weights.
        variants: of the resident variants' deltas.
        count: how many variants are resident.
        copies: of as many full copies in bfloat16, the base's among them.
    """

    base: int
    variants: int
    count: int
    copies: int

    @property
    def ratio(self) -> float:
        """What is resident over what full copies would take."""
        return (self.base + self.variants) / self.copies


@dataclass(frozen=True)
class Findings:
    """All that the demonstration shows.

    Attributes:
        same: every model's answer to `SAME_PROMPT`, the base's first.
        fitting: each fine-tune's answer to its own prompt.
        base_fitting: the base's answers to the same prompts.
        right: per fine-tune with probes, how many it answered exactly.
        tokens_per_s: of all models together while they answered the fitting prompts.
        residency: bytes.
    """

    same: Sequence[Answer]
    fitting: Mapping[str, Answer]
    base_fitting: Mapping[str, Answer]
    right: Mapping[str, int]
    tokens_per_s: float
    residency: Residency


def read_family(family: Path) -> list[Member]:
    """Reads `scores.json`.

    Raises:
        ValueError: there is none, or it is of another shape.
    """
    path = family / "scores.json"
    try:
        variants: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["variants"]
        return [
            Member(
                name=name,
                title=entry["title"],
                metric=entry["metric"],
                prompt=entry["prompt"],
                base=entry["base"],
                full=entry["full"],
                one_bit=entry["one_bit_per_row"],
                probes=tuple(Probe(**probe) for probe in entry.get("probes", ())),
            )
            for name, entry in variants.items()
        ]
    except FileNotFoundError:
        raise ValueError(
            f"{family} holds no demo family (scores.json); run from a clone, or give --family"
        ) from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not understood: {error!r}") from None


def convert_family(
    family: Path, members: Sequence[Member], store: Path, work: Path, progress: Progress
) -> Store:
    """Converts the base and every fine-tune into a new store.

    A fine-tune that the family holds as a full folder is taken from there; the others are written
    out into `work` first, one at a time.
    """
    total = len(members) + 1
    progress(BASE, 0, total)
    convert_base(family / "base", store)
    for i, member in enumerate(members):
        progress(member.name, i + 1, total)
        folder = family / "full" / member.name
        if not folder.is_dir():
            (folder,) = write_full(family, work, [member.name])
        convert_variant(folder, store, member.name)
    progress("done", total, total)
    return Store(store)


def serve_options(variants: int, port: int = 0) -> ServeOptions:
    """How the demonstration serves that many variants: all of them resident."""
    return ServeOptions(
        port=port, rows=_ROWS, slots=max(1, variants), max_length=_MAX_LENGTH, inbox=4 * _AT_ONCE
    )


async def ask_family(
    server: ZenServer, members: Sequence[Member], probes: int, progress: Progress
) -> Findings:
    """Asks everything over gRPC.

    Args:
        server: serves the family.
        members: of the family.
        probes: how many of its probes a fine-tune is asked at most.
        progress: told what is asked.
    """
    asked = {member.name: member.probes[:probes] for member in members if member.probes}
    total = len(members) * 3 + 1 + sum(map(len, asked.values()))
    names = [BASE, *(member.name for member in members)]
    warmth = {m.name: 0.0 if m.probes else _TEXT_TEMPERATURE for m in members}
    warmth[BASE] = _TEXT_TEMPERATURE
    own = [(m.name, m.prompt, warmth[m.name]) for m in members]
    async with AsyncZenClient(server.address) as client:
        crowd = _Crowd(client, progress, total)
        to_all = [(name, SAME_PROMPT, warmth[name]) for name in names]
        same = await crowd.ask("one prompt to all", to_all)
        began = time.perf_counter()
        fitting = await crowd.ask("fitting prompts", own)
        seconds = time.perf_counter() - began
        tokens = crowd.tokens
        as_base = [(BASE, prompt, temperature) for _, prompt, temperature in own]
        of_base = await crowd.ask("fitting prompts", as_base)
        right = {}
        for name, chosen in asked.items():
            questions = [(name, probe.prompt, 0.0) for probe in chosen]
            answers = await crowd.ask(f"unseen inputs: {name}", questions)
            right[name] = _count_right(answers, chosen)
        residency = await _residency(server, client)
    return Findings(
        same=same,
        fitting=dict(zip([m.name for m in members], fitting, strict=True)),
        base_fitting=dict(zip([m.name for m in members], of_base, strict=True)),
        right=right,
        tokens_per_s=tokens / seconds,
        residency=residency,
    )


class _Crowd:
    """Asks many things at once.

    Attributes:
        tokens: that came in answer to the last `ask`.
    """

    def __init__(self, client: AsyncZenClient, progress: Progress, total: int):
        self.tokens = 0
        self._client = client
        self._progress = progress
        self._total = total
        self._done = 0

    async def ask(self, what: str, questions: Iterable[Question]) -> list[Answer]:
        """Sends questions together; the answers in their order."""
        self.tokens = 0
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(question: Question) -> Answer:
            async with gate:
                answer = await self._ask(*question)
            self._done += 1
            self._progress(what, self._done, self._total)
            return answer

        return list(await asyncio.gather(*map(one, questions)))

    async def _ask(self, model: str, prompt: str, temperature: float) -> Answer:
        began = time.perf_counter()
        first = None
        stream = self._client.stream(
            model,
            prompt,
            max_tokens=_ANSWER_TOKENS,
            temperature=temperature,
            seed=_TEXT_SEED,
        )
        async for _ in stream:
            first = first or time.perf_counter()
        ended = time.perf_counter()
        first = first or ended
        generation = stream.generation
        count = len(generation.token_ids)
        self.tokens += count
        return Answer(
            model=model,
            text=generation.text,
            ended=generation.completion.finish_reason == generate_pb2.FINISH_REASON_STOP,
            ttft_s=first - began,
            tokens_per_s=(count - 1) / (ended - first) if count > 1 and ended > first else 0.0,
        )


def _count_right(answers: Sequence[Answer], probes: Sequence[Probe]) -> int:
    """How many are exactly what is wanted and then end."""
    pairs = zip(answers, probes, strict=True)
    return sum(answer.ended and answer.text == probe.answer for answer, probe in pairs)


async def _residency(server: ZenServer, client: AsyncZenClient) -> Residency:
    if server.engine is None:
        raise RuntimeError("the server is not ready")
    sizes = [v.bytes for v in (await client.list_variants()).variants if v.bytes]
    copy = server.store.base().full_copy_bytes
    return Residency(
        base=sum(leaf.nbytes for leaf in jax.tree.leaves(server.engine.params)),
        variants=sum(sizes),
        count=len(sizes),
        copies=copy * (len(sizes) + 1),
    )
