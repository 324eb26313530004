"""What being let in and being watched costs: a server with TLS, tokens, quotas, traces and metrics
beside the same server without.

Both run in this process, one request at a time, which of them first by chance; no two prompts begin
alike. The collector of traces is a process of its own, as it would be.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
        "tpot_p99_ms"}}, "over_plain": {"ttft", "ttft_low", "ttft_high", "tpot", ...}, "spans",
        "plan", "device", "versions"}: the ratio of medians, with the 2.5th and the 97.5th
        percentile of 2,000 bootstrap resamples of the requests, drawn in their pairs.

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
        with (
            running(store, options, progress) as one,
            running(store, guarded, progress) as two,
            ZenClient(one.address) as plain_client,
            ZenClient(two.address, access=access) as guarded_client,
        ):
            vocabulary = store.base().config.vocab_size
            clients = (plain_client, guarded_client)
            times = _times(clients, plan, vocabulary, progress)
        spans = received()
    return {
        "servers": {name: _figures(times[:, i]) for i, name in enumerate(_NAMES)},
        "over_plain": _ratios(times),
        "spans": spans,
        "plan": asdict(plan),
    } | device_and_versions()


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


def _figures(times: np.ndarray) -> dict[str, float]:
    """[requests, 2] seconds as milliseconds."""
    return {
        f"{name}_p{share}_ms": 1e3 * float(np.percentile(times[:, i], share))
        for i, name in enumerate(("ttft", "tpot"))
        for share in (50, 99)
    }


def _ratios(times: np.ndarray) -> dict[str, float]:
    """Of the guarded server's medians to the plain one's."""
    rng = np.random.default_rng(2)
    drawn = times[rng.integers(0, len(times), (2000, len(times)))]
    found: dict[str, float] = {}
    for i, name in enumerate(("ttft", "tpot")):
        whole, some = np.median(times[..., i], 0), np.median(drawn[..., i], 1)
        found[name] = float(whole[1] / whole[0])
        low, high = np.percentile(some[:, 1] / some[:, 0], (2.5, 97.5))
        found |= {f"{name}_low": float(low), f"{name}_high": float(high)}
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
