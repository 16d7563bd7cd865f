"""Turns: asks the engine, runs the calls, asks again, until the model answers without a call or a limit is reached.

`agent` is the loop, `prompt` writes the system message, `compaction` makes room, `calls` runs tools, `events` are what
front ends and scripts see.
"""
