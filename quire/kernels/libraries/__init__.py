"""Attention kernels of libraries that people may have installed, as optional rows of the ops table. One file each; none
is imported before `choose` has found its package in a version that is known."""
