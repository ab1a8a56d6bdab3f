"""Compiles the attention kernel: `python -m kvcommons.attention.native.build` (no torch, no Python headers).

The library's name has a digest of its sources and flags, so one that does not fit the sources is never
loaded. It lies beside the sources, or in the user's cache where that folder cannot be written to.

For images it also runs as a script, before any package is installed: it imports nothing but Python's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=fast",
)  # fmt: skip
# Of one unit; it takes 2 s.
_DEADLINE_S = 120.0


class Unbuilt(Exception):
    """The kernel could not be compiled here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An instruction set that the kernel's translation unit is compiled for; `width` in floats."""

    name: str
    width: int
    features: tuple[str, ...] = ()  # as the compiler names them, for itself and for asking the processor
    # Of an instruction that only the assembler has to know; without it the other variants are built. It is of
    # attention and of products: what lies between them has no use for it.
    assembled: str = ""

    @property
    def flags(self) -> list[str]:
        flags = [f"-DKVC_VARIANT={self.name}", f"-DKVC_WIDTH={self.width}"]
        asked = [f'__builtin_cpu_supports("{one}")' for one in (*self.features, self.assembled) if one]
        if asked:
            flags += [f"-m{feature}" for feature in self.features] + [f"-DKVC_NEEDS=({' && '.join(asked)})"]
        return flags + (["-DKVC_PAIRS"] if self.assembled else [])


def variants(machine: str) -> list[Variant]:
    """From the plainest to the widest; `machine` as `platform.machine()` names it."""
    plain = [Variant(name="portable", width=4)]
    if machine.lower() not in ("x86_64", "amd64"):
        return plain
    wide = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
    return [
        *plain,
        Variant(name="avx2", width=8, features=("avx2", "fma")),
        Variant(name="avx512", width=16, features=wide),
        Variant(name="avx512bf16", width=16, features=wide, assembled="avx512bf16"),
    ]


def file_name(machine: str | None = None) -> str:
    """The library's, for the sources as they are now."""
    machine = machine or platform.machine()
    digest = hashlib.sha256(repr((_FLAGS, variants(machine))).encode())
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.read_bytes())
    return f"_kernel-{machine}-{digest.hexdigest()[:16]}.so"


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where the library may lie, in the order in which it is looked for."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache")
    return [SOURCES, cache / "kvcommons"]


def find(environ: Mapping[str, str]) -> Path | None:
    name = file_name()
    return next((folder / name for folder in folders(environ) if (folder / name).is_file()), None)


def find_or_build(environ: Mapping[str, str]) -> Path:
    """The library, compiled if it is not there. One process compiles, others wait for it.

    Raises Unbuilt.
    """
    found = find(environ)
    if found is not None:
        return found
    compiler = _compiler(environ)
    with locked(folders(environ), ".kernel.lock") as folder:
        if folder is None:
            raise Unbuilt(f"none of {', '.join(map(str, folders(environ)))} can be written to")
        if not (folder / file_name()).is_file():
            _build(compiler, folder)
        return folder / file_name()


@contextmanager
def locked(folders: Sequence[Path], name: str) -> Iterator[Path | None]:
    """The first of these folders that can be written to, by one process at a time, who has the lock of this
    name in it; None: none can."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / name).open("w")
        except OSError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        return
    yield None


def _compiler(environ: Mapping[str, str]) -> str:
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        path = shutil.which(name, path=environ.get("PATH"))
        if path is not None:
            return path
    raise Unbuilt(f"there is no C++ compiler ({', '.join(names)})")


def _build(compiler: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvcommons-kernel-") as name:
        work = Path(name)
        objects: list[str] = []

        def compile_unit(unit: str, source: str, flags: Sequence[str]) -> None:
            output = str(work / f"{unit}.o")
            _run([compiler, *_FLAGS, *flags, "-c", str(SOURCES / f"{source}.cpp"), "-o", output])
            objects.append(output)

        known: list[str] = []
        for variant in variants(platform.machine()):
            try:
                compile_unit(f"kernel-{variant.name}", "kernel", variant.flags)
            except Unbuilt:
                if not variant.assembled:
                    raise
                continue
            known.append(f"-DKVC_HAS_{variant.name}")
            compile_unit(f"products-{variant.name}", "products", variant.flags)
            if not variant.assembled:
                compile_unit(f"slices-{variant.name}", "slices", variant.flags)
        for unit in (
            "library",
            "slices_library",
            "products_library",
            "advance",
            "forward",
            "structures",
            "creditor",
            "debtor",
            "team",
        ):
            compile_unit(unit, unit, known)
        # Into the same folder first: moving it there is what makes it appear whole.
        whole = folder / f".{file_name()}.{os.getpid()}"
        try:
            _run([compiler, "-shared", "-o", str(whole), *objects])
            whole.chmod(0o755)  # whoever uses this installation has it, whatever the umask here
            whole.rename(folder / file_name())
        except OSError as error:
            raise Unbuilt(f"{folder} cannot be written to: {error}") from error
        finally:
            whole.unlink(missing_ok=True)
    for old in folder.glob(f"_kernel-{platform.machine()}-*.so"):
        if folder == SOURCES and old.name != file_name():
            old.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unbuilt(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unbuilt(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def main() -> int:
    """Builds it if it can: without it everything works, so 0 either way unless `--required` is given."""
    try:
        print(find_or_build(os.environ))
    except Unbuilt as error:
        print(f"the attention kernel is not compiled, and torch is taken instead: {error}", file=sys.stderr)
        return int("--required" in sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
