"""Runs tools in processes without network, with the project folder writable and most of the disk hidden.

`plan` says what a process may reach, `bubblewrap` and `child` apply it, `run` starts processes and bounds what they
print and how long they run, `choose` finds the best way that this machine has.
"""
