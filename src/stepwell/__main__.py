"""`python -m stepwell` is the command `stepwell`."""

from __future__ import annotations

import sys

from stepwell.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
