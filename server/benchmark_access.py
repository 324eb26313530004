"""What being let in and being watched costs: a server with TLS, tokens, quotas, traces and metrics
beside the same server without.

Two of each run in this process, so that what two equal servers differ by is seen beside what the
guard costs. One request at a time, which server first by chance; no two prompts begin alike. The
collector of traces is a process of its own, as it would be.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from server.app import Progress, running
from server.auth import Right, new_token
from server.client import ZenClient
from server.client_access import Access
from server.serve_options import ServeOptions
from server.tls import TlsFiles
from zen_jax.benchmark import device_and_versions
from zen_jax.checkpoint.manifest import BASE
from zen_jax.checkpoint.store import Store

_WARM = 8
_NAMES = ("plain", "guarded")
# Which of the names each server has, in the order in which they start: neither kind is first alone.
_KINDS = (0, 1, 1, 0)


@dataclass(frozen=True)
class AccessPlan:
    """What to measure.

    Attributes:
        requests: timed of each server.
        prompt_tokens: of each prompt.
        answer_tokens: of each answer.

    Raises:
        ValueError: a number is too small.
    """

    requests: int = 300
    prompt_tokens: int = 128
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        for name, least in (("requests", 2), ("prompt_tokens", 1), ("answer_tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")


def bench_access(path: Path, plan: AccessPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Measures on this machine.

    Returns:
        {"servers": {"plain" | "guarded": {"ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms",
        "tpot_p99_ms"}}, "over_plain": {"ttft", "ttft_low", "ttft_high", "tpot", ...},
        "over_same": {"plain" | "guarded": the same of the second over the first}, "added_ms": the
        same names, of the median difference in a round, "spans", "plan", "device", "versions"}.
        Ratios are of medians; their ends are the 2.5th and the 97.5th percentile of 2,000
        bootstrap resamples of the rounds, each a request of every server.

    Raises:
        ValueError: there is no store, prompts do not fit, or `trustme`, which makes the
            certificate, is not installed.
    """
    store = Store(path)
    length = plan.prompt_tokens + plan.answer_tokens
    most = store.base().config.max_position
    if length > most:
        raise ValueError(f"{length} tokens a request do not fit; the model has {most} positions")
    options = ServeOptions(port=0, http_port=0, rows=4, slots=1, max_length=length)
    with (
        tempfile.TemporaryDirectory(prefix="zen-bench-") as folder,
        _collector() as (url, received),
    ):
        guarded, access = _guard(options, Path(folder), url)
        with ExitStack() as stack:
            clients: list[ZenClient] = []
            for kind in _KINDS:
                served = stack.enter_context(running(store, guarded if kind else options, progress))
                client = ZenClient(served.address, access=access if kind else Access())
                clients.append(stack.enter_context(client))
            times = _times(clients, plan, store.base().config.vocab_size, progress)
        spans = received()
    return (
        _compared(times)
        | {
            "spans": spans,
            "plan": asdict(plan),
        }
        | device_and_versions()
    )


