"""`python -m services.attention_pool --config FILE`."""

from __future__ import annotations

import sys

from kvcommons.rpc.process import run
from services.attention_pool.config import AttentionPoolConfig
from services.attention_pool.service import serve

if __name__ == "__main__":
    sys.exit(run("attention_pool", AttentionPoolConfig, serve))
