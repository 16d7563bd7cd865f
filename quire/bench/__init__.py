"""Benchmarks: the same work again and again, timed truthfully. `quire bench` calls them, and so may a script.

Each benchmark returns a report of plain numbers, ready for JSON; `tables` shows it to a person. They use the engine
through its public classes only, and torch comes in with `quire.llm` where a model is needed.
"""
