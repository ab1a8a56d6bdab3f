"""A child's first steps (devstack.launch): real processes, started as a stack starts them."""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from devstack.child import Child
from devstack.logfile import LogFile
from devstack.plan import ProcessPlan

_CHILDREN = 300
_BESIDE_GRPC = f"""
    import asyncio, os, sys
    from pathlib import Path

    import grpc

    from devstack.child import Child
    from devstack.logfile import LogFile
    from devstack.plan import ProcessPlan

    async def main():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") for _ in range(3)]
        plan = ProcessPlan(name="a", service="decode", command=("true",), environment=dict(os.environ))
        log = LogFile(Path(sys.argv[1]), 1 << 16)
        for number in range({_CHILDREN}):
            for channel in channels[: 1 + number % 3]:
                try:
                    await channel.unary_unary("/no/method")(b"", timeout=5)
                except grpc.RpcError:
                    pass
            child = Child(plan, log, lambda name, record: None)
            await child.start()
            assert (await child.wait(), [*child.last_lines]) == (0, []), (number, [*child.last_lines])
        for channel in channels:
            await channel.close()
        await server.stop(None)

    asyncio.run(main())
"""


async def run(place: Path, *command: str, **differently: object) -> tuple[int, list[str]]:
    """Its exit status, and its last lines."""
    fields = {"environment": dict(os.environ), **differently}
    child = Child(
        ProcessPlan(name="a", service="decode", command=command, **fields),  # type: ignore[arg-type]
        LogFile(place / "a.jsonl", 1 << 16),
        lambda name, record: None,
    )
    await child.start()
    try:
        return await child.wait(), [*child.last_lines]
    finally:
        child.close()


def test_a_process_that_uses_grpc_starts_children_and_none_aborts(tmp_path: Path) -> None:
    """With `preexec_fn`, gRPC's handlers of fork() end one child of thirty to a hundred before it begins. The
    variable that turns them off must not hide it."""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_BESIDE_GRPC), str(tmp_path / "log")],
        check=True,
        timeout=120,
        env={**environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


async def test_it_has_the_environment_of_its_plan_and_no_other(tmp_path: Path) -> None:
    code = "import os; print(sorted(name for name in os.environ if name != 'LC_CTYPE'))"
    found = await run(tmp_path, sys.executable, "-c", code, environment={"ONE": "1", "PYTHONPATH": "/two"})
    assert found == (0, ["['ONE', 'PYTHONPATH']"])


async def test_it_ignores_no_signal_that_its_parent_does_not_ignore(tmp_path: Path) -> None:
    """A program that inherits an ignored SIGPIPE writes for ever to whoever is gone. What began this test may
    ignore some, as a shell does for what it runs in the background."""
    (own,) = re.findall(r"SigIgn:\t(\w+)", Path("/proc/self/status").read_text())
    of_python = sum(1 << number - 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))
    found = await run(tmp_path, "grep", "SigIgn", "/proc/self/status")
    assert found == (0, [f"SigIgn:\t{int(own, 16) & ~of_python:016x}"])


async def test_a_program_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        await run(tmp_path, "no-such-program")


async def test_what_is_no_program_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_bytes(b"\x00 no program")
    script.chmod(0o755)
    assert await run(tmp_path, str(script)) == (
        126,
        [f"{script} cannot be run: [Errno 8] Exec format error"],
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")
async def test_as_another_account_it_keeps_nothing_of_root(tmp_path: Path) -> None:
    entry = pwd.getpwnam("nobody")
    uid, gid = entry.pw_uid, entry.pw_gid
    found = await run(
        tmp_path, "grep", "-E", "^(Uid|Gid|Groups):", "/proc/self/status", account="nobody", folder=Path("/")
    )
    assert found == (
        0,
        ["\t".join(["Uid:", *[f"{uid}"] * 4]), "\t".join(["Gid:", *[f"{gid}"] * 4]), "Groups:"],
    )
