"""Triton implementations of the reference ops, for CUDA. This file imports nothing: the ops table imports the modules
it needs lazily, because Triton is installed only where there is a GPU for it.
"""
