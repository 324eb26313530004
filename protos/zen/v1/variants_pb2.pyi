from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VariantState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VARIANT_STATE_UNSPECIFIED: _ClassVar[VariantState]
    VARIANT_STATE_ABSENT: _ClassVar[VariantState]
    VARIANT_STATE_LOADING: _ClassVar[VariantState]
    VARIANT_STATE_RESIDENT: _ClassVar[VariantState]
    VARIANT_STATE_FAILED: _ClassVar[VariantState]
VARIANT_STATE_UNSPECIFIED: VariantState
VARIANT_STATE_ABSENT: VariantState
VARIANT_STATE_LOADING: VariantState
VARIANT_STATE_RESIDENT: VariantState
VARIANT_STATE_FAILED: VariantState

class Variant(_message.Message):
    __slots__ = ("name", "version", "digest", "state", "slot", "pinned", "leases", "waiting", "bytes", "failure", "kept", "requests_per_s", "host_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    digest: str
    state: VariantState
    slot: int
    pinned: bool
    leases: int
    waiting: int
    bytes: int
    failure: str
    kept: bool
    requests_per_s: float
    host_bytes: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[VariantState, str]] = ..., slot: _Optional[int] = ..., pinned: _Optional[bool] = ..., leases: _Optional[int] = ..., waiting: _Optional[int] = ..., bytes: _Optional[int] = ..., failure: _Optional[str] = ..., kept: _Optional[bool] = ..., requests_per_s: _Optional[float] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class ListVariantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVariantsResponse(_message.Message):
    __slots__ = ("variants", "slots", "rows", "rows_active", "host_bytes", "host_budget", "loads")
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    variants: _containers.RepeatedCompositeFieldContainer[Variant]
    slots: int
    rows: int
    rows_active: int
    host_bytes: int
    host_budget: int
    loads: int
    def __init__(self, variants: _Optional[_Iterable[_Union[Variant, _Mapping]]] = ..., slots: _Optional[int] = ..., rows: _Optional[int] = ..., rows_active: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_budget: _Optional[int] = ..., loads: _Optional[int] = ...) -> None: ...

class GetVariantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetVariantResponse(_message.Message):
    __slots__ = ("variant",)
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    variant: Variant
    def __init__(self, variant: _Optional[_Union[Variant, _Mapping]] = ...) -> None: ...

class LoadVariantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadVariantResponse(_message.Message):
    __slots__ = ("variant",)
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    variant: Variant
    def __init__(self, variant: _Optional[_Union[Variant, _Mapping]] = ...) -> None: ...

class UnloadVariantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadVariantResponse(_message.Message):
    __slots__ = ("variant",)
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    variant: Variant
    def __init__(self, variant: _Optional[_Union[Variant, _Mapping]] = ...) -> None: ...

class PinVariantRequest(_message.Message):
    __slots__ = ("name", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinVariantResponse(_message.Message):
    __slots__ = ("variant",)
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    variant: Variant
    def __init__(self, variant: _Optional[_Union[Variant, _Mapping]] = ...) -> None: ...
