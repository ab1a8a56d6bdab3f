"""`python -m devstack` is `kvcommons`."""

from __future__ import annotations

import sys

from devstack.cli import main

if __name__ == "__main__":
    sys.exit(main())
