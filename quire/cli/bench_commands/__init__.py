"""The flags of single benchmarks, and how they become settings. `quire.cli.bench` is the command."""
