"""Tests the format of stored blocks and the tier of files: what is not exactly the block asked for is a miss."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.cache.tiers.blocks import MAX_PART, BlockLayout, BlockPart, CorruptBlock, describe
from quire.cache.tiers.folder import MARKER, FolderStore
from quire.cache.tiers.seam import BlockId, BlockTransfer
from quire.cache.tiers.stored import MAX_STORES, StoredTier
from quire.types import CacheSpec, QuireError

SEED = int(os.environ.get("TEST_SEED", "7"))
SPEC = CacheSpec("full", "paged", (0, 1, 2), (2, 4), "float16", page_tokens=16)
STATE = CacheSpec("state", "state", (0, 1), (3, 5), "float32", page_tokens=16)
LAYOUTS = [BlockLayout(SPEC, b"weights"), BlockLayout(STATE, b"weights")]


def key_of(number: int) -> bytes:
    return number.to_bytes(20, "big")


def block_of(number: int, group: int = 0) -> BlockId:
    return BlockId(key_of(number), group, (key_of(number),))


class FakeMemory:
    """Host memory in which each unit has bytes of its own."""

    def __init__(self) -> None:
        self.written: dict[tuple[int, int], list[bytes]] = {}
        self.sealed: set[tuple[int, int]] = set()
        self.changed: set[int] = set()  # units that differ from their checksums

    @staticmethod
    def content(group: int, unit: int, part: BlockPart) -> bytes:
        return random.Random(f"{group}/{unit}/{part}").randbytes(LAYOUTS[group].num_bytes(part))

    def read(self, group: int, unit: int, first_token: int, part: BlockPart) -> bytes:
        return self.content(group, unit, part)

    def write(self, group: int, unit: int, first_token: int, part: BlockPart, body: memoryview) -> None:
        self.written.setdefault((group, unit), []).append(bytes(body))

    def is_intact(self, group: int, unit: int) -> bool:
        return unit not in self.changed

    def seal(self, group: int, unit: int) -> None:
        self.sealed.add((group, unit))

    def has_arrived(self, group: int, unit: int) -> bool:
        return True


def make_tier(folder: Path, memory: FakeMemory | None = None, **knobs: object) -> StoredTier:
    return StoredTier("disk", FolderStore(folder), LAYOUTS, 16, memory or FakeMemory(), **knobs)  # type: ignore[arg-type]


def finish(tier: StoredTier) -> list[BlockTransfer]:
    tier.finish()
    tier.check()
    return tier.poll()


def test_parts_cover_a_block_once_and_are_small() -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        shape = (rng.randrange(1, 130), rng.choice([1, 64, 128, 576]), *rng.choice([(), (), (16,), (128,)]))
        kind = rng.choice(["paged", "state"])
        spec = CacheSpec("g", kind, tuple(range(rng.randrange(1, 70))), shape, rng.choice(["float32", "int8"]))
        layout = BlockLayout(spec, b"w")
        cells = [(lay, head) for p in layout.parts for lay in range(*p.layers) for head in range(*p.heads)]
        assert sorted(cells) == [(lay, head) for lay in range(len(spec.layers)) for head in range(shape[0])]
        one_head = layout.num_bytes(BlockPart((0, 1), (0, 1)))
        assert all(layout.num_bytes(part) <= max(MAX_PART, one_head) for part in layout.parts)
        assert len(set(layout.names(key_of(1)))) == len(layout.parts)


def test_a_block_is_bound_to_weights_spec_key_and_part() -> None:
    part = LAYOUTS[0].parts[0]
    body = FakeMemory.content(0, 1, part)
    data = LAYOUTS[0].encode(key_of(1), part, body)
    assert bytes(LAYOUTS[0].decode(key_of(1), part, data)) == body
    assert describe(data)["group"] == "full" and len(data) == LAYOUTS[0].file_bytes(part)
    others = [
        BlockLayout(SPEC, b"other"),
        BlockLayout(CacheSpec("full", "paged", (0, 1, 2), (2, 4), "bfloat16", page_tokens=16), b"weights"),
        BlockLayout(CacheSpec("full", "paged", (0, 1, 3), (2, 4), "float16", page_tokens=16), b"weights"),
    ]
    for layout in others:
        assert set(layout.names(key_of(1))).isdisjoint(LAYOUTS[0].names(key_of(1)))
        with pytest.raises(CorruptBlock):
            layout.decode(key_of(1), part, data)
    with pytest.raises(CorruptBlock):
        LAYOUTS[0].decode(key_of(2), part, data)
    larger = CacheSpec("full", "paged", (0, 1, 2), (2, 4), "float16", page_tokens=64)
    assert BlockLayout(larger, b"weights").names(key_of(1)) == LAYOUTS[0].names(key_of(1)), "page sizes share blocks"


def test_ten_thousand_damaged_blocks_are_all_refused() -> None:
    rng = random.Random(SEED)
    files = {
        n: LAYOUTS[0].encode(key_of(n), p, FakeMemory.content(0, n, p)) for n in range(50) for p in LAYOUTS[0].parts
    }
    part = LAYOUTS[0].parts[0]
    foreign = BlockLayout(SPEC, b"another model").encode(key_of(0), part, FakeMemory.content(0, 0, part))
    for _ in range(10_000):
        number = rng.randrange(50)
        data = bytearray(files[number])
        match rng.randrange(5):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 2:
                number = (number + rng.randrange(1, 50)) % 50  # renamed, or swapped with another's
            case 3:
                data += rng.randbytes(rng.randrange(1, 100))
            case _:
                data = bytearray(foreign)
        with pytest.raises(CorruptBlock):
            LAYOUTS[0].decode(key_of(number), part, bytes(data))


def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    memory, tier = FakeMemory(), make_tier(tmp_path / "c")
    blocks = [block_of(n, n % 2) for n in range(20)]
    for unit, block in enumerate(blocks, start=1):
        assert not tier.has(block) and tier.store(block, unit)
    assert all(done.ok and not done.is_load for done in finish(tier)) and tier.is_idle
    tier.close()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert modes == {0o600} and not list((tmp_path / "c").rglob("*.tmp"))
    again = make_tier(tmp_path / "c", memory)
    for unit, block in enumerate(blocks, start=1):
        assert again.has(block) and again.load(block, 100 + unit)
    assert sorted(done.unit for done in finish(again) if done.ok) == list(range(101, 121))
    for unit, block in enumerate(blocks, start=1):
        parts = LAYOUTS[block.group].parts
        assert memory.written[block.group, 100 + unit] == [memory.content(block.group, unit, part) for part in parts]
    assert len(memory.sealed) == 20 and again.stats.hits == 20 and again.stats.corrupt == 0
    again.close()


def test_what_changed_in_host_memory_is_not_written(tmp_path: Path) -> None:
    memory = FakeMemory()
    memory.changed.add(2)
    tier = make_tier(tmp_path / "c", memory)
    tier.store(block_of(1), 1)
    tier.store(block_of(2), 2)
    assert sorted((done.unit, done.ok) for done in finish(tier)) == [(1, True), (2, False)]
    assert tier.stats.corrupt == 1 and tier.has(block_of(1)) and not tier.has(block_of(2))
    tier.close()


def test_damaged_and_missing_files_are_misses_and_counted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "c")
    for number in range(4):
        tier.store(block_of(number), number + 1)
    finish(tier)
    files = sorted(path for path in (tmp_path / "c").rglob("*-000"))
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].unlink()
    os.replace(files[2], files[3])
    for number in range(4):
        assert tier.has(block_of(number)) and tier.load(block_of(number), 9)
    assert not any(done.ok for done in finish(tier))
    assert tier.stats.failures == 4 and tier.stats.corrupt == 2 and tier.stats.hits == 0
    assert not any(tier.has(block_of(number)) for number in range(4)), "a bad file is not tried again"
    assert {fault.kind for fault in tier.take_faults()} == {"corrupt", "missing"} and not tier.take_faults()
    tier.close()


def test_a_quota_deletes_the_least_recently_used(tmp_path: Path) -> None:
    size = sum(LAYOUTS[0].file_bytes(part) for part in LAYOUTS[0].parts)
    tier = make_tier(tmp_path / "c", quota=10 * size, num_threads=1)
    for number in range(10):
        tier.store(block_of(number), 1)
    finish(tier)
    tier.load(block_of(0), 1)
    finish(tier)
    tier.store(block_of(10), 1)
    finish(tier)
    assert tier.has(block_of(0)) and tier.has(block_of(10)) and not tier.has(block_of(1))
    assert tier.stats.num_bytes <= 10 * size and tier.stats.evictions >= 1
    on_disk = sum(path.stat().st_size for path in (tmp_path / "c").glob("??/*"))
    assert on_disk == tier.stats.num_bytes
    tier.close()


class BlockedStore(FolderStore):
    """A disk that writes nothing before it is told to."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.go = threading.Event()

    def write(self, name: str, data: bytes) -> None:
        self.go.wait()
        super().write(name, data)


