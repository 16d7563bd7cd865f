"""Sampling: `rows` holds each row's parameters, `sampler` samples tokens from logits, `logprobs` scores them; the other
modules are steps of the sampler."""
