"""`kvcommons certificates DIR`, or `python -m kvcommons.security DIR` where only services are installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvcommons.errors import KVCommonsError
from kvcommons.files import PRIVATE_UMASK
from kvcommons.security.authority import make_certificates

_DESCRIPTION = """Makes an authority, a certificate for each service, and the router's key that signs tenants.
What is there and does not end soon stays as it is. docs/security.md says who gets which folder."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcommons certificates", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="DIR", type=Path, help="keep its subfolder authority to yourself")
    folder = parser.parse_args(argv).folder
    os.umask(PRIVATE_UMASK)
    try:
        made = make_certificates(folder, datetime.now(UTC))
    except KVCommonsError as error:
        print(f"kvcommons certificates: {error.message}", file=sys.stderr)
        return 2
    for one in made:
        print(f"Made {one}")
    if not made:
        print(f"All that {folder} has is good for a year and more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
