"""Blocks in an object store: those of a folder, shared, and refused like them. Against memory, and S3 where moto is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cache.tiers.objects import ObjectStore
from quire.cache.tiers.stored import StoredTier
from quire.types import QuireError
from tests.pure.test_tiers_blocks import LAYOUTS, FakeMemory, block_of, finish


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    obstore = pytest.importorskip("obstore")
    if request.param == "memory":
        yield obstore.store.MemoryStore()
        return
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    ).create_bucket(Bucket="quire")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1"), ("ENDPOINT", url)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield "s3://quire/kv"
    server.stop()


def open_store(store: Any) -> ObjectStore:
    return ObjectStore(store) if isinstance(store, str) else ObjectStore("memory:///", store)


def tier_of(store: Any, memory: FakeMemory | None = None) -> StoredTier:
    return StoredTier("shared", open_store(store), LAYOUTS, 16, memory or FakeMemory(), num_threads=2)


def test_two_engines_share_blocks(store: Any) -> None:
    memory, first = FakeMemory(), tier_of(store)
    for number in range(6):
        assert first.store(block_of(number, number % 2), number + 1)
    assert all(done.ok for done in finish(first)) and first.stats.stores == 6
    second = tier_of(store, memory)
    for number in range(6):
        assert second.has(block_of(number, number % 2)) and second.load(block_of(number, number % 2), 50 + number)
    assert all(done.ok for done in finish(second)) and second.stats.hits == 6 and len(memory.sealed) == 6
    assert not second.has(block_of(7))
    first.close()
    second.close()


def test_damaged_long_and_missing_objects_are_misses(store: Any) -> None:
    tier = tier_of(store)
    for number in range(3):
        tier.store(block_of(number), number + 1)
    finish(tier)
    objects = open_store(store)
    names = [LAYOUTS[0].names(block_of(number).key)[0] for number in range(3)]
    data = objects.read(names[0], 1 << 22)
    assert data is not None
    objects.write(names[0], data[:-1] + bytes([data[-1] ^ 1]))
    objects.write(names[1], data + b"more")
    objects.delete(names[2])
    objects.delete(names[2])  # again: it is gone
    assert objects.read(names[2], 10) is None and len(objects.read(names[1], 10) or b"") == 10
    for number in range(3):
        tier.load(block_of(number), 9)
    assert not any(done.ok for done in finish(tier)) and tier.stats.corrupt == 2 and tier.stats.failures == 3
    tier.close()


def test_another_format_and_wrong_urls_are_refused(store: Any, tmp_path: Path) -> None:
    import obstore

    open_store(store)
    raw = obstore.store.from_url(store) if isinstance(store, str) else store
    obstore.put(raw, "quire-cache", b"99\n")
    for make in (lambda: open_store(store), lambda: ObjectStore("s3://"), lambda: ObjectStore("nonsense://x")):
        with pytest.raises(QuireError) as caught:
            make()
        assert caught.value.code == "cache_folder" and "\n" not in str(caught.value)
    with pytest.raises(QuireError, match="no name of a block"):
        open_store(obstore.store.MemoryStore()).read("../../etc/passwd", 10)
