"""The composition root: from a store's path to a server that answers.

The port opens first, so that health and the list of variants answer while the weights are read and
the engine compiles; Generate is let in when both are done. To stop, it turns new calls away, lets
those that run finish within a set time, and then closes.
"""

import asyncio
import functools
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import jax
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from jax.sharding import Mesh

from server.address import PortInUse, why_not
from server.admin import VariantService
from server.auth import Tokens
from server.connections import HANDSHAKE_S, most_connections
from server.health import GENERATE, OPERATIONS, VARIANTS, Health, watch
from server.http.app import Api
from server.http.models import Models
from server.http.serving import HttpServer
from server.incoming import Limits
from server.intakes import Intakes
from server.loader import Loader, Stages
from server.memory import check_memory, memory_bytes
from server.observing import Observing
from server.operations import OperationService
from server.profiles import Profiles
from server.rights import Gate
from server.router import Router
from server.serve_options import ServeOptions
from server.service import GenerateService
from server.snapshot import WorkerSnapshot
from server.status import ErrorInterceptor
from server.tls import Credentials
from server.worker import Worker
from zen.v1 import generate_pb2_grpc, operations_pb2_grpc, variants_pb2_grpc
from zen_jax.checkpoint.load import bank_schema, base_shapes, read_base
from zen_jax.checkpoint.manifest import Variant
from zen_jax.checkpoint.store import Store
from zen_jax.engine import Engine, EngineConfig
from zen_jax.merge.pool_change import Score
from zen_jax.merge.pool_scores import scorer_of
from zen_jax.pool_store import PoolStore
from zen_jax.programs import keep_compiled
from zen_jax.residency import CacheConfig
from zen_jax.sharding import Placement, make_mesh
from zen_jax.staging import Staging
from zen_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# What is being done, how many steps are done, how many there are.
type Progress = Callable[[str, int, int], None]

_MAX_LENGTH = 1024
_TOKENIZERS_KEPT = 256
# After the last answer was written: for what is still on its way to the clients.
_CLOSING_S = 1.0
# For an adapter that is being taken in: the score under way ends, and nothing of it is kept.
_INTAKE_S = 10.0

_CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share a port without knowing
    # A client that is frozen or cut off is noticed within 20 s instead of 2 hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping while they wait for a long prefill.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Whatever comes in is bounded: a message, and what is said around it.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", int(1e3 * HANDSHAKE_S)),
)


class _Stopped(Exception):
    """The server is to stop before it was ready."""


