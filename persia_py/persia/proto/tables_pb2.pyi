from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_F32: _ClassVar[Dtype]
    DTYPE_F16: _ClassVar[Dtype]
    DTYPE_BF16: _ClassVar[Dtype]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_TRAIN: _ClassVar[Mode]
    MODE_EVAL: _ClassVar[Mode]
    MODE_INFER: _ClassVar[Mode]
DTYPE_F32: Dtype
DTYPE_F16: Dtype
DTYPE_BF16: Dtype
MODE_UNSPECIFIED: Mode
MODE_TRAIN: Mode
MODE_EVAL: Mode
MODE_INFER: Mode

class Token(_message.Message):
    __slots__ = ("job", "generation", "rank", "seq")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    job: int
    generation: int
    rank: int
    seq: int
    def __init__(self, job: _Optional[int] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class TablePart(_message.Message):
    __slots__ = ("table", "dim", "dtype", "shard_counts", "samples")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    table: int
    dim: int
    dtype: Dtype
    shard_counts: _containers.RepeatedScalarFieldContainer[int]
    samples: Samples
    def __init__(self, table: _Optional[int] = ..., dim: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., shard_counts: _Optional[_Iterable[int]] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("samples", "indices", "per_sample_weights", "factors", "scale")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    PER_SAMPLE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    samples: int
    indices: int
    per_sample_weights: bool
    factors: bool
    scale: float
    def __init__(self, samples: _Optional[int] = ..., indices: _Optional[int] = ..., per_sample_weights: _Optional[bool] = ..., factors: _Optional[bool] = ..., scale: _Optional[float] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("part", "first", "data", "crc32c")
    PART_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    part: int
    first: int
    data: bytes
    crc32c: int
    def __init__(self, part: _Optional[int] = ..., first: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class LookupHead(_message.Message):
    __slots__ = ("token", "step", "mode", "parts")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    token: Token
    step: int
    mode: Mode
    parts: _containers.RepeatedCompositeFieldContainer[TablePart]
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., step: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., parts: _Optional[_Iterable[_Union[TablePart, _Mapping]]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("head", "ids", "csr")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    head: LookupHead
    ids: Chunk
    csr: Chunk
    def __init__(self, head: _Optional[_Union[LookupHead, _Mapping]] = ..., ids: _Optional[_Union[Chunk, _Mapping]] = ..., csr: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class LookupReport(_message.Message):
    __slots__ = ("hits", "initial", "missing")
    HITS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    hits: int
    initial: int
    missing: int
    def __init__(self, hits: _Optional[int] = ..., initial: _Optional[int] = ..., missing: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("rows", "report")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    rows: Chunk
    report: LookupReport
    def __init__(self, rows: _Optional[_Union[Chunk, _Mapping]] = ..., report: _Optional[_Union[LookupReport, _Mapping]] = ...) -> None: ...

class PushHead(_message.Message):
    __slots__ = ("token", "step", "lr_factor", "parts", "only")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    token: Token
    step: int
    lr_factor: float
    parts: _containers.RepeatedCompositeFieldContainer[TablePart]
    only: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., step: _Optional[int] = ..., lr_factor: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[TablePart, _Mapping]]] = ..., only: _Optional[_Iterable[int]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("head", "ids", "gradients", "csr")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    head: PushHead
    ids: Chunk
    gradients: Chunk
    csr: Chunk
    def __init__(self, head: _Optional[_Union[PushHead, _Mapping]] = ..., ids: _Optional[_Union[Chunk, _Mapping]] = ..., gradients: _Optional[_Union[Chunk, _Mapping]] = ..., csr: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PushReport(_message.Message):
    __slots__ = ("rows_pushed", "rows_applied", "rows_missing", "rows_nonfinite", "rows_duplicate", "first_nonfinite", "rows_inserted", "rows_evicted", "rows_expired")
    ROWS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    ROWS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    ROWS_MISSING_FIELD_NUMBER: _ClassVar[int]
    ROWS_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    ROWS_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    ROWS_INSERTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    rows_pushed: int
    rows_applied: int
    rows_missing: int
    rows_nonfinite: int
    rows_duplicate: int
    first_nonfinite: NonFinite
    rows_inserted: int
    rows_evicted: int
    rows_expired: int
    def __init__(self, rows_pushed: _Optional[int] = ..., rows_applied: _Optional[int] = ..., rows_missing: _Optional[int] = ..., rows_nonfinite: _Optional[int] = ..., rows_duplicate: _Optional[int] = ..., first_nonfinite: _Optional[_Union[NonFinite, _Mapping]] = ..., rows_inserted: _Optional[int] = ..., rows_evicted: _Optional[int] = ..., rows_expired: _Optional[int] = ...) -> None: ...

class NonFinite(_message.Message):
    __slots__ = ("table", "id")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    table: int
    id: int
    def __init__(self, table: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[ServerPush]
    def __init__(self, servers: _Optional[_Iterable[_Union[ServerPush, _Mapping]]] = ...) -> None: ...

class ServerPush(_message.Message):
    __slots__ = ("server", "applied", "failed")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    server: int
    applied: PushReport
    failed: Failure
    def __init__(self, server: _Optional[int] = ..., applied: _Optional[_Union[PushReport, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "fields")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    fields: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: int
    generation: int
    def __init__(self, job: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("protocol", "version", "servers", "run", "check_only")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    servers: int
    run: str
    check_only: bool
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., servers: _Optional[int] = ..., run: _Optional[str] = ..., check_only: _Optional[bool] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareSnapshotRequest(_message.Message):
    __slots__ = ("fence", "number")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    number: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class PrepareSnapshotReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortSnapshotRequest(_message.Message):
    __slots__ = ("fence", "number")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    number: int
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class AbortSnapshotReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteSnapshotRequest(_message.Message):
    __slots__ = ("fence", "directory", "number", "check_only")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    directory: str
    number: int
    check_only: bool
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., directory: _Optional[str] = ..., number: _Optional[int] = ..., check_only: _Optional[bool] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "bytes", "blake3")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    blake3: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., blake3: _Optional[str] = ...) -> None: ...

class WriteSnapshotReply(_message.Message):
    __slots__ = ("files", "rows")
    FILES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[File]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitSnapshotRequest(_message.Message):
    __slots__ = ("fence", "number", "directory", "files")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    number: int
    directory: str
    files: _containers.RepeatedCompositeFieldContainer[File]
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., number: _Optional[int] = ..., directory: _Optional[str] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ...) -> None: ...

class CommitSnapshotReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("fence", "directory", "files", "check_only")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    directory: str
    files: _containers.RepeatedCompositeFieldContainer[File]
    check_only: bool
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., directory: _Optional[str] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., check_only: _Optional[bool] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStats(_message.Message):
    __slots__ = ("server", "address", "stats")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    server: int
    address: str
    stats: str
    def __init__(self, server: _Optional[int] = ..., address: _Optional[str] = ..., stats: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("servers", "answered")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    servers: int
    answered: _containers.RepeatedCompositeFieldContainer[ServerStats]
    def __init__(self, servers: _Optional[int] = ..., answered: _Optional[_Iterable[_Union[ServerStats, _Mapping]]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
