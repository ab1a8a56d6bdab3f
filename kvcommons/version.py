"""The version of what is installed."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    try:
        return metadata.version("kvcommons")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"
