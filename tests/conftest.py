"""What all tests share: bounded threads, so that tests and the stacks they start fit on two cores, and
deadlines that fit the machine."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.machine import SLOWNESS, scaled

if TYPE_CHECKING:
    from tests.contract.postgres_server import PostgresServer

# Before any test imports numpy or torch: they read these once.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models in tests are made on the spot; nothing asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton asks for it once, when it is imported, which other libraries do: without a GPU its kernels are
# interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# A developer's own settings must not steer the tests.
for _name in [name for name in os.environ if name.startswith("KVCOMMONS_") and "__" in name]:
    del os.environ[_name]

# A shell starts what it runs in the background with Ctrl-C ignored, and every child inherits that: the tests
# that press it, and the people they stand for, expect the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_STACK = "tests/system/conftest.py::stack"
SHARING_FILES = {
    f"tests/system/test_{name}.py"
    for name in (
        "agent_conversation", "bad_input", "branches", "forced_calls", "grammar", "nonsense", "openai",
        "other_apis", "readme", "terminal",
    )
}  # fmt: skip
# What takes long in them is waiting, for leases that end and for who falls silent to be missed.
WAITING_FILES = [
    f"tests/contract/test_{name}.py"
    for name in (
        "ledger_faults", "ledger_commons", "kvstores", "ledger", "holder_faults", "hints", "exchange_replies",
        "connections",
    )
]  # fmt: skip

# A machine that does other work is no fault of an example.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_report_header() -> str:
    return f"deadlines: {SLOWNESS} times those of a quiet machine"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of torch, and of kernels that take its number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real one, for all tests of a worker; each makes a schema of its own in it, and leaves it running.
    Skips where there is none."""
    from tests.contract.postgres_server import PostgresServer, running

    with running(PostgresServer()) as server:
        yield server


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its own
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:
        config.option.timeout = scaled(float(config.getini("timeout")))


@pytest.hookimpl(trylast=True)  # what is not to run has been taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = item.get_closest_marker("timeout")
        if own is not None:
            item.add_marker(pytest.mark.timeout(scaled(own.args[0])), append=False)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = _interleaved(items)


def _interleaved(items: list[pytest.Item]) -> list[pytest.Item]:
    """A file that waits after each one that computes, as long as there are any: workers that all waited at
    the same time would leave the cores idle, and more of them would slow down the rest."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    waiting = [files.pop(name) for name in WAITING_FILES if name in files]
    pairs = itertools.zip_longest(files.values(), waiting, fillvalue=[])
    return [item for pair in pairs for file in pair for item in file]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files whose tests share the stack of tests/system are one worker's, too: each worker would start it."""
    from xdist.scheduler import LoadFileScheduling

    class LoadStackScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARED_STACK if file in SHARING_FILES else file

    return LoadStackScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What was imported lives as long as the tests do: no collection of garbage goes over it again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Nothing is collected while a failure is told. For that pytest parses the source of the test, and
    CPython 3.11's parser raises SystemError where a destructor that formats a traceback runs in its midst:
    it ended the worker with all its tests, and said nothing of the one that had failed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
