"""Random and mutated input for everything that reads what strangers wrote. `python -m tests.fuzz --cases N` runs it."""
