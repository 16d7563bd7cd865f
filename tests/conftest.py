"""Settings that must stand before torch is imported by any test."""

from __future__ import annotations

import os

# Threads that spin while they wait for each other bring a shared machine to a crawl; sleeping ones do not.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
