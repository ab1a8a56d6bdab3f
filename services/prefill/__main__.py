"""`python -m services.prefill --config FILE`."""

from __future__ import annotations

import sys

from kvcommons.rpc.process import run
from services.prefill.config import PrefillConfig
from services.prefill.service import serve

if __name__ == "__main__":
    sys.exit(run("prefill", PrefillConfig, serve))
