"""Ten thousand stored blocks cut, changed, swapped, or of another model or tenant: no wrong token, no crash."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from quire.llm import LLM
from quire.types import SamplingParams
from tests.cpu.tiny_llm import make_tiny_llm

SEED = int(os.environ.get("TEST_SEED", "7"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NUM_PROMPTS, LENGTH = 30, 330
DAMAGED = 10_000


def open_llm(model: Path, cache: Path) -> LLM:
    return LLM(str(model), dtype="float32", num_pages=60, threads=1, host_memory=64 << 20, cache_dir=str(cache))


def damage(folder: Path, others: list[Path], count: int, rng: random.Random) -> int:
    """Damage up to `count` files of a folder; return how many. `others`: files of another model and of another salt."""
    paths = sorted(folder.glob("??/*"))
    chosen = rng.sample(paths, min(count, len(paths)))
    for path in chosen:
        data = bytearray(path.read_bytes())
        match rng.randrange(5):
            case 0:
                path.write_bytes(data[: rng.randrange(len(data))])
            case 1:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case 2:
                path.write_bytes(rng.choice(others).read_bytes())
            case 3:
                other = rng.choice(paths)
                path.write_bytes(other.read_bytes() if other.exists() and other != path else b"")
            case _:
                path.write_bytes(data + rng.randbytes(rng.randrange(1, 50)))
    return len(chosen)


@pytest.mark.slow
def test_ten_thousand_damaged_blocks_give_no_wrong_token(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_tiny_llm(tmp_path / "model", max_position_embeddings=512)
    foreign = make_tiny_llm(tmp_path / "foreign", max_position_embeddings=512, hidden_size=32)
    prompts = [[rng.randrange(10, 250) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]
    with open_llm(model, tmp_path / "whole") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        llm.engine.save()
    with open_llm(model, tmp_path / "salted") as llm:
        llm.generate(prompts[:4], GREEDY, salt=b"someone else")
    with open_llm(foreign, tmp_path / "of another model") as llm:
        llm.generate(prompts[:4], GREEDY)
    others = [path for name in ("salted", "of another model") for path in (tmp_path / name).glob("??/*")]
    assert len(others) > 50
    num_damaged = num_hits = num_corrupt = 0
    while num_damaged < DAMAGED:
        cache = tmp_path / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", cache)
        share = rng.choice([0.3, 0.8, 1.0])
        num_damaged += damage(cache, others, int(share * NUM_PROMPTS * LENGTH / 16), rng)
        with open_llm(model, cache) as llm:
            order = rng.sample(range(NUM_PROMPTS), NUM_PROMPTS)
            outputs = llm.generate([prompts[place] for place in order], GREEDY)
            assert [output.token_ids for output in outputs] == [expected[place] for place in order]
            (disk,) = llm.engine.scheduler.cache.stores
            num_hits, num_corrupt = num_hits + disk.stats.hits, num_corrupt + disk.stats.corrupt
            llm.engine.scheduler.check()
    assert num_corrupt > 200 and num_hits > 200, (num_corrupt, num_hits)
