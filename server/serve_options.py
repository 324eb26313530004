"""What can be chosen when a store is served."""

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path

from server.inbox import InboxLimits
from server.tls import TlsFiles
from zen_jax.eviction import Policy

_COLLECTOR = re.compile(r"https?://[^/\s]+/?", re.ASCII)


@dataclass(frozen=True)
class ServeOptions:
    """How to serve a store.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        http_port: likewise, for OpenAI's HTTP interface; None leaves it closed.
        rows: requests that run at once.
        slots: variants that can be resident at once; None takes as many as the store has, at
            most 14.
        max_length: tokens of a request, prompt and answer together; None takes the model's limit,
            at most 1,024.
        inbox: requests that may wait for a row before more are refused.
        inbox_tokens: of prompts that may wait; None sets no bound beside that on requests.
        inbox_per_model: requests for one model that may wait; None sets no bound of its own.
        half_life_s: in which a request for a variant counts half, in seconds.
        pinned: how many of the variants most asked for stay in memory; at most slots - 1 do.
        idle_after_s: a variant that was not used for so long goes first, in seconds.
        host_bytes: of host memory for variants beside the bank, and for loading; None takes a
            quarter of the machine's memory.
        devices: to shard the base over; None takes all accelerators, or one CPU.
        drain_s: how long requests that run may go on when the server stops, in seconds.
        write_timeout_s: how long a client may leave what was sent unread, in seconds.
        hang_s: the engine is given up when it has not answered for so long, in seconds.
        tokens: the file of tokens that are let in; None lets anybody in.
        operators: whether anybody may load, unload and pin variants where there are no tokens.
        reflection: whether the services can be asked what they are.
        tls: certificate and key to be known by; None serves in the clear.
        most_streams: calls at a time over one connection.
        products: what activations are rounded to just before a weight, "float32" (not at all) or
            "bfloat16".
        kv_bytes: of keys and values; None takes what all rows need at their longest.
        kv_dtype: what keys and values are kept as, see `EngineConfig`; None takes activations'.
        page_size: positions of a page of the cache, a multiple of 16.
        prefix_cache: whether prompts that begin alike share pages.
        traces: an OpenTelemetry collector's URL (OTLP over gRPC); None makes no traces.
        trace_share: of the calls that belong to no trace yet, from 0 to 1, those that begin one.
        profiles: the folder for recordings that operators ask for; None makes none.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    rows: int = 16
    slots: int | None = None
    max_length: int | None = None
    inbox: int = 64
    inbox_tokens: int | None = None
    inbox_per_model: int | None = None
    half_life_s: float = 300.0
    pinned: int = 6
    idle_after_s: float = 600.0
    host_bytes: int | None = None
    devices: int | None = None
    drain_s: float = 30.0
    write_timeout_s: float = 10.0
    hang_s: float = 120.0
    tokens: Path | None = None
    operators: bool = False
    reflection: bool = True
    tls: TlsFiles | None = None
    most_streams: int = 256
    products: str = "float32"
    kv_bytes: int | None = None
    kv_dtype: str | None = None
    page_size: int = 32
    prefix_cache: bool = True
    traces: str | None = None
    trace_share: float = 1.0
    profiles: Path | None = None

    def __post_init__(self) -> None:
        counts = ("rows", "slots", "inbox", "inbox_tokens", "inbox_per_model", "devices")
        for name in (*counts, "kv_bytes", "most_streams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        for name in ("port", "http_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 65536:
                raise ValueError(f"{name} is {value}; expected 0 to 65535")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"host_bytes is {self.host_bytes}; expected at least 0")
        if not 0 < self.hang_s < inf:
            raise ValueError(f"hang_s is {self.hang_s}; expected seconds, more than 0")
        for name in ("drain_s", "write_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected seconds")
        if self.products not in ("float32", "bfloat16"):
            raise ValueError(f"products is {self.products!r}; expected 'float32' or 'bfloat16'")
        self._check_traces()
        self.policy()

    def _check_traces(self) -> None:
        if self.traces is not None and not _COLLECTOR.fullmatch(self.traces):
            raise ValueError(
                f"traces is {self.traces!r}; expected a URL such as http://localhost:4317"
            )
        if not 0 <= self.trace_share <= 1:
            raise ValueError(f"trace_share is {self.trace_share}; expected 0 to 1")

    def policy(self) -> Policy:
        """Which variants stay in memory.

        Raises:
            ValueError: a setting is out of range.
        """
        return Policy(
            half_life_s=self.half_life_s,
            recency_s=self.half_life_s,
            pinned=self.pinned,
            idle_after_s=self.idle_after_s,
        )

    def inbox_limits(self) -> InboxLimits:
        """How much may wait for a row."""
        return InboxLimits(
            requests=self.inbox,
            tokens=inf if self.inbox_tokens is None else self.inbox_tokens,
            per_model=inf if self.inbox_per_model is None else self.inbox_per_model,
        )
