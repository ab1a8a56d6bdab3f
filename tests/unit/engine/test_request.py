"""What an instance takes to compute: what it cannot is refused before it is in an iteration with others."""

from __future__ import annotations

from typing import Any

import pytest

from kvcommons.engine.request import Request
from kvcommons.errors import ContextLengthExceeded, InvalidInput, KVCommonsError, ModelNotFound
from kvcommons.pb import common_pb2 as pb
from kvcommons.token_ids import packed

MODEL = pb.ModelInfo(fingerprint=b"m" * 32, context_window=8, vocab_size=100, block_tokens=4)


def job(**fields: Any) -> pb.Job:
    known = {"model": MODEL.fingerprint, "salt": b"s" * 32, "tokens": packed([1, 2, 3])}
    return pb.Job(**known | fields)


def test_a_job_is_a_request() -> None:
    request = Request.of(job(sampling=pb.Sampling(stop_token_ids=[2, 99]), prediction=range(8)), MODEL)
    assert list(request.tokens) == [1, 2, 3]
    assert request.stop_token_ids == {2, 99}
    assert request.prediction == tuple(range(8))
    assert Request.of(job(), MODEL).prediction == ()


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": b"n" * 32}, ModelNotFound, "model"),
        ({"salt": b"s"}, InvalidInput, "salt"),
        ({"tokens": b""}, InvalidInput, "tokens"),
        ({"tokens": packed([1, 2])[:-1]}, InvalidInput, "tokens"),
        ({"tokens": packed([100])}, InvalidInput, "tokens"),
        ({"tokens": packed(range(9))}, ContextLengthExceeded, "tokens"),
        ({"prompt_tokens": 4}, InvalidInput, "prompt_tokens"),
        ({"prompt_logprobs": 21}, InvalidInput, "prompt_logprobs"),
        ({"prediction": [5, 100]}, InvalidInput, "prediction"),
        ({"prediction": range(9)}, InvalidInput, "prediction"),
        (
            {"sampling": pb.Sampling(stop_token_ids=[100], min_tokens=5)},
            InvalidInput,
            "sampling.stop_token_ids",
        ),
        ({"sampling": pb.Sampling(logprobs=True, top_logprobs=10**8)}, InvalidInput, "sampling.top_logprobs"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:40].replace("\n", " "),
)
def test_what_cannot_be_computed_is_refused_by_its_name(
    fields: dict[str, Any], error: type[KVCommonsError], param: str
) -> None:
    with pytest.raises(error) as refused:
        Request.of(job(**fields), MODEL)
    assert refused.value.param == param