class ZenServer:
    """A store, served. All but `hasten` belongs to the event loop that `start` is called in.

    Attributes:
        store: what is served.
        address: host:port, once started.
        http: what answers over HTTP, if the options give it a port.
        engine: once ready.
        worker: once ready.
    """

    def __init__(self, store: Store, options: ServeOptions):
        """Takes what is to be served; opens nothing yet.

        Raises:
            ValueError: the file of tokens, the certificate or the folder of profiles cannot be
                used.
        """
        self.store = store
        self.address = ""
        self.engine: Engine | None = None
        self.worker: Worker | None = None
        self._options = options
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        tokens = None if options.tokens is None else Tokens(options.tokens)
        self._credentials = None if options.tls is None else Credentials(options.tls)
        pool = store if isinstance(store, PoolStore) else None
        router = Router(store, pool)
        self._intakes = None
        if pool is not None and pool.adapters is not None:
            self._intakes = Intakes(pool, self._scorer)
        self._tokenizers = tokenizers_of(store)
        self._observing = Observing(self._snapshot, options.traces, options.trace_share)
        self._gate = Gate(tokens, operators=options.operators, refused=self._observing.refused)
        self._generate = GenerateService(
            router=router,
            tokenizers=self._tokenizers,
            write_timeout_s=options.write_timeout_s,
            observers=self._observing.observers,
            intakes=self._intakes,
        )
        self._variants = VariantService(store, router, self._intakes)
        profiles = None if options.profiles is None else Profiles(options.profiles)
        self._operations = OperationService(self._snapshot, self._observing.recent, profiles)
        self._health = Health(store, router, options.write_timeout_s)
        self._server: grpc.aio.Server | None = None
        self.http = self._http_server(Models(store, router))
        self._heartbeat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the ports: health, reflection and the list of variants answer from here on.

        Raises:
            PortInUse: an address cannot be listened on.
        """
        options, self._loop = self._options, asyncio.get_running_loop()
        bounds = (
            ("grpc.max_concurrent_streams", options.most_streams),
            ("grpc.max_allowed_incoming_connections", most_connections()),
        )
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(self._gate.call)],
            options=(*_CHANNEL_OPTIONS, *bounds),
        )
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self._generate, server)
        variants_pb2_grpc.add_VariantServiceServicer_to_server(self._variants, server)
        operations_pb2_grpc.add_OperationServiceServicer_to_server(self._operations, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        if options.reflection:
            own = (GENERATE, VARIANTS, OPERATIONS)
            names = (*own, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        where = f"{options.host}:{options.port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, self._credentials.server_credentials())
        except RuntimeError:
            why = await asyncio.to_thread(why_not, self._options.host, self._options.port)
            raise PortInUse(f"cannot listen on {where}; {why or 'gRPC refuses it'}") from None
        self.address = f"{self._options.host}:{port}"
        if self.http is not None:
            await self.http.start()
        await self._health.started()
        await server.start()
        self._server = server

    async def load(self, progress: Progress | None = None) -> None:
        """Reads the base, compiles the engine, and lets requests in.

        Args:
            progress: told the name of each step, how many are done and how many there are; called
                from another thread.

        Raises:
            ValueError: the store is damaged, or the options do not fit the model.
        """

        def tell(what: str, done: int, total: int) -> None:
            if self._stopping:
                raise _Stopped
            if progress is not None:
                progress(what, done, total)

        try:
            engine = await asyncio.to_thread(build_engine, self.store, self._options, tell)
        except _Stopped:
            return
        worker = make_worker(self.store, engine, self._options, self._tokenizers)
        worker.start()
        self.engine, self.worker = engine, worker
        self._variants.attach(worker)
        limits = Limits(
            engine.sizes.max_length,
            engine.config.vocab_size,
            vocabularies_of(self.store),
            self._options.inbox_limits().samples,
        )
        self._generate.accept(worker, limits)
        await self._health.ready()
        self._heartbeat = asyncio.create_task(
            watch(worker, self._health, self._options.hang_s, self._lost, time.monotonic)
        )

    async def stop(self) -> bool:
        """Turns new calls away, lets those that run finish, closes; whether all finished."""
        self._stopping = True
        await self._health.stopping()
        self._generate.refuse("the server is stopping")
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        finished = True
        if self.worker is not None:
            _log.info(
                "stopping: %d requests are under way and have %g s to end",
                self._generate.in_flight,
                self._options.drain_s,
            )
            until = time.monotonic() + self._options.drain_s
            # Those that wait for an adapter are not in the worker's queue yet.
            finished = await self._generate.settled(self._options.drain_s)
            self._end_intakes()
            left_s = max(0.0, until - time.monotonic())
            finished &= await asyncio.to_thread(self.worker.drain, left_s)
        # Their last words may still be waiting for a slow reader.
        finished &= await self._generate.idle(self._options.write_timeout_s)
        if self.http is not None:
            await self.http.stop(_CLOSING_S)
        if self._server is not None:
            await self._server.stop(_CLOSING_S)
        self._generate.close()
        if self._intakes is not None and not await self._intakes.close(_INTAKE_S):
            _log.warning("an adapter is still being scored; it is not taken in")
        await asyncio.to_thread(self._observing.close)
        return finished

    def _end_intakes(self) -> None:
        if self._intakes is not None:
            self._intakes.refuse("the server is stopping")

    def _scorer(self) -> Score:
        """By the weights that others are answered from meanwhile."""
        engine, store = self.engine, self.store
        assert engine is not None and isinstance(store, PoolStore)
        return scorer_of(engine.config, engine.params, store.base().tensors, store.rank)

    def hasten(self) -> None:
        """Cuts short a `stop` that waits for requests; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_intakes)
        if self.worker is not None:
            threading.Thread(target=self.worker.stop, daemon=True).start()

    def _snapshot(self) -> WorkerSnapshot | None:
        return None if self.worker is None else self.worker.snapshot()

    def _http_server(self, models: Models) -> HttpServer | None:
        options = self._options
        if options.http_port is None:
            return None
        api = Api(
            self._generate,
            models,
            self._tokenizers,
            enter=self._gate.enter,
            metrics=self._observing.metrics.text,
            live=lambda: self.worker is None or self.worker.alive,
            write_timeout_s=options.write_timeout_s,
        )
        return HttpServer(
            api.app(), options.host, options.http_port, options.write_timeout_s, options.tls
        )

    def _lost(self) -> None:
        self._generate.refuse("the engine has stopped")


