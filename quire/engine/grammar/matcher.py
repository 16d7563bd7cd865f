"""Grammars for the engine: what a request's next token may be, as one bit per token id.

`GrammarCompiler` turns a `GrammarSpec` into a `Grammar` in threads of its own, so that no schema holds up the loop;
the loop asks a request's `Grammar` for a mask while the forward pass runs, all of a batch in one go (`MaskFiller`).
The library behind it is llguidance; nobody else knows it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
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
from quire.engine.grammar.vocabulary import GrammarVocabulary, one_token_mask, with_token
from quire.engine.reasoning_watch import ReasoningWatch
from quire.types import GrammarSpec, Plan, QuireError, Request

DEADLINE_SECONDS = 10.0
MAX_CACHED = 256
MAX_PENDING = 256
ONE_BY_ONE = 4  # up to so many masks are filled without the library's threads
SLOW_SECONDS = 0.1  # of CPU time for one mask; everyone in the batch waits for it
MAX_SLOW = 3  # a grammar that was slow so often is too complex
WATCHED_STEPS = 8  # after a slow step so many are filled one by one, to see whose grammar it is


class Grammar:
    """Where one request stands in its grammar. Follows the request's tokens, and finds its way back when asked about
    fewer of them, or others: a replay costs a replay, never a wrong mask."""

    def __init__(self, initial: Any, vocabulary: GrammarVocabulary, spec: GrammarSpec):
        """`initial`: the library's matcher at its start; None: nothing binds, it is there for its budget."""
        self._initial = initial  # never advanced: every request and every replay starts from a copy
        self._vocabulary = vocabulary
        self._spec = spec
        self.mask_bytes = vocabulary.mask_bytes
        self._watch = ReasoningWatch(spec, vocabulary)
        self._num_slow = 0
        self.error: QuireError | None = None  # it can't go on: the mask allows nothing
        self._restart()

    def fork(self) -> Grammar:
        """The same grammar at its start, for another request."""
        return Grammar(self._initial, self._vocabulary, self._spec)

    def mask(self, tokens: Sequence[int], start: int = 0) -> bytes:
        """One bit per token id that may come after `tokens[start:]`, which is what was sampled so far."""
        matcher = self.advance(tokens, start)
        if matcher is None:
            return self.settled_mask()
        return self.checked(matcher.compute_bitmask())

    def advance(self, tokens: Sequence[int], start: int = 0) -> Any:
        """Catch up with the tokens. Returns the library's matcher if it must be asked for a mask, None if the mask
        needs no asking (`settled_mask`)."""
        followed = self._followed
        num_known = len(followed)
        # What a request has sampled does not change, so its last token tells enough: only a rewind differs there.
        if start + num_known > len(tokens) or (num_known and tokens[start + num_known - 1] != followed[-1]):
            self._restart()
            num_known = 0
        for index in range(start + num_known, len(tokens)):
            self._follow(tokens[index])
        return self._matcher if self.is_binding and not self._ended and self.error is None else None

    @property
    def is_binding(self) -> bool:
        """False while the model reasons or is about to, and for good if nothing binds after that."""
        return self._initial is not None and not self._watch.is_inside and not self._watch.is_opening

    @property
    def forced(self) -> int | None:
        """The one token that may come now: reasoning has used up its budget, or its opening marker is half written
        where the grammar allows nothing else. None: no such constraint."""
        if self._initial is not None and self._watch.is_opening:
            return self._watch.next_of_opening
        return self._watch.forced

    @property
    def accepts_end(self) -> bool:
        """May the output end here?"""
        return self.is_binding and self.error is None and (self._ended or bool(self._matcher.is_accepting()))

    def settled_mask(self) -> bytes:
        """The mask where the matcher has no say: all while reasoning, or the one token that is forced; the end after
        the end; nothing after an error."""
        if self.error is not None:
            return bytes(self.mask_bytes)
        if self.forced is not None:
            return one_token_mask(self.forced, self.mask_bytes)
        return self._vocabulary.end_mask if self._ended else self._vocabulary.full_mask

    def checked(self, mask: bytes) -> bytes:
        """The mask just computed, unless the matcher gave up over it. A model that opens its reasoning itself may do
        that instead of answering."""
        if self._matcher.is_error():
            self.error = explain(self._matcher.get_error(), "grammar_failed")
            return self.settled_mask()
        opening = self._watch.next_of_opening
        return mask[: self.mask_bytes] if opening is None else with_token(mask[: self.mask_bytes], opening)

    def charge(self, seconds: float) -> None:
        """What its last mask cost. One that holds up the whole batch again and again must go."""
        self._num_slow += seconds > SLOW_SECONDS
        if self._num_slow >= MAX_SLOW and self.error is None:
            what = f"The grammar is too complex: {seconds:.2f} s to find out what may come next."
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
            watch.skip()  # what the grammar allows is its own, also where it looks like the marker's beginning
        if watch.is_inside or watch.is_before:
            watch.follow(token)
        elif self._matcher is not None and self.error is None and not self._ended:
            self._ended = token in self._vocabulary.eos_ids and bool(self._matcher.is_accepting())
            if not self._ended and not self._matcher.consume_token(token):
                why = self._matcher.get_error() if self._matcher.is_error() else ""
                self.error = explain(why or f"token {token} is not allowed here", "grammar_failed")


