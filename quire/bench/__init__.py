"""Benchmarks behind `quire bench`; scripts may call them too.

Each benchmark returns a report of plain numbers that JSON can hold, and `tables` prints it. Benchmarks use the engine
through its public classes only; torch is imported with `quire.llm`, if a model is needed.
"""
