"""An engine's end of a lock, told by lines what to do: `acquire` and `acquire urgently` answer whether it
is held (`True`, `False`), `release` that it is not any more."""

from __future__ import annotations

import sys
from pathlib import Path

from kvcommons.engine.core_lock import CoreLock


def main() -> None:
    lock = CoreLock(Path(sys.argv[1]), deadline_s=float(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "release":
            lock.release()
            print("released", flush=True)
        else:
            print(lock.acquire(urgent=command == "acquire urgently"), flush=True)


if __name__ == "__main__":
    main()
