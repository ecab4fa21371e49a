"""`python -m zero2all` is `z2a`."""

import os
import sys

from zero2all.cli import main

if "ZERO2ALL_WARM" in os.environ:
    from zero2all.resilience.warm import serve

    serve()  # returns in a rank that it has forked
sys.exit(main())
