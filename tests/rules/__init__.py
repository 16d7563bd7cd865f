"""The threat model's rules, taken away one by one: `python -m tests.rules` shows that a test notices each loss."""
