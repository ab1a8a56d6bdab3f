"""`kvcommons bench overlap`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.plot import panels
from benchmarks.report import Report

DRAM_BYTES, DISK_BYTES = 1 << 30, 4 << 30


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "overlap", help="loads and saves that overlap with computing against ones that do not"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--history", type=int, default=1024, metavar="N", help="tokens in the store")
    parser.add_argument("--new", type=int, default=100, metavar="N", help="tokens to compute")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1024, 1216, 1408, 1600], metavar="N", help="tokens to save"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the model's operators")
    parser.add_argument(
        "--load-share", type=float, default=1.56, metavar="X",
        help="loading over computing, the paper's by default; 0: a link as quick as it is",
    )  # fmt: skip
    parser.add_argument(
        "--save-share", type=float, default=0.16, metavar="X", help="saving over a round, likewise"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="as torch names it")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    from benchmarks.kvstore_child import KvstoreChild
    from benchmarks.overlap import Setting, measure
    from benchmarks.paced_link import PacedLink
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings
    from kvcommons.model.synthetic import random_config, write_random_folder

    setting = Setting(
        history_tokens=options.history,
        new_tokens=options.new,
        prompts=tuple(options.prompts),
        rounds=options.rounds,
        load_share=options.load_share,
        save_share=options.save_share,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        folder = Path(name)
        progress(f"writing a random model of {options.random_model} parameters")
        model = folder / "model"
        write_random_folder(model, random_config(options.random_model), dtype="bfloat16")
        core = load_core(
            EngineSettings(
                model=str(model), device=options.device, threads=options.threads, capacity_tokens=64
            )
        )
        with KvstoreChild(folder, dram_bytes=DRAM_BYTES, disk_bytes=DISK_BYTES) as store:
            link = PacedLink(f"unix:{folder}/link.s", store.data_address)
            try:
                return measure(core, link, setting, progress)
            finally:
                link.close()


def _draw(path: Path, report: Report) -> None:
    groups = []
    for figure, column, title in (
        ("19", "prefill ms", "Loading: time of a job behind another one, a history in the store"),
        ("20", "round ms", "Saving: a prompt and 20 decode steps, until the next job can begin"),
    ):
        bars = [(str(row["how"]), float(row[column])) for row in report.rows if row["figure"] == figure]
        groups.append((title, bars))
    panels(path, report.title, groups, "milliseconds (medians)")
