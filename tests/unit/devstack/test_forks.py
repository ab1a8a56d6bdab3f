"""A process that uses gRPC starts children, as a child is started (devstack.child)."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import asyncio, sys
import grpc
import devstack.child

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for _ in range(3)]
    for number in range(400):
        for channel in channels[: 1 + number % 3]:
            try:
                await channel.unary_unary("/no/method")(b"", timeout=5)
            except grpc.RpcError:
                pass
        child = await asyncio.create_subprocess_exec(
            "true", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, preexec_fn=lambda: None
        )
        said, _ = await child.communicate()
        assert (child.returncode, said) == (0, b""), (child.returncode, said)
    for channel in channels:
        await channel.close()
    await server.stop(None)

asyncio.run(main())
"""


def test_no_child_dies_of_it() -> None:
    """With gRPC's own handlers of fork(), one in thirty to a hundred is aborted before it begins."""
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=120)
