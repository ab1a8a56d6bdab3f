"""`python -m services.decode --config FILE`."""

from __future__ import annotations

import sys

from kvcommons.rpc.process import run
from services.decode.config import DecodeConfig
from services.decode.service import serve

if __name__ == "__main__":
    sys.exit(run("decode", DecodeConfig, serve))
