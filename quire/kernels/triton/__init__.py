"""Triton twins of the reference ops, for CUDA. Nothing is imported here: the table imports the modules it needs, late,
because Triton is installed only where there is a GPU for it.
"""
