import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("rows", "rows_in_use", "waiting", "pages", "pages_held", "pages_kept", "slots", "step", "loads", "evictions", "rows_lost", "compiles", "host_bytes", "host_budget", "uptime", "recent", "models")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_KEPT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_LOST_FIELD_NUMBER: _ClassVar[int]
    COMPILES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BUDGET_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    rows_in_use: int
    waiting: int
    pages: int
    pages_held: int
    pages_kept: int
    slots: int
    step: _duration_pb2.Duration
    loads: int
    evictions: int
    rows_lost: int
    compiles: int
    host_bytes: int
    host_budget: int
    uptime: _duration_pb2.Duration
    recent: Recent
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, rows: _Optional[int] = ..., rows_in_use: _Optional[int] = ..., waiting: _Optional[int] = ..., pages: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_kept: _Optional[int] = ..., slots: _Optional[int] = ..., step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., rows_lost: _Optional[int] = ..., compiles: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_budget: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recent: _Optional[_Union[Recent, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class Recent(_message.Message):
    __slots__ = ("window", "finished", "failed", "prompt_tokens_per_s", "answer_tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_FIELD_NUMBER: _ClassVar[int]
    TPOT_P99_FIELD_NUMBER: _ClassVar[int]
    window: _duration_pb2.Duration
    finished: int
    failed: int
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    ttft_p50: _duration_pb2.Duration
    ttft_p99: _duration_pb2.Duration
    tpot_p50: _duration_pb2.Duration
    tpot_p99: _duration_pb2.Duration
    def __init__(self, window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., answer_tokens_per_s: _Optional[float] = ..., ttft_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tpot_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tpot_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "version", "state", "slot", "pinned", "kept", "leases", "waiting", "requests_per_s", "bytes", "ttft_p50", "ttft_p99")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    state: str
    slot: int
    pinned: bool
    kept: bool
    leases: int
    waiting: int
    requests_per_s: float
    bytes: int
    ttft_p50: _duration_pb2.Duration
    ttft_p99: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., slot: _Optional[int] = ..., pinned: _Optional[bool] = ..., kept: _Optional[bool] = ..., leases: _Optional[int] = ..., waiting: _Optional[int] = ..., requests_per_s: _Optional[float] = ..., bytes: _Optional[int] = ..., ttft_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CaptureProfileRequest(_message.Message):
    __slots__ = ("duration",)
    DURATION_FIELD_NUMBER: _ClassVar[int]
    duration: _duration_pb2.Duration
    def __init__(self, duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CaptureProfileResponse(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
