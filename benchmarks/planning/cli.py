"""`kvcommons plan`: the cheapest devices for a model, contexts of a length and objectives."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.offload_plan import model_of
from benchmarks.planning.calibrated import calibrated_device
from benchmarks.planning.planner import Market, Objectives, Plan, Planner
from benchmarks.report import Report, p99
from benchmarks.rooflines import COMPUTING_DEVICES, MEMORY_DEVICES, Device
from kvcommons.errors import InvalidInput, KVCommonsError

_UNITS = {"K": 2**10, "M": 2**20}


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, 1 where no devices keep the objectives, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    try:
        report = _report(options)
    except KVCommonsError as error:
        print(f"kvcommons plan: {error.message}", file=sys.stderr)
        return 1
    report.print(Console())
    if options.json is not None:
        report.write_json(options.json)
    return 0


def device_of(name: str) -> Device:
    """A published one, or that of a JSON file with the fields of `Device`, of which `calibrated`, the path of
    an engine's `predictor_file` from there, stands for the rates. Raises InvalidInput."""
    for device in (*COMPUTING_DEVICES, *MEMORY_DEVICES):
        if device.name.lower() == name.lower():
            return device
    known = ", ".join(dict.fromkeys(one.name for one in (*COMPUTING_DEVICES, *MEMORY_DEVICES)))
    if not Path(name).is_file():
        raise InvalidInput(f"{name} is no file of a device, and none of {known}", param="device")
    try:
        fields = dict(json.loads(Path(name).read_text()))
        calibration = fields.pop("calibrated", None)
        if calibration is None:
            device = Device(**fields)
        else:
            device = calibrated_device(Path(name).parent / str(calibration), fields)
        usable = all(float(value) > 0 for value in (device.price, device.memory_bytes, device.read_bytes_s))
    except (ValueError, TypeError) as error:
        known = ", ".join(field.name for field in dataclasses.fields(Device))
        raise InvalidInput(
            f"{name} is no device: {error}; its fields are {known}, or calibrated in place of the rates",
            param="device",
        ) from error
    if not usable:
        raise InvalidInput(f"{name}: price, memory_bytes and read_bytes_s have to be above 0", param="device")
    return device


def _tokens(text: str) -> int:
    """1048576, 1024K and 1M are the same."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        return round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens such as 4096, 128K or 1M") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcommons plan",
        description="The cheapest devices that keep objectives, computed from rates; nothing runs.",
        epilog="Tokens may be written as 128K or 1M (of 1,024 and 1,048,576).",
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME_OR_DIR", help="llama3-8b, or a model's folder"
    )
    parser.add_argument(
        "--context", required=True, type=_tokens, metavar="TOKENS", help="of a prompt, its history with it"
    )
    parser.add_argument(
        "--new", type=_tokens, metavar="TOKENS", help="of it that are computed (default: all, no history)"
    )
    parser.add_argument(
        "--answer", type=_tokens, default=512, metavar="TOKENS", help="of each answer (default: %(default)s)"
    )
    parser.add_argument("--ttft", type=float, required=True, metavar="S", help="seconds to the first token")
    parser.add_argument("--tbt", type=float, required=True, metavar="S", help="seconds between tokens")
    parser.add_argument(
        "--rate", type=float, default=0.0, metavar="N", help="requests a second (default: one at a time)"
    )
    parser.add_argument(
        "--device", default="H100", metavar="NAME_OR_FILE", help="that computes (default: %(default)s)"
    )
    parser.add_argument(
        "--pool-device", metavar="NAME_OR_FILE", help="that holds KV beside them (default: the same)"
    )
    parser.add_argument(
        "--devices-max", type=int, default=128, metavar="N", help="in all (default: %(default)s)"
    )
    parser.add_argument(
        "--tensor-max", type=int, default=8, metavar="N", help="devices of one host (default: %(default)s)"
    )
    parser.add_argument("--stages-max", type=int, default=1024, metavar="N", help="(default: one a layer)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    return parser


def _report(options: argparse.Namespace) -> Report:
    objectives = Objectives(
        context=options.context,
        new=options.context if options.new is None else options.new,
        answer=options.answer,
        ttft_s=options.ttft,
        tbt_s=options.tbt,
        requests_s=options.rate,
    )
    device = device_of(options.device)
    if not device.flops:
        raise InvalidInput(
            f"{device.name} is known for its memory only: name one that computes", param="device"
        )
    market = Market(
        device=device,
        pool=device_of(options.pool_device) if options.pool_device else device,
        devices_max=options.devices_max,
        tensor_max=options.tensor_max,
        stages_max=options.stages_max,
    )
    plans = Planner(model_of(options.model), market).plans(objectives)
    return Report(
        title=f"{options.model}, {objectives.new} new tokens of {objectives.context}",
        ratios={"devices": plans[0].devices, "price in dollars": plans[0].price},
        rows=[_row(plan) for plan in plans],
    )


def _row(plan: Plan) -> dict[str, str | int | float]:
    prefilling, decoding, served = plan.prefilling, plan.decoding, plan.served
    waited: dict[str, float] = {}
    if served is not None:
        waited["p99 s to the first token"] = p99(served.first_s)
        if served.between_s:
            waited["p99 ms between tokens"] = 1e3 * p99(served.between_s)
    return {
        "prefill and decode": "colocated" if plan.colocated else "apart",
        "devices": plan.devices,
        "price in dollars": plan.price,
        "prefill": f"{prefilling.count} of {prefilling.replica.describe}",
        "decode": "the same" if plan.colocated else f"{decoding.count} of {decoding.replica.describe}",
        "s to the first token": prefilling.ttft_s if served is None else served.mean_first_s,
        "chunks, first to last": f"{prefilling.prefill.chunk_first} to {prefilling.prefill.chunk_last}",
        "ms between tokens, no chunk beside": 1e3 * decoding.tbt_s,
        **waited,
        "sequences of a replica": decoding.rows,
        **{f"longest context by {name}": tokens for name, tokens in plan.limits().items()},
    }
