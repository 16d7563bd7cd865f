"""Runs a model on several ranks: the plan goes to all of them, one samples, the engine's loop stays the one there is.

- `group` implements the engine's `Workers` for a group of ranks, and `rank_loop` is what each rank runs.
- `shared_sampler` gives all ranks the tokens that one of them samples.
- A link carries frames between the engine and one rank: `thread_links` within a process.
"""
