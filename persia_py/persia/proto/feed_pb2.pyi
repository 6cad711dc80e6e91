from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedRequest(_message.Message):
    __slots__ = ("hello", "batch", "end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    hello: FeedHello
    batch: FeedBatch
    end: FeedEnd
    def __init__(self, hello: _Optional[_Union[FeedHello, _Mapping]] = ..., batch: _Optional[_Union[FeedBatch, _Mapping]] = ..., end: _Optional[_Union[FeedEnd, _Mapping]] = ...) -> None: ...

class FeedHello(_message.Message):
    __slots__ = ("job", "replica_index", "replica_size", "protocol", "version", "sender")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLICA_INDEX_FIELD_NUMBER: _ClassVar[int]
    REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    job: str
    replica_index: int
    replica_size: int
    protocol: int
    version: str
    sender: str
    def __init__(self, job: _Optional[str] = ..., replica_index: _Optional[int] = ..., replica_size: _Optional[int] = ..., protocol: _Optional[int] = ..., version: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...

class FeedBatch(_message.Message):
    __slots__ = ("seq", "data", "position")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    data: bytes
    position: str
    def __init__(self, seq: _Optional[int] = ..., data: _Optional[bytes] = ..., position: _Optional[str] = ...) -> None: ...

class FeedEnd(_message.Message):
    __slots__ = ("batches", "error")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    batches: int
    error: str
    def __init__(self, batches: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("welcome", "taken", "stop")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    welcome: FeedWelcome
    taken: FeedTaken
    stop: FeedStop
    def __init__(self, welcome: _Optional[_Union[FeedWelcome, _Mapping]] = ..., taken: _Optional[_Union[FeedTaken, _Mapping]] = ..., stop: _Optional[_Union[FeedStop, _Mapping]] = ...) -> None: ...

class FeedWelcome(_message.Message):
    __slots__ = ("generation", "rank", "world_size", "skip", "buffer", "queued", "digest", "transform", "last_digest", "position_before")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    LAST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_BEFORE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    world_size: int
    skip: int
    buffer: int
    queued: int
    digest: int
    transform: str
    last_digest: int
    position_before: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., skip: _Optional[int] = ..., buffer: _Optional[int] = ..., queued: _Optional[int] = ..., digest: _Optional[int] = ..., transform: _Optional[str] = ..., last_digest: _Optional[int] = ..., position_before: _Optional[str] = ...) -> None: ...

class FeedTaken(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class FeedStop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