def test_a_full_queue_drops_stores_and_loads_go_first(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path / "c")
    tier = StoredTier("disk", store, LAYOUTS, 16, FakeMemory(), num_threads=1)
    taken = sum(tier.store(block_of(number), 1) for number in range(MAX_STORES + 50))
    assert MAX_STORES <= taken <= MAX_STORES + 1 and tier.stats.drops == MAX_STORES + 50 - taken
    assert tier.load(block_of(5000), 2)
    tier.check()
    store.go.set()
    assert not next(done.ok for done in finish(tier) if done.is_load), "it was never stored"
    tier.close()


class FullStore(FolderStore):
    def write(self, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_once_and_costs_nothing_else(tmp_path: Path) -> None:
    tier = StoredTier("disk", FullStore(tmp_path / "c"), LAYOUTS, 16, FakeMemory())
    for number in range(30):
        assert tier.store(block_of(number), 1)
    assert not any(done.ok for done in finish(tier)) and tier.stats.failures == 30
    (fault,) = tier.take_faults()
    assert "No space left" in fault.what and not tier.has(block_of(1))
    tier.close()


@pytest.mark.parametrize("content", ["other", "version", "file", "denied"])
def test_a_folder_of_something_else_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "c"
    if content == "file":
        folder.write_text("x")
    else:
        folder.mkdir()
        name = MARKER if content == "version" else "thesis.txt"
        (folder / name).write_text("99\n" if content == "version" else "x")
    before = sorted(tmp_path.rglob("*"))
    if content == "denied":
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        folder.chmod(0o500)
    with pytest.raises(QuireError) as caught:
        FolderStore(folder)
    assert caught.value.code == "cache_folder" and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"


WRITER = """
import sys
from pathlib import Path
from tests.pure.test_tiers_blocks import LAYOUTS, FakeMemory, key_of
from quire.cache.tiers.folder import FolderStore
store, number = FolderStore(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
while True:
    part = LAYOUTS[0].parts[0]
    data = LAYOUTS[0].encode(key_of(number), part, FakeMemory.content(0, number % 7, part))
    store.write(LAYOUTS[0].names(key_of(number))[0], data)
    number += 1000
"""


@pytest.mark.slow
def test_two_hundred_writers_that_are_killed_leave_only_whole_blocks(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    folder = tmp_path / "c"
    FolderStore(folder)
    for number in range(200):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(number)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        for _ in range(rng.randrange(1000)):
            pass
        writer.kill()
        writer.wait()
        writer.stdout.close()
    found = list(FolderStore(folder).scan())
    assert not list(folder.rglob("*.tmp")), "the scan deletes what was left half written"
    part = LAYOUTS[0].parts[0]
    for file in found:
        key = bytes.fromhex(file.name[:40])
        data = FolderStore(folder).read(file.name, 1 << 22)
        assert data is not None
        number = int.from_bytes(key, "big")
        assert bytes(LAYOUTS[0].decode(key, part, data)) == FakeMemory.content(0, number % 7, part)
