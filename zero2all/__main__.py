"""`python -m zero2all` is `z2a`."""

import os
import sys

from zero2all.cli import main

if "Z2A_WARM" in os.environ:
    from zero2all.resilience.warm import end, serve

    serve()  # returns in a rank that it has forked
    end(main())
sys.exit(main())
