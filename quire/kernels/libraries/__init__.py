"""Attention kernels of libraries that may be installed, as optional rows of the ops table. One module per library;
`choose` imports none before it has found its package in a known version."""
