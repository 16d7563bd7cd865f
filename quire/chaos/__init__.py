"""The chaos gate: runs a server under traffic, injects faults by seed, and counts lost, duplicated and wrong tokens."""
