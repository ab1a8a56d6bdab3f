"""`python -m benchmarks.peers.child PARENT COMMAND ...`: runs the command in this process's group, and ends
the group when it is told to, when the command ends, or when the parent dies, however it dies.

Servers of others do not know whose they are, and vLLM ends at no SIGTERM while it starts.
"""

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

from kvcommons.rpc.process import die_with_parent

STOP_S_MAX = 3.0


def _told(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(parent: int, command: list[str]) -> None:
    signal.signal(signal.SIGTERM, _told)
    die_with_parent(parent)
    try:
        server = subprocess.Popen(command)
        try:
            server.wait()
        finally:
            server.terminate()
            server.wait(STOP_S_MAX)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
