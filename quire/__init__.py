"""Quire: an inference and serving engine for language models."""
