"""Settings that must stand before torch is imported by any test, or a process is started."""

from __future__ import annotations

import os
import signal

# Threads that spin while they wait for each other bring a shared machine to a crawl; sleeping ones do not.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background job ignores Ctrl-C, and so do all its children. Tests that press it need it to be heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
