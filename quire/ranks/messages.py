"""The messages with which a rank starts: its place in the group, what it found in the model, and the agreed cache."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.cache.memory import MemoryPlan
from quire.types import QuireError

Text = Annotated[str, Meta(max_length=4096)]
Rank = Annotated[int, Meta(ge=0, lt=64)]
Units = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]
Addresses = Annotated[dict[Rank, Annotated[list[Text], Meta(max_length=4)]], Meta(max_length=64)]


class StartRank(msgspec.Struct, tag="start", kw_only=True):
    """Engine to rank: which rank of which model it is."""

    settings: dict[str, Any]
    rank: Rank  # index among those that share its layers
    size: Rank  # number of ranks that share its layers
    memory: Text  # path of the shared memory of these; empty: the rank is alone and makes its own
    seconds: float  # deadline of operations of the group
    stage: Rank = 0
    stages: Rank = 1
    generation: int = 0  # of the group, see `Regroup`
    num_ranks: Rank = 1  # of the group on this machine
    pipes: Addresses = {}  # stage -> addresses of the rank with this index there
    secret: Annotated[bytes, Meta(max_length=64)] = b""  # that ranks prove to each other


class RankLoaded(msgspec.Struct, tag="loaded", kw_only=True):
    """Rank to engine: it has its weights, and would make a cache of this size."""

    vocab_size: int
    max_model_len: int
    eos_ids: list[int]
    defaults: dict[str, Any]
    dtype: Text
    weights: int  # bytes that this rank holds
    memory: MemoryPlan
    digest: Text = ""  # of Quire's version and the model's files


class AgreedCache(msgspec.Struct, tag="cache", kw_only=True):
    """Engine to rank: the units of the cache, equal on all ranks."""

    num_units: Units
    num_host_units: Units | None


class RankReady(msgspec.Struct, tag="ready", kw_only=True):
    """Rank to engine: it waits for plans."""


class Regroup(msgspec.Struct, tag="regroup", kw_only=True):
    """Engine to rank: some ranks were replaced. It forgets its steps and answers `RankReady`."""

    generation: int  # number of the group, counted from 0
    memory: Text


class RankFailed(msgspec.Struct, tag="failed", kw_only=True):
    """Rank to engine: it could not start, or a step failed, and it ends."""

    code: Text
    what: Text
    hint: Text = ""
    param: Text | None = None

    def error(self) -> QuireError:
        return QuireError(self.code, self.what, self.hint, param=self.param)


ToRank = StartRank | AgreedCache | Regroup
FromRank = RankLoaded | RankReady | RankFailed
encode = msgspec.msgpack.Encoder().encode
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def decode_to_rank(frame: bytes) -> ToRank:
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    return _from_rank.decode(frame)
