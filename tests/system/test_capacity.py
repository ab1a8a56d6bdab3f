"""One answer that nobody bounded, over all the memory that there is for it: real instances, which lend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

TOKENS = 160  # of each decode instance


@pytest.mark.parametrize(
    ("placement", "decode", "pools", "fits"),
    [
        ("local", 1, 0, TOKENS),
        ("overflow", 2, 0, TOKENS + TOKENS // 2),  # half of its blocks are the most that one lends
        ("overflow", 1, 1, TOKENS + 96),
    ],
    ids=["alone", "a decode that lends", "a pool"],
)
def test_an_answer_of_no_given_length_fills_all_memory(
    tmp_path: Path, placement: str, decode: int, pools: int, fits: int
) -> None:
    tables = {
        **FLOAT32,
        "decode": {**FLOAT32["decode"], "capacity_tokens": TOKENS, "placement": placement},
        "attention_pool": {**FLOAT32["attention_pool"], "capacity_tokens": 96},
    }
    body = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    with Stack(tmp_path / "stack", tables=tables, decode=decode, attention_pool=pools) as stack:
        answer = stack.client.post("/v1/chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == fits
        stack.assert_no_block_is_held()