class GrammarCompiler:
    """Specs to grammars, within limits: size, time, how many wait, how many are kept. Any thread may call it."""

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
        """`tokenizer_bytes`: the bytes of each id; `vocab_size`: how many logits the model has, if more; `encode`: the
        model's own tokens of a text inside another, for text that is forced."""
        self._vocabulary = GrammarVocabulary(tokenizer_bytes, eos_ids, special_ids, vocab_size, encode)
        self._max_chars = max_chars
        self._max_cached = max_cached
        self._max_pending = max_pending
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-grammar")
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str, bool, bool], Future[Any]] = OrderedDict()  # the last used at the end
        self._num_pending = 0

    def warm(self) -> None:
        """Build the library's vocabulary now, not with the first grammar."""
        self._pool.submit(lambda: self._vocabulary.library)

    def compile(self, spec: GrammarSpec, *, deadline: float = DEADLINE_SECONDS) -> Grammar:
        """Wait for a grammar at most `deadline` seconds. Raises `invalid_schema` or `grammar_too_complex`."""
        try:
            return self.submit(spec, deadline=deadline).result(deadline)
        except FutureTimeout:
            raise too_slow(deadline) from None

    def submit(self, spec: GrammarSpec, *, deadline: float = DEADLINE_SECONDS) -> Future[Grammar]:
        """The same without waiting. One that waits in line longer than `deadline` is refused when its turn comes; one
        under way ends within the library's own limits."""
        done: Future[Grammar] = Future()
        done.set_running_or_notify_cancel()  # others may wait for the same grammar: it is not for one to cancel

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
        """The initial matcher of a spec, from the cache or on its way."""
        check_size(spec, self._max_chars)
        key = (spec.kind, spec.value, leads, spec.strict)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            if self._num_pending >= self._max_pending:
                what = f"{self._num_pending} grammars are waiting to be compiled already."
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
        probe = matcher.deep_copy()  # shares what it works out with all later copies
        allows_something = any(probe.compute_bitmask())
        if probe.is_error() or not allows_something:
            raise _refusal(spec, probe.get_error() or "it allows no text at all")
        return matcher


class MaskFiller:
    """Fills the masks of a step: the engine's `fill_masks`. Who has no grammar, or still reasons, gets none."""

    def __init__(self, num_threads: int | None = None):
        self._num_threads = num_threads
        self._executor: Any = None
        self._num_watched = 0  # steps that are still filled one by one

    def __call__(self, plan: Plan, requests: Mapping[str, Request]) -> dict[int, bytes]:
        masks: dict[int, bytes] = {}
        asked: list[tuple[int, Grammar, Any]] = []
        for index, row in enumerate(plan.rows):
            request = requests.get(row.request_id)
            if not row.wants_sample or request is None or request.grammar is None:
                continue
            grammar = request.grammar
            assert isinstance(grammar, Grammar), "a request is queued with its grammar compiled"
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
        """All in one call, in the library's threads, without Python's lock."""
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
