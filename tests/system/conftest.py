"""One stack for all tests that leave it as they found it; those that kill things start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.stack import Stack

# Prefill waits for stored history, however slow the machine: what is reused is known exactly.
LOADS = {"loads": "always"}
# Exactness is judged in float32; bfloat16, the default, may round differently on different paths.
FLOAT32 = {service: {"dtype": "float32"} for service in ("prefill", "decode", "attention_pool")}


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    as_users_have_it = {**FLOAT32["decode"], "max_local_prefill_tokens": 256}
    classes = {"priority": {"ttft_s": 3600.0, "tbt_s": 2.0, "unmet": "refuse"}}
    tables = {**FLOAT32, "decode": as_users_have_it, "router": {"service_classes": classes}}
    shared = Stack(tmp_path_factory.mktemp("stack"), tables=tables)
    with shared:
        yield shared
    shared.assert_gone()
