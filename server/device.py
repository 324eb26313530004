"""What the worker asks of an engine, which is all that it knows of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from server.events import Part
from zen_jax.chunking import Shape
from zen_jax.engine_state import Chunk


class Sizes(Protocol):
    """What the worker must know of the engine's sizes; `zen_jax.engine.EngineConfig` has them."""

    @property
    def rows(self) -> int:
        """Requests that decode at once."""
        ...

    @property
    def max_length(self) -> int:
        """The most tokens of a request, prompt and answer together."""
        ...

    @property
    def max_steps(self) -> int:
        """Decode steps that a call makes at most."""
        ...

    @property
    def all_pages(self) -> int:
        """Pages of the cache."""
        ...

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        ...

    def table(self, pages: Mapping[int, Sequence[int]]) -> Any:
        """What a call that decodes takes, of the pages of its rows."""
        ...

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """(C, T) of calls that read prompts."""
        ...


class DeviceEngine(Protocol):
    """What the worker asks of an engine; `zen_jax.engine.Engine` is one."""

    @property
    def sizes(self) -> Sizes: ...
    @property
    def compiles(self) -> int: ...
    @property
    def reach(self) -> int | None: ...
    def init_state(self) -> Any: ...
    def init_bank(self) -> Any: ...
    def write_slot(self, bank: Any, slot: int, staged: Any) -> Any: ...
    def check(self, chunk: Chunk) -> None: ...
    def prefill(self, bank: Any, state: Any, chunks: Sequence[Chunk]) -> tuple[Any, Any]: ...
    def decode(
        self, bank: Any, state: Any, steps: int, rows: Sequence[int], table: Any
    ) -> tuple[Any, Any]: ...


def chunk_of(part: Part, targets: Sequence[int]) -> Chunk:
    """A part of a request's prompt as the engine takes it."""
    arrived, request = part.arrived, part.arrived.request
    return Chunk(
        part.row,
        part.slot,
        part.tokens,
        part.start,
        part.last,
        request.sampling,
        request.seed,
        request.sample,
        stops=sorted(arrived.stops),
        end=len(request.token_ids) + arrived.limit,
        prompt=len(request.token_ids),
        targets=targets,
        pages=part.pages,
        before=part.before,
    )
