"""What a service writes is its account's alone, however open the folder was and whatever umask it is started
with."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tests.contract.rest_stack import KvStore


def test_data_and_sockets_of_a_service_are_private(socket_folder: Path) -> None:
    data = socket_folder / "data"
    data.mkdir(mode=0o777)
    data.chmod(0o777)
    before = os.umask(0)
    try:
        store = KvStore(socket_folder, "")
        store.start()
    finally:
        os.umask(before)
    try:
        open_to_others = [
            path
            for path in [data, *data.rglob("*"), *socket_folder.glob("*.sock")]
            if stat.S_IMODE(path.stat().st_mode) & 0o077
        ]
        assert open_to_others == []
        assert (socket_folder / "kv.sock").is_socket()
        assert any(data.rglob("format"))
    finally:
        store.stop()
