"""The chaos gate: a server under mixed traffic, faults by seed, and proof that no token was lost, doubled or wrong."""
