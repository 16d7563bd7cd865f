"""The kinds of faults that the gate injects, by their effect."""

from __future__ import annotations

# DEATHS end the engine process. STEPS disturb steps, frames or swap space. Each kind is injected in turn, in an
# order that the seed decides.
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
# The disk of the KV cache: for a while writes find it full, read-only, slow or gone; or its files were damaged while no
# engine ran.
DISKS = ("cache_full", "cache_readonly", "cache_slow", "cache_vanished")
FAILING_STEPS = ("forward", "sample", "wait", "mask", "memory")  # the kinds of STEPS after which a step fails
POISON_CODES = {
    "raise": "step_failed",
    "nonfinite": "bad_logits",
    "die": "quarantined",
    "mask": "step_failed",
    "prepare": "prepare_failed",
    "detokenize": "detokenize_failed",
}
CLIENTS = ("hang_up", "slow_client", "vanish", "hostile", "full_disk", "cache_damaged")
KINDS = (*DEATHS, *STEPS, *DISKS, *(f"poison_{name}" for name in POISON_CODES), *CLIENTS)

# RANKS end or freeze one rank of a group. Faults inside the device's own steps, and those of the
# KV cache's disk, need an engine without ranks.
RANKS = ("rank_kill", "rank_stop")
WITHOUT_RANKS = ("host_page", "poison_nonfinite", *DISKS, "cache_damaged")


def kinds_for(num_ranks: int) -> tuple[str, ...]:
    """Return the kinds that a server with so many ranks can have."""
    if num_ranks == 1:
        return KINDS
    return (*RANKS, *(kind for kind in KINDS if kind not in WITHOUT_RANKS))
