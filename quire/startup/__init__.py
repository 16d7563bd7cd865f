"""What makes a start short: it begins early what takes long (`beginning`), has what was never compiled compiled beside
it (`compilers`; `rehearsal` and the `workers` it forks in processes of their own), and need not try again what an
earlier start has tried (`notes`).
"""

from quire.startup.compile_ahead import Compilers, start_compilers

__all__ = ["Compilers", "start_compilers"]
