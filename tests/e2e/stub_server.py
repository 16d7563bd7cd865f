"""`quire serve` with the stub engine behind it: the same flags, the real tokenizer, no torch anywhere."""

from __future__ import annotations

import sys

from quire.cli import main, serve

serve.ENGINE_COMMAND = (sys.executable, "-m", "tests.e2e.stub_engine")

if __name__ == "__main__":
    sys.exit(main.main(["serve", *sys.argv[1:]]))
