"""Removals of the rules of docs/speculation.md: what is taken away, and the test that must fail then.

`tests/pure/test_speculation_rules.py` checks that the list fits the sources and the page; `__main__` does the removing.
"""

from __future__ import annotations

from tests.rules.removal import CPU, PURE, Removal, drop

DRAFTS, UNITS, SCHEDULER = "quire/engine/drafts.py", "quire/cache/draft_units.py", "quire/engine/scheduler.py"
SAMPLES, VERIFY = "quire/runtime/samples.py", "quire/sampling/verify.py"
OVERLAP = f"{PURE}speculation_overlap.py::test_"
EVERY_PARAMETER = f"{CPU}speculation.py::test_every_parameter_samples_the_same_tokens_and_logprobs"
RANDOM = f"{PURE}speculation_random.py::test_random_moves_with_drafts"

SPECULATION_REMOVALS: tuple[Removal, ...] = (
    drop("steps", "a row with drafts is in one step in flight",
         f"{OVERLAP}a_row_with_drafts_is_in_one_step_and_others_go_on",
         DRAFTS, "if request.num_drafts > 0 or request.num_proposals > 0:", "if False:"),
    drop("steps", "drafts follow known tokens only", f"{OVERLAP}a_row_in_flight_without_drafts_is_not_drafted_for",
         DRAFTS, "if not r.inflight and max_drafts(r) > 0", "if max_drafts(r) > 0"),
    drop("steps", "a request waits only where drafts are expected",
         f"{PURE}speculation_goodput.py::test_requests_with_much_to_draft_are_waited_for_where_steps_overlap",
         "quire/engine/speculation/goodput.py", "[request.pending :]) >= worth", ") >= 0"),
    drop("rejection", "marks return behind what was accepted", f"{OVERLAP}rejected_drafts_leave_no_hole",
         DRAFTS, "else request.computed - rejected", "else request.computed"),
    drop("rejection", "device rows return behind what was accepted", EVERY_PARAMETER,
         SAMPLES, 'rows.computed[sent["rows"]] -= rejected', "pass"),
    drop("rejection", "pages of rejected drafts come back",
         f"{OVERLAP}pages_of_rejected_drafts_come_back_after_the_step",
         UNITS, "self._cache.rollback(request, len(request.tokens), fence)", "pass"),
    drop("ends", "a stop token ends a request within a draft",
         f"{OVERLAP}a_stop_token_within_a_draft_ends_the_request_there",
         "quire/engine/outcome.py", "    if used < len(delta.token_ids):", "    if False:"),
    drop("ends", "no draft goes beyond the last token", f"{OVERLAP}no_draft_goes_beyond_the_last_token",
         "quire/engine/speculation/seam.py", "return min(request.max_len - len(request.tokens) - 1, MAX_DRAFTS)",
         "return MAX_DRAFTS"),
    drop("ends", "a stop string ends the text within a draft",
         f"{CPU}speculation_llm.py::test_a_stop_string_within_a_draft_cuts_the_text_there",
         "quire/edge.py", "output.token_ids += new.token_ids", "output.token_ids += delta.token_ids"),
    drop("masks", "each position has a mask of its own", f"{OVERLAP}masks_are_filled_for_each_position",
         "quire/engine/loop.py", "grammar.mask(sampled + drafts[:count])", "grammar.mask(sampled)"),
    drop("masks", "compiled grammars and thinking budgets follow the drafts",
         f"{CPU}speculation.py::test_grammars_and_thinking_budgets_allow_the_same_tokens",
         SAMPLES, "part = masks[index][place * width : (place + 1) * width]", "part = masks[index][:width]"),
    drop("state", "state returns to that before the step", f"{OVERLAP}recurrent_state_returns_to_that_before_the_step",
         DRAFTS, "request.computed = row.start if self._has_state else request.computed - rejected",
         "request.computed = request.computed - rejected"),
    drop("state", "the backup becomes the live state", f"{OVERLAP}recurrent_state_returns_to_that_before_the_step",
         UNITS, "                lease.has_moved = True", "                pass"),
    drop("state", "no draft crosses a due snapshot", f"{OVERLAP}no_draft_crosses_a_due_snapshot",
         UNITS, "count = cache.chunk_end(request, request.planned, end + count + 1) - 1 - end", "pass"),
    drop("state", "a state that is far behind moves on", f"{OVERLAP}a_state_that_is_far_behind_moves_on",
         DRAFTS, " and r.num_replayed <= MAX_REPLAYED]", "]"),
    drop("room", "drafts take no page that others need", f"{OVERLAP}drafts_take_no_page_that_others_need",
         UNITS, "cache.free_for(lease, group) >= missing + margin", "cache.free_for(lease, group) >= missing"),
    drop("room", "half of the budget is for prompts", f"{OVERLAP}half_of_the_budget_is_for_prompts",
         DRAFTS, "spare = spare // 2 if has_prompts else spare", "pass"),
    drop("room", "backups come back when a request is cancelled", f"{OVERLAP}cancel_while_drafts_are_in_flight",
         "quire/cache/index.py",
         "            self.ledger.release_after(group, [slot], fence)\n        lease.backup.clear()",
         "            pass\n        lease.backup.clear()"),
    drop("preemption", "a victim waits for its step", f"{OVERLAP}a_victim_with_drafts_in_flight_waits_for_them",
         SCHEDULER, "        self.stats.preemptions += 1\n        if victim.inflight == 0:",
         "        self.stats.preemptions += 1\n        if True:"),
    drop("failures", "a failed step drops its drafts", f"{OVERLAP}a_failed_step_with_drafts_leaves_no_lie",
         "quire/engine/request_table.py",
         "        request.num_drafts = request.num_proposals = request.num_replayed = 0\n", ""),
    drop("failures", "a restart drafts behind what was delivered",
         f"{OVERLAP}a_restart_goes_on_behind_what_was_delivered",
         SCHEDULER, "len(request.tokens) + request.pending - request.planned", "len(request.tokens) + request.pending"),
    drop("samples", "each position counts the drafts before it", EVERY_PARAMETER,
         SAMPLES, "return computed - send(torch.tensor(self.behind, dtype=torch.int64), computed.device)",
         "return computed"),
    drop("samples", "what follows the first difference is dropped", EVERY_PARAMETER,
         VERIFY, "    return tokens[first : first + count + 1]", "    return tokens[first : first + len(drafts) + 1]"),
    drop("samples", "in speculation a draft before an impossible sample is rejected",
         f"{CPU}sampling_verify.py::test_a_draft_before_a_bad_sample_is_rejected",
         VERIFY, "((sampled == drafts) & ~after)", "(sampled == drafts)"),
)  # fmt: skip
