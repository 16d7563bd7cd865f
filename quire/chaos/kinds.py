"""The kinds of faults the gate knows."""

from __future__ import annotations

# By what they do; each kind is injected in turn, in an order the seed decides.
DEATHS = ("kill", "stop", "crash", "commit", "starve", "frame_lost", "frame_damaged", "order_damaged")
STEPS = (
    "forward",
    "sample",
    "wait",
    "mask",
    "memory",
    "frame_foreign",
    "frame_doubled",
    "order_foreign",
    "order_doubled",
    "host_page",
)
FAILING_STEPS = ("forward", "sample", "wait", "mask", "memory")  # of these, the ones that make a step fail
POISON_CODES = {
    "raise": "step_failed",
    "nonfinite": "bad_logits",
    "die": "quarantined",
    "mask": "step_failed",
    "prepare": "prepare_failed",
    "detokenize": "detokenize_failed",
}
CLIENTS = ("hang_up", "slow_client", "vanish", "hostile", "full_disk")
KINDS = (*DEATHS, *STEPS, *(f"poison_{name}" for name in POISON_CODES), *CLIENTS)
