"""Logits to tokens: `rows` keeps what each row asks for, `sampler` chooses, `logprobs` scores; the rest are steps."""
