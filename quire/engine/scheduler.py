"""The scheduler: plans steps from waiting and running requests, and commits the output of steps.

Prefill and decode are one mechanism: a request has `expected_len` tokens, `planned` of them have state or will have it
after the steps in flight, and each step computes some of the rest. `plan` advances `planned` and `commit` advances
`computed`, so a failed step is rolled back to `computed`. Only the engine's loop calls this, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from quire.cache.index import CacheIndex
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.candidates import Candidates, InOrder, PrefixAware
from quire.engine.chunking import Chunking, choose_chunking
from quire.engine.costs.step_costs import StepCosts
from quire.engine.deferred_commit import DeferredCommit
from quire.engine.drafts import NO_DRAFTS, Drafts, PlannedDrafts
from quire.engine.limits import SchedulerLimits, SchedulerStats, SpeculationStats
from quire.engine.outcome import append_tokens, fail_row
from quire.engine.policies import ORDERS, Admission, LastInOrder, Order, QueueBounds, Victims
from quire.engine.queue import Deadlines, Refusal
from quire.engine.recovery import affected_by
from quire.engine.request_table import RequestTable
from quire.engine.speculation.seam import Drafter
from quire.types import Delta, FinishReason, Plan, PlanRow, QuireError, Request, Status, StepOutput

FindRoom = Callable[[Request, int, Plan], tuple[int, bool]]  # request, budget, plan -> end, preempted a request


class Scheduler:
    """Plans and commits the steps of one engine."""

    def __init__(
        self,
        cache: CacheIndex,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        order: Order | None = None,
        chunking: Chunking | None = None,
        admission: Admission | None = None,
        victims: Victims | None = None,
        candidates: Candidates | None = None,
        drafter: Drafter | None = None,
        costs: StepCosts | None = None,
        adapters: AdapterSlots | None = None,
    ):
        """`costs`: the table of step times; None: that of the drafter, or a new one."""
        self.cache = cache
        self.limits = limits
        self.stats = SchedulerStats()
        self.clock = clock
        self._order = order or ORDERS[limits.order]
        self.costs = costs or (drafter.costs if drafter is not None else StepCosts())
        self._chunking = chunking or choose_chunking(limits.max_batch_tokens, limits.step_target_seconds, self.costs)
        self._admission = admission or QueueBounds(limits.max_rows, limits.max_waiting, limits.max_waiting_tokens)
        self._victims = victims or LastInOrder(self._order)
        wait = limits.prefix_wait
        self._candidates: Candidates = candidates or (InOrder() if wait is None else PrefixAware(wait))
        self.adapters = adapters or AdapterSlots()
        self.table = RequestTable(cache, limits.max_rows, self._order, clock, self.adapters)
        self.requests, self.waiting, self.running = self.table.requests, self.table.waiting, self.table.running
        self.deferred = DeferredCommit(cache, self.table)
        self._drafts = PlannedDrafts(drafter, cache)
        self._deadlines = Deadlines()
        self._num_prompt = (0, 0)  # prefill rows and prompt tokens in the step being planned
        self._ended: list[Delta] = []  # final deltas of requests that ended outside a commit
        self._refusal: Refusal | None = None  # the last time the cache had no room for the head of the queue
        self.step_cap = limits.max_batch_tokens  # maximum tokens per step; reduced after the device ran out of memory
        self._only: Container[str] | None = None  # ids that may run while a failed step is bisected; None: all

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a validated request. Raises without any change if the queue is full or the prompt exceeds the cache."""
        if request.id in self.requests:
            raise QuireError("duplicate_id", f"A request with id {request.id!r} is already running.", "Use a fresh id.")
        if len(request.tokens) >= self.cache.capacity_tokens:
            raise QuireError(
                "prompt_too_long",
                f"The prompt has {len(request.tokens)} tokens, the cache holds {self.cache.capacity_tokens}.",
                "Shorten the prompt, or give the cache more memory.",
            )
        self.adapters.check_known(request.adapter)
        if not request.resumed:
            self._admission.admit(request, len(self.requests), self.waiting.num_tokens)
        request.max_len = min(request.max_len, self.cache.capacity_tokens)
        self.table.add(request)
        self._deadlines.add(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request in any status. Ids that are unknown or have ended are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._ended.append(self._end(request, reason))

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        for request_id in self._deadlines.expired(self.clock()):
            self.cancel(request_id, FinishReason.DEADLINE)

    def fail(self, request_id: str, error: QuireError) -> None:
        """End one request with an error; other requests are not affected."""
        request = self.requests.get(request_id)
        if request is not None:
            delta = self._end(request, FinishReason.ERROR)
            delta.error, delta.error_code = str(error), error.code
            self._ended.append(delta)

    def save_drafts(self) -> None:
        """Write what speculation keeps for the next engine."""
        self._drafts.save()

    @property
    def speculation(self) -> SpeculationStats | None:
        """The counters of speculation; None without it."""
        return self._drafts.stats()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._ended or self.cache.has_stores)

    @property
    def awaits_transfers(self) -> bool:
        """Whether nothing can be planned before a transfer between tiers has ended."""
        num_loading = len(self.table.loading)
        return 0 < num_loading == len(self.requests) and not self._ended and not self.cache.has_stores

    def _end(self, request: Request, reason: FinishReason) -> Delta:
        self._count_end(request)
        return self.table.end(request, reason)

    def _count_end(self, request: Request) -> None:
        self._deadlines.remove(request)
        self.stats.ended += 1
        self._drafts.end(request)

    def take_ended(self) -> list[Delta]:
        """Return the final deltas of requests that ended outside a commit: cancelled, past their deadline or failed."""
        ended, self._ended = self._ended, []
        return ended

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Plan the next step. Returns None if nothing can be planned before a step in flight commits."""
        self.expire()
        self.table.loaded(self.cache.poll())
        plan = Plan(self.table.last_step + 1)
        self.cache.clear_scrubbed(plan)
        preempting = self._release_drained(plan)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            behind = len(request.tokens) + request.pending - request.planned
            if behind > 0 and self._may_run(request):
                (decodes if behind == 1 + request.num_replayed else prefills).append(request)
        if self.limits.stages > 1:  # rows of one step leave the other stages idle, so they are spread over several
            del decodes[-(-len(self.running) // self.limits.stages) :]
        budget = self._chunking.budget(len(decodes), prefills[0].planned if prefills else 0)
        budget = min(budget, self.step_cap)
        has_prompts = bool(prefills) or bool(self.waiting)
        drafts = self._drafts.choose(decodes, has_prompts, budget) if self._only is None else NO_DRAFTS
        budget, preempted = self._plan_rows(decodes + prefills, len(decodes), budget, plan, self._make_room, drafts)
        preempting = preempting or preempted
        if not preempting:  # a waiting request must not take the room of one that was just preempted
            self._admit(budget, plan)
        if not (plan.rows or plan.copies or plan.added or self.cache.has_stores):
            return None
        if self._only is None:
            self._drafts.plan_proposals(self.requests, len(self.running), plan)
        self.cache.finish(plan)
        self.adapters.finish(plan)
        plan.freed = self.table.rows.take_freed()
        self.table.last_step = plan.step
        self.stats.count(plan, *self._num_prompt)
        self._num_prompt = (0, 0)
        return plan

    def observe(self, plan: Plan, seconds: float, proposing: float = 0.0) -> None:
        """Report how long a step took, and how long the device proposed drafts after it."""
        self.costs.observe(plan, seconds)
        self._drafts.observe(plan, seconds, proposing)

    def set_step_target(self, step_target_seconds: float | None) -> None:
        """Set the target time of steps that contain decodes; None: steps as large as the limits allow."""
        self._chunking = choose_chunking(self.limits.max_batch_tokens, step_target_seconds, self.costs)

    def _may_run(self, request: Request) -> bool:
        if request.status is not Status.RUNNING:
            return False
        if request.pending:
            if len(request.tokens) + request.pending >= request.max_len:
                return False  # the sampled token in flight is its last
            if self.limits.depth > 2 or self._drafts.waits(request):
                return False  # such a row is in one step in flight only, until its sampled token is known
        return self._only is None or request.id in self._only

    def _make_room(self, request: Request, budget: int, plan: Plan) -> tuple[int, bool]:
        """Reserve cache units for a running request; preempt another one, or the request itself, if there are too few.

        Returns the length to compute it to, and whether a request was preempted.
        """
        end = self._chunk_end(request, budget)
        if self.cache.reserve(request, end, plan):
            return end, False
        fits = self.cache.reservable(request)
        if fits > request.planned:
            end = min(end, fits)
            end = self.cache.chunk_end(request, request.planned, end)
            self.cache.reserve(request, end, plan)
            return end, False
        rivals = [r for r in self.running if r.status is Status.RUNNING and r is not request]
        victim = self._victims.choose(rivals, request) or request
        self._preempt(victim, plan)
        if victim is not request and self.cache.reserve(request, end, plan):
            return end, True
        return request.planned, True

    def _find_free_room(self, request: Request, budget: int, plan: Plan) -> tuple[int, bool]:
        """Reserve cache units for a newly admitted request without preempting. Returns the same as `_make_room`."""
        end = self._chunk_end(request, budget)
        if not self.cache.reserve(request, end, plan):
            end = min(end, self.cache.reservable(request))
            self.cache.reserve(request, end, plan)
        return end, False

    def _chunk_end(self, request: Request, budget: int) -> int:
        start = request.planned
        count = min(request.expected_len - start, budget, self.limits.chunk_tokens)
        return self.cache.chunk_end(request, start, start + count)

    def _plan_rows(
        self,
        requests: Sequence[Request],
        num_decodes: int,
        budget: int,
        plan: Plan,
        find_room: FindRoom,
        drafts: Drafts,
    ) -> tuple[int, bool]:
        """Give each request a row of the step with as many tokens as there is room for.

        The first `num_decodes` compute one token each and those that they replay, and need room only where a page
        begins. Returns what is left of the budget, and whether `find_room` has preempted a request.
        """
        add_row, page_tokens, has_state = plan.rows.append, self.cache.page_tokens, bool(self.cache.state)
        any_preempted = False
        for index, request in enumerate(requests):
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier request of this step
            start, replayed = request.planned, request.num_replayed
            if index < num_decodes and 0 < start % page_tokens < page_tokens - replayed and replayed < budget:
                end, wants_sample = start + 1 + replayed, True
            else:
                end, preempted = find_room(request, budget, plan)
                any_preempted = any_preempted or preempted
                if end <= start:
                    continue
                wants_sample = end == len(request.tokens) + request.pending
                if start < request.prompt_len:
                    prompt_rows, prompt_tokens = self._num_prompt
                    self._num_prompt = (prompt_rows + 1, prompt_tokens + min(end, request.prompt_len) - start)
            num_drafts = 0
            if has_state:
                self._drafts.write_moved(request, plan)
                replayed = min(replayed, end - start)
                request.num_replayed -= replayed
            if drafts and index < num_decodes and wants_sample:
                num_drafts = self._drafts.add(request, drafts, end, budget - (end - start), len(self.running), plan)
            count = end - start + num_drafts
            add_row(PlanRow(request.id, request.row, start, count, num_drafts, wants_sample, replayed))
            if wants_sample:
                request.pending += 1
            if request.grammar is not None:
                plan.may_mask = True
            request.planned = start + count
            request.inflight += 1
            budget -= count
            if has_state and end % page_tokens == 0:
                self.cache.snapshot(request, end, plan)
        return budget, any_preempted

    def _admit(self, budget: int, plan: Plan) -> None:
        while budget > 0:
            request = self._next_waiting()
            if request is None:
                return
            if not self.table.rows.num_free and not any(self._yields_to(r, request) for r in self.running):
                return  # without a row or a victim its prompt is not matched again at each step
            if self._only is not None and not self.adapters.has_room(request.adapter):
                if self._preempt_for(request, plan):  # those that hold the slots do not run meanwhile
                    continue
                return
            if self._only is None and self.table.wait_for_slot(request):
                continue
            if self._refusal is not None and self._refusal.still_holds(request, len(self.running), self._available()):
                if self._preempt_for(request, plan):
                    continue
                return
            if request.status is Status.WAITING and (self._wait_for_prefix(request) or self._wait_for_load(request)):
                continue
            margin = len(self.running)  # each running request needs a page soon
            take = self.cache.swap_in if request.status is Status.SWAPPED else self.cache.admit
            if not self.table.rows.num_free or not take(request, plan, margin):
                if self.table.rows.num_free:
                    self._refusal = Refusal(request, len(self.running), self._available())
                if self._preempt_for(request, plan):
                    continue
                return
            self._refusal = None
            self.table.start(request, plan)
            budget, _ = self._plan_rows((request,), 0, budget, plan, self._find_free_room, NO_DRAFTS)

    def _available(self) -> list[int]:
        return [self.cache.available(group) for group in range(len(self.cache.specs))]

    def _next_waiting(self) -> Request | None:
        if self._only is None:
            first = self.waiting.first(self._candidates.num_seen)
            if len(first) < 2 or first[0].status is Status.SWAPPED:
                return first[0] if first else None
            waiting = [one for one in first if one.status is Status.WAITING]
            return self._candidates.choose(waiting, lambda one: self.cache.match(one).length, self.clock())
        return min((r for r in self.waiting if r.id in self._only), key=self._order, default=None)

    def _yields_to(self, running: Request, request: Request) -> bool:
        """True if `running` may be preempted for the waiting `request`: its priority is strictly lower, or it may not
        run while a failed step is bisected."""
        return running.priority > request.priority or (self._only is not None and running.id not in self._only)

    def _preempt_for(self, request: Request, plan: Plan) -> bool:
        """Preempt a running request for the head of the queue. True if its row is free already, so that this plan may
        admit the head."""
        candidates = [r for r in self.running if r.status is Status.RUNNING and self._yields_to(r, request)]
        barred = [r for r in candidates if self._only is not None and r.id not in self._only]
        victim = max(barred, key=self._order) if barred else self._victims.choose(candidates, request)
        if victim is None:
            return False
        self._preempt(victim, plan)
        return self._only is not None and victim.status is not Status.DRAINING and self.table.rows.num_free > 0

    def _wait_for_prefix(self, request: Request) -> bool:
        """Hold a request while another one computes the same prefix. False if it need not wait."""
        if not self.cache.prefix_cache or request.params.needs_whole_prompt or self._only is not None:
            return False
        key = self.cache.claims.wait_for(request, self.cache.match(request).length)
        if key is None:
            return False
        self.table.hold(request, key)
        return True

    def _wait_for_load(self, request: Request) -> bool:
        """Let a request wait while its cached prefix is loaded from a store. False if it need not."""
        if self._only is not None or not self.cache.stage(request, self.costs.prompt_seconds):
            return False
        self.table.wait_for_load(request)
        return True

    # -- preemption -----------------------------------------------------------------------------------------------

    def _preempt(self, victim: Request, plan: Plan) -> None:
        """Preempt a request: now if it is in no step in flight, else after these have committed."""
        victim.status = Status.DRAINING
        victim.preemptions += 1
        self.stats.preemptions += 1
        if victim.inflight == 0:
            self._swap_or_drop(victim, plan)

    def _release_drained(self, plan: Plan) -> bool:
        draining = [r for r in self.running if r.status is Status.DRAINING]
        for victim in draining:
            if victim.inflight == 0:
                self._swap_or_drop(victim, plan)
        return bool(draining)

    def _swap_or_drop(self, victim: Request, plan: Plan) -> None:
        self.table.leave_row(victim)
        self.table.wake(self.cache.claims.withdraw(victim))
        worth_it = self.limits.preemption != "recompute" and victim.computed >= victim.prompt_len
        if worth_it and self.cache.swap_out(victim, plan):
            victim.status = Status.SWAPPED
            self.stats.swaps += 1
        else:
            self.table.drop_state(victim)
            self.stats.recomputes += 1
        self.waiting.push(victim)

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, output: StepOutput) -> list[Delta]:
        """Take a step's output into the requests: advance `computed`, append tokens, end requests. Returns the deltas.

        Updates of the cache are put off into `deferred`, which is flushed after the deltas are delivered.
        """
        deltas = []
        bad_rows, prompt_logprobs = set(output.bad_rows), output.prompt_logprobs
        requests, defer, num_sampled = self.requests, self.deferred.add, 0
        for index, row in enumerate(plan.rows):
            request = requests.get(row.request_id)
            if request is None or request.row != row.row:
                continue  # it ended while this step was in flight, so its sampled token is dropped
            request.inflight -= 1
            request.computed += row.count
            delta = Delta(row.request_id, output.tokens[index])
            if prompt_logprobs and index in prompt_logprobs:
                delta.prompt_logprobs = prompt_logprobs[index][max(0, request.prompt_scored - row.start) :]
                request.prompt_scored = max(request.prompt_scored, row.start + len(prompt_logprobs[index]))
            if output.pooled:
                delta.embedding = output.pooled.get(index)
            reason = None
            if bad_rows and index in bad_rows:
                reason = fail_row(request, delta)
                self.cache.scrub(request)
            elif row.wants_sample:
                request.pending -= 1
                delta.logprobs = output.logprobs.get(index)
                if not request.first_token_at:
                    request.first_token_at = self.clock()
                num_accepted = len(delta.token_ids) - 1
                reason = append_tokens(request, delta)
                if row.num_drafts:
                    delta.accepted = min(num_accepted, len(delta.token_ids))  # what follows an end is no output
                    delta.rejected = row.num_drafts - delta.accepted
                    self._drafts.settle(request, row, num_accepted, self.table.last_step)
                if index in plan.proposals:
                    self._drafts.take_proposals(
                        request, output.drafts.get(index, []), output.draft_chances.get(index, [])
                    )
                num_sampled += len(delta.token_ids)
            if reason is not None:
                self._finish(delta, request, reason)
            defer(request, reason)
            if delta.token_ids or delta.prompt_logprobs or reason is not None:
                deltas.append(delta)
        self.stats.sampled_tokens += num_sampled
        self.deferred.seal(plan.step)
        return deltas

    def _finish(self, delta: Delta, request: Request, reason: FinishReason) -> None:
        """End a request in a commit. Its row and units are released by the deferred part of the commit."""
        self._count_end(request)
        end = self.table.mark_ended(request, reason)
        delta.finish_reason, delta.usage, delta.timing = reason, end.usage, end.timing

    # -- failed steps ---------------------------------------------------------------------------------------------

    def abandon(self, plans: list[Plan]) -> dict[str, int]:
        """Roll back steps that will never commit: requests in them return to the queue.

        Their full pages are in the prefix tree, so each computes at most its tail again. Returns the ids of these
        requests with the number of tokens that the steps would have computed.
        """
        reached: dict[str, int] = {}
        for request in affected_by(plans, self.requests.values()):
            if request.status is Status.SWAPPED:
                self.waiting.remove(request)
                self.table.without_slot.pop(request.id, None)
            reached[request.id] = min(request.planned, len(request.tokens))
            self.table.leave_row(request)
            self.table.drop_state(request)
            self.waiting.push(request)
        self.cache.abandon()
        for plan in plans:
            self.table.rows.announce_again(plan.freed)
            self.adapters.load_again(plan.adapters)
        self.table.settle(self.table.last_step)
        return reached

    def shrink_steps(self, plans: list[Plan]) -> bool:
        """Halve the size of steps after memory ran out in one of `plans`. False if steps are at their minimum."""
        largest = max(plan.num_tokens for plan in plans)
        smaller = max(self.limits.max_rows, largest // 2)
        if smaller >= min(largest, self.step_cap):
            return False
        self.step_cap = smaller
        return True

    def restrict(self, only: Container[str] | None) -> None:
        """Let only these requests run while a failed step is bisected; None: all."""
        self._only = only
        self.table.ask_for_slots()

    def use_weights(self, version: bytes, in_flight: str) -> None:
        """Take note of other weights: prefixes of the old ones are not found again. Only while no step is in flight.

        `in_flight`: open requests "keep" what they have computed, "recompute" it with the new weights, or "end".
        """
        self.cache.weights = version
        for request in list(self.requests.values()):
            if in_flight == "end":
                error = QuireError("weights_replaced", "The model's weights were replaced.", "Send the request again.")
                self.fail(request.id, error)
            elif in_flight == "recompute":
                self.table.restart(request)
        self.table.rename_prefixes()

    # -- rebuild --------------------------------------------------------------------------------------------------

    def empty_copy(self) -> Scheduler:
        """Return a scheduler with the same limits, policies and counters and without requests.

        Step numbers continue, and the first plan frees every row of the device.
        """
        new = Scheduler(
            self.cache.empty_copy(),
            self.limits,
            clock=self.clock,
            order=self._order,
            chunking=self._chunking,
            admission=self._admission,
            victims=self._victims,
            candidates=self._candidates,
            drafter=self._drafts.drafter,
            costs=self.costs,
            adapters=self.adapters.empty_copy(),
        )
        new.stats, new.step_cap = self.stats, self.step_cap
        self._drafts.end(*self.requests.values())
        new.table.reset(self.table.last_step)
        return new

    def restarted(self) -> Scheduler:
        """Return a scheduler with the same requests, all in the queue, and an empty cache: the device has lost it.

        Each request goes on from the tokens that have committed.
        """
        requests = sorted(self.requests.values(), key=self._order)
        new = self.empty_copy()
        new._ended = self._ended
        for request in requests:
            request.status, request.row = Status.WAITING, -1
            request.computed = request.planned = request.pending = request.inflight = 0
            request.num_drafts = request.num_proposals = request.num_replayed = 0
            new.table.add(request)
            new._deadlines.add(request)
        return new

    # -- integrity ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.deferred.pending, "the deferred part of a commit did not run"
        self.table.check()