def _guard(options: ServeOptions, folder: Path, url: str) -> tuple[ServeOptions, Access]:
    """The same server with everything, and what a client shows it."""
    try:
        import trustme
    except ImportError:
        raise ValueError(
            "this needs trustme, which makes the certificate: pip install trustme"
        ) from None
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    roots, certificate, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(roots)
    issued.private_key_pem.write_to_path(key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    tokens = folder / "tokens.json"
    made = new_token(
        tokens,
        tenant="bench",
        models=[BASE],
        rights=[Right.generate],
        most_requests=8,
        tokens_per_minute=1 << 30,
    )
    settings = {**vars(options), "tls": TlsFiles(certificate, key), "tokens": tokens, "traces": url}
    return ServeOptions(**settings), Access(made, roots)


def _times(
    clients: Sequence[ZenClient], plan: AccessPlan, vocabulary: int, progress: Progress | None
) -> np.ndarray:
    """Seconds, [requests, servers, 2]: to the first token, and a token after it."""
    rng = np.random.default_rng(1)
    times = np.zeros((plan.requests, len(clients), 2))
    for i in range(-_WARM, plan.requests):
        for j in rng.permutation(len(clients)):
            prompt = rng.integers(0, vocabulary, plan.prompt_tokens).tolist()
            taken = _ask(clients[j], prompt, plan.answer_tokens)
            if i >= 0:
                times[i, j] = taken
        if progress is not None:
            progress("requests", max(0, i + 1), plan.requests)
    return times


def _ask(client: ZenClient, prompt: list[int], tokens: int) -> tuple[float, float]:
    start = time.perf_counter()
    stream = client.stream(BASE, token_ids=prompt, max_tokens=tokens, ignore_eos=True)
    pieces = iter(stream)
    next(pieces)
    first = last = time.perf_counter()
    had = len(stream.generation.token_ids)
    for _ in pieces:
        last = time.perf_counter()
    return first - start, (last - first) / max(1, tokens - had)


def _compared(times: np.ndarray) -> dict[str, Any]:
    """[rounds, servers, 2] seconds: what `bench_access` returns of them."""
    by_kind = [times[:, np.equal(_KINDS, kind)] for kind in range(len(_NAMES))]
    return {
        "servers": {name: _figures(some) for name, some in zip(_NAMES, by_kind, strict=True)},
        "over_plain": _ratios(*by_kind),
        "over_same": {
            name: _ratios(some[:, :1], some[:, 1:])
            for name, some in zip(_NAMES, by_kind, strict=True)
        },
        "added_ms": _added(*by_kind),
    }


def _figures(times: np.ndarray) -> dict[str, float]:
    """[rounds, servers, 2] seconds as milliseconds."""
    return {
        f"{name}_p{share}_ms": 1e3 * float(np.percentile(times[..., i], share))
        for i, name in enumerate(("ttft", "tpot"))
        for share in (50, 99)
    }


def _ratios(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Of the second's medians to the first's, both [rounds, servers, 2]."""
    return _estimates(lambda rows: np.divide(*_medians(second, first, rows)), len(first))


def _added(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Milliseconds that the second takes longer in a round, in the median."""
    more = 1e3 * (second.mean(1) - first.mean(1))
    return _estimates(lambda rows: np.median(more[rows], axis=-2), len(first))


def _medians(one: np.ndarray, other: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Of the rounds drawn, [..., rounds], over their servers too: [..., 2] of each."""
    return [np.median(some[rows], axis=(-3, -2)) for some in (one, other)]


def _estimates(of: Callable[[np.ndarray], np.ndarray], rounds: int) -> dict[str, float]:
    """A figure of all rounds, and its ends in resamples of them; `of` gives [..., 2]."""
    drawn = np.random.default_rng(2).integers(0, rounds, (2000, rounds))
    whole, ends = of(np.arange(rounds)), np.percentile(of(drawn), (2.5, 97.5), axis=0)
    found: dict[str, float] = {}
    for i, name in enumerate(("ttft", "tpot")):
        low, high = ends[:, i]
        found |= {name: float(whole[i]), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


class _Sink(trace_grpc.TraceServiceServicer):
    """Counts the spans that it is sent."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        self.spans += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        return trace_pb.ExportTraceServiceResponse()


def _collect(end: Connection) -> None:
    """A collector, until it is told to stop."""
    server, sink = grpc.server(ThreadPoolExecutor(1)), _Sink()
    trace_grpc.add_TraceServiceServicer_to_server(sink, server)
    end.send(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    end.recv()
    server.stop(0)
    end.send(sink.spans)


@contextmanager
def _collector() -> Iterator[tuple[str, Any]]:
    """Its URL, and what stops it and says how many spans it had."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()

    def received() -> int:
        ours.send("stop")
        return ours.recv()

    try:
        yield ours.recv(), received
    finally:
        process.kill()
        process.join()