def build_engine(store: Store, options: ServeOptions, progress: Progress) -> Engine:
    """Reads the base of a store onto the devices, and meanwhile compiles all that serving needs.

    Raises:
        ValueError: the base is damaged, or the options do not fit the model or the machine.
    """
    keep_compiled()
    pooled = isinstance(store, PoolStore)
    schema = store.schema(options.slots) if pooled else bank_schema(store, options.slots)
    config = schema.held.config
    length = min(_MAX_LENGTH, config.max_position)
    sizes = EngineConfig(
        rows=options.rows,
        max_length=length if options.max_length is None else options.max_length,
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        products=options.products,
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
    )
    check_memory(options, Staging(store, schema).slot_bytes)
    if options.kv_bytes is not None:
        sizes = sizes.within(config, options.kv_bytes)
    mesh = _mesh(options.devices)
    if pooled and store.adapters is not None and mesh is not None:
        raise ValueError("--adapters needs a base on one device to score with; give --devices 1")
    placement = None if mesh is None else Placement.of(config, mesh)
    engine = Engine(base_shapes(store, schema.held, placement), sizes, schema, mesh)
    with ThreadPoolExecutor(1, "read-base") as pool:
        reading = pool.submit(read_base, store, schema.held, placement, progress)

        def compiled(name: str, done: int, total: int) -> None:
            if reading.done():
                reading.result()  # a damaged base ends the start at once
            progress(f"compiling: {name}", done, total)

        engine.warm_up(compiled)
        engine.params = reading.result()
    return engine


def make_worker(
    store: Store,
    engine: Engine,
    options: ServeOptions,
    tokenizers: Callable[[Variant | None], Tokenizer],
) -> Worker:
    """Puts a worker, not started yet, onto an engine that is warm."""
    # Accelerators leave the processors to the loads.
    shared = jax.default_backend() == "cpu"
    staging = Staging(
        store, engine.schema, engine.placement, busy=lambda: shared and worker.running > 0
    )
    host_bytes = options.host_bytes
    config = CacheConfig(
        slots=engine.schema.slots,
        policy=options.policy(),
        slot_bytes=staging.slot_bytes,
        host_bytes=memory_bytes() // 4 if host_bytes is None else host_bytes,
    )
    worker = Worker(
        engine,
        Loader(_stages(store, engine, staging)),
        config,
        tokenizers,
        options.inbox_limits(),
        share_prefixes=options.prefix_cache,
        base=store.base().digest,
    )
    return worker


def _stages(store: Store, engine: Engine, staging: Staging) -> Stages:
    """How variants come into the bank: from a store's files, or from a pool's."""
    if isinstance(store, PoolStore):
        staged = store.stage(engine.schema, engine.placement)
        return Stages(store.read_member, staged, engine.put)
    return Stages(staging.read, staging.verify, engine.put)


def settle_memory() -> None:
    """Keeps Python from looking through what the start left, which holds up every thread for tenths
    of a second; for a process that serves from here on."""
    gc.collect()
    gc.freeze()


def vocabularies_of(store: Store) -> Callable[[Variant | None], int]:
    """A function from a variant, or None for the base, to its number of tokens; from any thread."""

    @functools.lru_cache(maxsize=_TOKENIZERS_KEPT)
    def read(variant: Variant | None) -> int:
        manifest = store.base() if variant is None else store.manifest(variant)
        return manifest.config.vocab_size

    return read


def tokenizers_of(store: Store) -> Callable[[Variant | None], Tokenizer]:
    """A function from a variant, or None for the base, to its tokenizer; from any thread."""

    @functools.lru_cache(maxsize=_TOKENIZERS_KEPT)
    def read(variant: Variant | None) -> Tokenizer:
        return Tokenizer.from_folder(store.tokenizer_folder(variant))

    return read


async def serve(
    store: Store,
    options: ServeOptions,
    progress: Progress | None = None,
    ready: Callable[[ZenServer], None] | None = None,
) -> bool:
    """Serves a store until SIGTERM or SIGINT; a second signal cuts short what still runs.

    Args:
        progress: as for `ZenServer.load`.
        ready: called when requests are taken.

    Returns:
        Whether all requests that were taken finished.

    Raises:
        ValueError: as `ZenServer.start` and `ZenServer.load` do.
    """
    server = ZenServer(store, options)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            server.hasten()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await server.start()
    loading = asyncio.create_task(server.load(progress))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            if ready is not None:
                ready(server)
            await stopping
    finally:
        stopping.cancel()
        finished = await server.stop()
        await asyncio.wait((loading,))
    return finished


@contextmanager
def running(
    store: Store, options: ServeOptions, progress: Progress | None = None
) -> Iterator[ZenServer]:
    """Serves a store from a thread with an event loop of its own until the block ends.

    Raises:
        ValueError: as `ZenServer.start` and `ZenServer.load` do.
    """
    server = ZenServer(store, options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="zen-server", daemon=True)
    thread.start()

    def call[T](coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        call(server.start())
        try:
            call(server.load(progress))
            yield server
        finally:
            call(server.stop())
    finally:
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _mesh(devices: int | None) -> Mesh | None:
    if devices is None:
        devices = 1 if jax.default_backend() == "cpu" else len(jax.devices())
    return None if devices == 1 else make_mesh(model=devices)
