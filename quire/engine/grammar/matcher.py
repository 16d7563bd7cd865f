"""Grammars of requests: masks with one bit per token id that may come next.

`GrammarCompiler` compiles a `GrammarSpec` to a `Grammar` in its own threads, so that no schema delays the loop.
`MaskFiller` computes the masks of a batch in one call while the forward pass runs. Both use llguidance.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from copy import copy
from typing import Any

from quire.engine.grammar.canonical_tokens import Encode
from quire.engine.grammar.source import (
    MAX_CHARS,
    check_size,
    explain,
    explain_regex,
    explain_schema,
    library_grammar,
)
from quire.engine.grammar.vocabulary import GrammarVocabulary, allows, one_token_mask, with_token
from quire.engine.reasoning_watch import ReasoningWatch
from quire.types import GrammarSpec, Plan, QuireError, Request

DEADLINE_SECONDS = 10.0
MAX_CACHED = 256
MAX_PENDING = 256
ONE_BY_ONE = 4  # maximum number of masks that are filled without the library's threads
SLOW_SECONDS = 0.1  # CPU time of a slow mask, for which the whole batch waits
MAX_SLOW = 3  # number of slow masks after which a grammar is refused as too complex
WATCHED_STEPS = 8  # number of steps after a slow one that are filled one by one, to find the slow grammar


class Grammar:
    """The position of one request in its grammar.

    It follows the request's tokens. If these were rolled back or differ, it replays them from the start, so that a mask
    is never wrong.
    """

    def __init__(self, initial: Any, vocabulary: GrammarVocabulary, spec: GrammarSpec):
        """`initial`: the library's matcher at its start; None for a grammar that only limits reasoning."""
        self._initial = initial  # never advanced, since requests and replays start from copies
        self._vocabulary = vocabulary
        self._spec = spec
        self.mask_bytes = vocabulary.mask_bytes
        self._watch = ReasoningWatch(spec, vocabulary)
        self._num_slow = 0
        self.error: QuireError | None = None  # the reason why no token is allowed any more
        self._restart()

    def fork(self) -> Grammar:
        """Return the same grammar at its start, for another request."""
        return Grammar(self._initial, self._vocabulary, self._spec)

    def mask(self, tokens: Sequence[int], start: int = 0) -> bytes:
        """Return one bit per token id, set where the token may follow the sampled tokens `tokens[start:]`."""
        matcher = self.advance(tokens, start)
        if matcher is None:
            return self.settled_mask()
        return self.checked(matcher.compute_bitmask())

    def advance(self, tokens: Sequence[int], start: int = 0) -> Any:
        """Follow the tokens. Returns the matcher if it must compute the mask, else None: see `settled_mask`."""
        followed = self._followed
        num_known = len(followed)
        # Committed tokens never change, so comparing the last one is enough to notice a rollback.
        if start + num_known > len(tokens) or (num_known and tokens[start + num_known - 1] != followed[-1]):
            self._restart()
            num_known = 0
        for index in range(start + num_known, len(tokens)):
            self._follow(tokens[index])
        return self._matcher if self.is_binding and not self._ended and self.error is None else None

    @property
    def is_binding(self) -> bool:
        """False while the model reasons or opens reasoning, and always for a grammar without constraint."""
        return self._initial is not None and not self._watch.is_inside and not self._watch.is_opening

    @property
    def forced(self) -> int | None:
        """The only allowed token, if reasoning has spent its budget, or if its opening marker is written in part and
        the grammar allows nothing else. None: no such constraint."""
        if self._initial is not None and self._watch.is_opening:
            return self._watch.next_of_opening
        return self._watch.forced

    @property
    def accepts_end(self) -> bool:
        """True if the output may end here."""
        return self.is_binding and self.error is None and (self._ended or bool(self._matcher.is_accepting()))

    def settled_mask(self) -> bytes:
        """Return the mask for a position at which the matcher is not used: no token after an error, the forced token,
        the end-of-sequence ids after the end, and else all tokens."""
        if self.error is not None:
            return bytes(self.mask_bytes)
        if self.forced is not None:
            return one_token_mask(self.forced, self.mask_bytes)
        return self._vocabulary.end_mask if self._ended else self._vocabulary.full_mask

    def checked(self, mask: bytes) -> bytes:
        """Return a mask that the matcher has computed, or an empty one if the matcher failed.

        The token that opens reasoning is allowed as well where the model may still reason.
        """
        if self._matcher.is_error():
            self.error = explain(self._matcher.get_error(), "grammar_failed")
            return self.settled_mask()
        opening = self._watch.next_of_opening
        return mask[: self.mask_bytes] if opening is None else with_token(mask[: self.mask_bytes], opening)

    def draft_masks(self, tokens: Sequence[int], start: int, drafts: Sequence[int]) -> bytes:
        """Return the masks after `tokens` and after each draft, joined. Behind a draft that is not allowed they do not
        matter, since it can't be accepted."""
        self.advance(tokens, start)
        probe, masks = self._probe(), [self._next_mask()]
        for draft in drafts:
            if not allows(masks[-1], draft):
                break
            probe._follow(draft)
            masks.append(probe._next_mask())
        missing = len(drafts) + 1 - len(masks)
        return b"".join(masks) + self._vocabulary.full_mask * missing

    def count_allowed(self, tokens: Sequence[int], start: int, drafts: list[int]) -> int:
        """Return how many of the drafts may follow. Reasoning is not constrained, nor what follows it in one draft."""
        matcher = self.advance(tokens, start)
        if matcher is not None:
            return int(matcher.validate_tokens(drafts))
        forced = self.forced
        return int(self.error is None and (forced is None or drafts[:1] == [forced])) and len(drafts)

    def forced_tokens(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return the tokens that must follow; empty if there is a choice."""
        matcher = self.advance(tokens, start)
        if matcher is None:
            return self._watch.rest_of_closing if self.error is None else []
        return [] if self._watch.next_of_opening is not None else list(matcher.compute_ff_tokens())

    def _probe(self) -> Grammar:
        """Return a copy at the same position, to follow tokens that may never come."""
        probe = copy(self)
        probe._matcher = None if self._matcher is None else self._matcher.deep_copy()
        probe._watch, probe._followed = copy(self._watch), []
        return probe

    def _next_mask(self) -> bytes:
        """Return the mask at the position that has been reached."""
        if self.is_binding and not self._ended and self.error is None:
            return self.checked(self._matcher.compute_bitmask())
        return self.settled_mask()

    def charge(self, seconds: float) -> None:
        """Record the time of a mask. The grammar fails after `MAX_SLOW` slow ones, since they delay the whole batch."""
        self._num_slow += seconds > SLOW_SECONDS
        if self._num_slow >= MAX_SLOW and self.error is None:
            what = f"The grammar is too complex: computing the allowed next tokens took {seconds:.2f} s."
            self.error = QuireError("grammar_too_complex", what, "Make it less ambiguous, or smaller.")

    def _restart(self) -> None:
        self._matcher: Any = None if self._initial is None else self._initial.deep_copy()
        self._followed: list[int] = []
        self._watch.restart()
        self._ended = False
        self.error = None

    def _follow(self, token: int) -> None:
        self._followed.append(token)
        watch = self._watch
        may_answer = watch.is_before and not watch.is_opening and self._initial is not None
        if may_answer and self._matcher.validate_tokens([token]) == 1:
            watch.skip()  # the grammar takes precedence where its text looks like the marker's beginning
        if watch.is_inside or watch.is_before:
            watch.follow(token)
        elif self._matcher is not None and self.error is None and not self._ended:
            self._ended = token in self._vocabulary.eos_ids and bool(self._matcher.is_accepting())
            if not self._ended and not self._matcher.consume_token(token):
                why = self._matcher.get_error() if self._matcher.is_error() else ""
                self.error = explain(why or f"token {token} is not allowed here", "grammar_failed")


class GrammarCompiler:
    """Compiles specs to grammars, with limits on size, time, pending specs and cache. Safe to call from any thread."""

    def __init__(
        self,
        tokenizer_bytes: Sequence[bytes],
        eos_ids: Sequence[int],
        *,
        special_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        encode: Encode | None = None,
        max_chars: int = MAX_CHARS,
        num_threads: int = 2,
        max_cached: int = MAX_CACHED,
        max_pending: int = MAX_PENDING,
    ):
        """`tokenizer_bytes`: the bytes of each id. `vocab_size`: the number of logits of the model, if larger.
        `encode`: the model's own tokenizer for a text inside another, used for forced text."""
        self._vocabulary = GrammarVocabulary(tokenizer_bytes, eos_ids, special_ids, vocab_size, encode)
        self._max_chars = max_chars
        self._max_cached = max_cached
        self._max_pending = max_pending
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-grammar")
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str, bool, bool], Future[Any]] = OrderedDict()  # least recently used first
        self._num_pending = 0

    def warm(self) -> None:
        """Start to build the library's vocabulary, which the first grammar would wait for."""
        self._pool.submit(lambda: self._vocabulary.library)

    def compile(self, spec: GrammarSpec, *, deadline: float = DEADLINE_SECONDS) -> Grammar:
        """Compile a spec, waiting at most `deadline` seconds. Raises `invalid_schema` or `grammar_too_complex`."""
        try:
            return self.submit(spec, deadline=deadline).result(deadline)
        except FutureTimeout:
            raise too_slow(deadline) from None

    def submit(self, spec: GrammarSpec, *, deadline: float = DEADLINE_SECONDS) -> Future[Grammar]:
        """Compile a spec without waiting.

        A spec that is queued for longer than `deadline` is refused; a compilation ends within the library's limits.
        """
        done: Future[Grammar] = Future()
        done.set_running_or_notify_cancel()  # not cancellable, since other requests may wait for the same grammar

        def deliver(found: Future[Any]) -> None:
            error = QuireError("engine_closed", "The engine was closed.") if found.cancelled() else found.exception()
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(Grammar(found.result(), self._vocabulary, spec))

        if spec.kind == "free":
            done.set_result(Grammar(None, self._vocabulary, spec))
            return done
        try:
            self._compiled(spec, bool(spec.after_reasoning), deadline).add_done_callback(deliver)
        except QuireError as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, spec: GrammarSpec, leads: bool, deadline: float) -> Future[Any]:
        """Return the future of a spec's initial matcher, from the cache or newly submitted."""
        check_size(spec, self._max_chars)
        key = (spec.kind, spec.value, leads, spec.strict)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            if self._num_pending >= self._max_pending:
                what = f"{self._num_pending} grammars are already waiting to be compiled."
                raise QuireError("queue_full", what, "Try again in a moment.")
            self._num_pending += 1
            future = self._pool.submit(self._build, spec, leads, time.monotonic() + deadline, deadline)
            self._known[key] = future
            if len(self._known) > self._max_cached:
                self._known.popitem(last=False)
        future.add_done_callback(lambda found: self._settle(key, found))
        return future

    def _settle(self, key: tuple[str, str, bool, bool], found: Future[Any]) -> None:
        with self._lock:
            self._num_pending -= 1
            failed = found.cancelled() or found.exception() is not None
            if failed and self._known.get(key) is found:
                del self._known[key]

    def _build(self, spec: GrammarSpec, leads: bool, until: float, deadline: float) -> Any:
        if time.monotonic() > until:
            raise too_slow(deadline)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary.library, library_grammar(spec, leads), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        probe = matcher.deep_copy()  # shares its computed state with all later copies
        allows_something = any(probe.compute_bitmask())
        if probe.is_error() or not allows_something:
            raise _refusal(spec, probe.get_error() or "it allows no text at all")
        return matcher


