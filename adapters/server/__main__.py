"""``python -m lmcache_kernels.adapters.server``: a cache server without the command line's looks."""

from __future__ import annotations

import sys

from .main import run

if __name__ == "__main__":
    run(sys.argv[1:], "python -m lmcache_kernels.adapters.server")
