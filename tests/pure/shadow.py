"""A device without tensors that notices every lie: the oracle for scheduler, cache index and loop.

Instead of keys and values each slot of a page holds the digest of all tokens up to its position; instead of a
recurrent state each slot holds the digest of what it has seen. A step reads back everything attention would read,
through the page tables it was told, and fails if a single entry is not what the row's tokens say. The next token is
a function of the digest, so wrong history also shows as wrong output.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from quire.cache.index import CacheIndex
from quire.engine.limits import SchedulerLimits
from quire.engine.loop import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.speculation.seam import Drafter
from quire.types import CacheSpec, CopyKind, Plan, Request, SamplingParams, StepOutput

VOCAB = 50
EMPTY = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def fold(digest: int, token: int) -> int:
    digest = ((digest ^ (token + 1)) * 0xBF58476D1CE4E5B9) & MASK
    return digest ^ (digest >> 29)


def digest_of(tokens: list[int]) -> int:
    digest = EMPTY
    for token in tokens:
        digest = fold(digest, token)
    return digest


def next_token(digest: int, seed: int) -> int:
    return (digest ^ (seed * 0x94D049BB133111EB & MASK)) % VOCAB


def reference_output(prompt: list[int], seed: int, max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """What a request must produce, whatever happens around it."""
    digest, out = digest_of(prompt), []
    while len(out) < max_tokens:
        token = next_token(digest, seed)
        out.append(token)
        digest = fold(digest, token)
        if token in stop_ids:
            break
    return out


@dataclass
class Row:
    request_id: str
    tokens: list[int]
    computed: int
    seed: int
    tables: list[list[int]] = field(default_factory=list)


class Poisoned(Exception):
    """A step that fails."""


class Lie(BaseException):
    """What a step was told, or what it read, is not so. No `Exception`: the engine would take it for a step that
    failed, let everyone fall back, and so mend what a test is to find."""


class ShadowDevice:
    """Implements `Workers`. With `late=True` nothing is computed before `wait` (or `release`) asks for it."""

    def __init__(self, cache: CacheIndex, *, late: bool = False, poison: set[int] | None = None):
        self.specs = cache.specs
        self.late = late
        self.poison = poison or set()  # a token id that makes every step fail that contains it
        self.pages = [
            [[None] * spec.page_tokens for _ in range(pool.num_units)]
            if spec.kind == "paged"
            else [None] * pool.num_units
            for spec, pool in zip(cache.specs, cache.pools, strict=True)
        ]
        self.host = [[None] * pool.num_units for pool in cache.ledger.host_pools]
        self.rows: dict[int, Row] = {}
        self.queue: list[ShadowTicket] = []
        self.computed_tokens = 0
        self.log: list[tuple[str, int]] = []

    def forward(self, plan: Plan) -> ShadowTicket:
        self.log.append(("forward", plan.step))
        ticket = ShadowTicket(self, plan)
        self.queue.append(ticket)
        return ticket

    def sample(self, forward: ShadowTicket, masks: Mapping[int, bytes] | None = None) -> ShadowTicket:
        forward.masks = masks
        forward.ready = True
        if not self.late:
            self.drain(forward)
        return forward

    def warm_ups(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None:
        pass

    def drain(self, upto: ShadowTicket) -> None:
        """Run what was submitted, in order, up to and with this step."""
        while upto.output is None:
            ticket = self.queue.pop(0)
            try:
                ticket.output = self._run(ticket.plan, ticket.masks)
            except AssertionError as error:
                raise Lie(str(error)) from error
            except Exception:
                self.queue.clear()
                raise

    def _run(self, plan: Plan, masks: Mapping[int, bytes] | None) -> StepOutput:
        for freed in plan.freed:
            self.rows.pop(freed, None)  # told twice if the step that said so failed
        for init in plan.added:
            assert init.row not in self.rows, "the row was never said to be free again: something of its owner is left"
            tables: list[list[int]] = [[] for _ in self.specs]
            self.rows[init.row] = Row(init.request_id, list(init.tokens), init.computed, init.seed, tables)
        for copy in plan.copies:
            self._copy(copy.kind, copy.group, copy.source, copy.target)
        for write in plan.page_writes:
            table = self.rows[write.row].tables[write.group]
            table[write.first :] = write.pages
        tokens: list[list[int]] = []
        for index, planned in enumerate(plan.rows):
            row = self.rows[planned.row]
            assert row.request_id == planned.request_id
            assert planned.start == row.computed, f"{planned.start=} but the row is at {row.computed}"
            drafts = plan.drafts.get(index, [])
            assert len(drafts) == planned.num_drafts
            before, length = row.computed, len(row.tokens)
            row.tokens += drafts
            self._compute(row, planned.count)
            tokens.append([])
            if planned.wants_sample:
                assert row.computed == len(row.tokens), "sampled before it caught up"
                tokens[-1] = self._verify(row, length, drafts, masks.get(index) if masks else None)
                if len(tokens[-1]) <= len(drafts):  # pages can be cut, a state is that of before the step again
                    cut = len(drafts) + 1 - len(tokens[-1])
                    row.computed = before if any(spec.kind == "state" for spec in self.specs) else row.computed - cut
                row.tokens[length:] = tokens[-1]
        for copy in plan.snapshots:
            self._copy(copy.kind, copy.group, copy.source, copy.target)
        output = StepOutput(plan.step, tokens)
        for index, count in plan.proposals.items():
            output.drafts[index] = self._propose(self.rows[plan.rows[index].row], count)
            output.draft_chances[index] = [0.5] * count
        return output

    def _propose(self, row: Row, count: int) -> list[int]:
        """Drafts that are right but for the last one. Their draft network's state needs pages, which it leaves full of
        what no one may read."""
        newest, drafts = len(row.tokens) - 1, []
        for place in range(count):
            drafts.append((next_token(digest_of(row.tokens + drafts), row.seed) + (place == 3)) % VOCAB)
            for group, spec in enumerate(self.specs):
                if spec.kind == "paged":
                    position = newest + place
                    page = row.tables[group][position // spec.page_tokens]
                    assert page != 0, "proposed into the scratch page"
                    self.pages[group][page][position % spec.page_tokens] = None
        return drafts

    def _verify(self, row: Row, length: int, drafts: list[int], masks: bytes | None) -> list[int]:
        """What is sampled in each place, up to and with the first that is not the draft there."""
        sampled: list[int] = []
        width = len(masks) // (len(drafts) + 1) if masks else 0
        for place in range(len(drafts) + 1):
            token = next_token(digest_of(row.tokens[: length + place]), row.seed)
            if masks:
                mask = masks[place * width : (place + 1) * width]
                allowed = [t for t in range(VOCAB) if mask[t // 8] >> (t % 8) & 1]
                token = allowed[token % len(allowed)]
            sampled.append(token)
            if place < len(drafts) and token != drafts[place]:
                break
        return sampled

    def _compute(self, row: Row, count: int) -> None:
        start, end = row.computed, row.computed + count
        assert end <= len(row.tokens), "asked to compute tokens that do not exist"
        if self.poison & set(row.tokens[start:end]):
            raise Poisoned
        digests = [EMPTY]
        for token in row.tokens[:end]:
            digests.append(fold(digests[-1], token))
        for group, spec in enumerate(self.specs):
            table = row.tables[group]
            if spec.kind == "state":
                slot = table[0]
                assert self.pages[group][slot] == digests[start], f"state of group {group} is wrong at {start}"
                self.pages[group][slot] = digests[end]
                continue
            size = spec.page_tokens
            oldest = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(oldest, start):
                entry = self.pages[group][table[position // size]][position % size]
                assert entry == digests[position + 1], f"group {group} position {position} holds something else"
            for position in range(start, end):
                page = table[position // size]
                assert page != 0, "wrote to the scratch page"
                self.pages[group][page][position % size] = digests[position + 1]
        row.computed = end
        self.computed_tokens += count

    def _copy(self, kind: CopyKind, group: int, source: int, target: int) -> None:
        device, host = self.pages[group], self.host[group]
        if kind is CopyKind.ZERO:
            device[target] = EMPTY
            return
        assert source > 0 and target > 0, "no unit that anyone can hold"
        content = (host if kind is CopyKind.IN else device)[source]
        assert content is not None, "nothing was ever written there"
        content = list(content) if isinstance(content, list) else content
        (host if kind is CopyKind.OUT else device)[target] = content


class ShadowTicket:
    def __init__(self, device: ShadowDevice, plan: Plan):
        self.device, self.plan = device, plan
        self.masks: Mapping[int, bytes] | None = None
        self.ready = False
        self.output: StepOutput | None = None

    def wait(self) -> StepOutput:
        self.device.log.append(("wait", self.plan.step))
        self.device.drain(self)
        assert self.output is not None
        return self.output


FULL = CacheSpec("full", "paged", (0, 1), (2, 4), "float32", page_tokens=4)
WINDOW = CacheSpec("window", "paged", (2,), (2, 4), "float32", page_tokens=4, window=10)
STATE = CacheSpec("state", "state", (3,), (8,), "float32", page_tokens=4, snapshot_tokens=16)
MIXES = {
    "full": [FULL],
    "window": [WINDOW],
    "state": [STATE],
    "full+window": [FULL, WINDOW],
    "full+state": [FULL, STATE],
    "all": [FULL, WINDOW, STATE],
}


@dataclass
class Rig:
    """An engine over the shadow device, small enough that everything runs out all the time."""

    mix: str = "full"
    num_pages: int = 24
    num_window: int | None = None  # pages of a window's pool, if other than the others'
    num_slots: int = 12
    num_host: int = 40
    max_rows: int = 6
    max_batch_tokens: int = 24
    chunk_tokens: int = 7
    depth: int = 1
    preemption: str = "auto"
    prefix_cache: bool = True
    host_cache: bool = True
    late: bool = False
    poison: set[int] = field(default_factory=set)
    order: str = "priority"
    drafter: Drafter | None = None
    page_tokens: int = 4

    def __post_init__(self) -> None:
        specs = [replace(spec, page_tokens=self.page_tokens) for spec in MIXES[self.mix]]
        paged = [self.num_pages if s.window is None else self.num_window or self.num_pages for s in specs]
        units = [pages if s.kind == "paged" else self.num_slots for s, pages in zip(specs, paged, strict=True)]
        host = [self.num_host] * len(specs) if self.num_host else None
        self.now = 0.0
        self.cache = CacheIndex(specs, units, host, prefix_cache=self.prefix_cache, host_cache=self.host_cache)
        limits = SchedulerLimits(self.max_rows, self.max_batch_tokens, self.chunk_tokens, preemption=self.preemption,
                        order=self.order, depth=self.depth)  # fmt: skip
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.now, drafter=self.drafter)
        self.device = ShadowDevice(self.cache, late=self.late, poison=self.poison)
        self.engine = Engine(self.scheduler, self.device, depth=self.depth)
        self.count = 0
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def add(self, prompt: list[int], *, max_tokens: int = 8, seed: int = 0, stop: frozenset[int] = frozenset(),
            priority: int = 0, deadline: float | None = None, sample_index: int = 0, salt: bytes = b"",
            grammar: object = None, speculate: bool = True) -> str:  # fmt: skip
        self.count += 1
        self.now += 0.001
        name = f"r{self.count}"
        params = SamplingParams(max_tokens=max_tokens, speculate=speculate).resolve()
        request = Request(name, list(prompt), len(prompt), params, len(prompt) + max_tokens, stop, seed, sample_index,
                          priority, self.now, deadline, salt, grammar=grammar)  # fmt: skip
        self.engine.add(request)
        self.outputs[name] = []
        return name

    def turn(self) -> None:
        for delta in self.engine.turn():
            self.outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.request_id not in self.reasons, "ended twice"
                self.reasons[delta.request_id] = delta.finish_reason.value
                self.cached[delta.request_id] = delta.usage.cached_tokens

    def finish(self, limit: int = 5000) -> None:
        while self.engine.has_work:
            limit -= 1
            assert limit > 0, "the engine makes no progress"
            self.turn()
            self.scheduler.check()


def random_prompt(rng: random.Random, pool: list[list[int]]) -> list[int]:
    """Often a repeat or an extension of an earlier prompt, so that the prefix tree has something to do."""
    if pool and rng.random() < 0.6:
        base = rng.choice(pool)
        prompt = base[: rng.randint(1, len(base))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
    else:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
    pool.append(prompt)
    return prompt
