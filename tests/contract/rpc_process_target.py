"""A service process for tests/contract/test_rpc_process.py: does what its settings say."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import types
from dataclasses import dataclass

from kvcommons.config import Node
from kvcommons.errors import Unavailable
from kvcommons.rpc.process import Process, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    node: Node
    on_start: str = ""
    drain_takes_s: float = 0.0
    blocks_while_draining: bool = False


async def serve(config: Config, process: Process) -> None:
    print("ready", process.instance_id, flush=True)
    if config.on_start == "count":
        print(sum(isinstance(one, types.ModuleType) for one in gc.get_objects()), flush=True)
    if config.on_start == "crash":
        raise RuntimeError("boom")
    if config.on_start == "unavailable":
        raise Unavailable("the data directory is in use")
    await process.stop.wait()
    print("stopping", flush=True)
    if config.blocks_while_draining:
        time.sleep(60)
    await asyncio.sleep(config.drain_takes_s)
    print("drained", flush=True)


if __name__ == "__main__":
    sys.exit(run("decode", Config, serve))
