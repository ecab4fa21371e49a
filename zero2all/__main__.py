"""`python -m zero2all` is `z2a`."""

import sys

from zero2all.cli import main

sys.exit(main())