class MaskFiller:
    """Fills the masks of a step. Rows without a grammar or still in reasoning get no mask."""

    def __init__(self, num_threads: int | None = None):
        self._num_threads = num_threads
        self._executor: Any = None
        self._num_watched = 0  # number of steps that are still filled one by one

    def __call__(self, plan: Plan, requests: Mapping[str, Request]) -> dict[int, bytes]:
        masks: dict[int, bytes] = {}
        asked: list[tuple[int, Grammar, Any]] = []
        for index, row in enumerate(plan.rows):
            request = requests.get(row.request_id)
            if not row.wants_sample or request is None or request.grammar is None:
                continue
            grammar = request.grammar
            assert isinstance(grammar, Grammar), "a request is queued with its grammar compiled"
            if row.num_drafts:
                began = time.thread_time()
                masks[index] = grammar.draft_masks(request.tokens, request.prompt_len, plan.drafts[index])
                grammar.charge((time.thread_time() - began) / (row.num_drafts + 1))
                continue
            matcher = grammar.advance(request.tokens, request.prompt_len)
            if matcher is not None:
                asked.append((index, grammar, matcher))
            elif grammar.is_binding or grammar.forced is not None:
                masks[index] = grammar.settled_mask()
        if len(asked) <= ONE_BY_ONE or self._num_watched:
            self._num_watched = max(0, self._num_watched - 1)
            for index, grammar, matcher in asked:
                began = time.thread_time()
                masks[index] = grammar.checked(matcher.compute_bitmask())
                grammar.charge(time.thread_time() - began)
        else:
            began = time.monotonic()
            self._fill_together(asked, masks)
            if time.monotonic() - began > SLOW_SECONDS:
                self._num_watched = WATCHED_STEPS
        return masks

    def _fill_together(self, asked: list[tuple[int, Grammar, Any]], masks: dict[int, bytes]) -> None:
        """Compute all masks in one call, in the library's threads and without Python's global lock."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        width = asked[0][1].mask_bytes
        buffer = bytearray(width * len(asked))
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        jobs = [(matcher, place) for place, (_, _, matcher) in enumerate(asked)]
        self._executor.unsafe_compute_mask_ptr(jobs, address, width, len(asked))
        for place, (index, grammar, _) in enumerate(asked):
            masks[index] = grammar.checked(bytes(buffer[place * width : (place + 1) * width]))


def _refusal(spec: GrammarSpec, complaint: str) -> QuireError:
    if spec.kind == "json_schema":
        return explain_schema(complaint)
    return explain_regex(complaint) if spec.kind == "regex" else explain(complaint, "invalid_schema")


def too_slow(deadline: float) -> QuireError:
    what = f"The grammar was not ready within {deadline:g} seconds."
    return QuireError("grammar_too_complex", what, "Use a simpler schema or pattern, or try again later.")
