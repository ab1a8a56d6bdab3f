"""A real chat model, SmolLM2-135M-Instruct, as `kvcommons fetch` brings it: its answers make sense, and its
tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from devstack.fetch import MODELS
from devstack.rest import Turn
from tests.exactness import assert_greedy, logits_of
from tests.fault.streams import Victims
from tests.machine import scaled
from tests.system.real_model import fetched_smollm2
from tests.system.stack import Stack
from tests.system.test_grammar import answered
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Blocks that fill up within a turn, so that the next one finds some.
SHARED = {"dtype": "float32", "block_tokens": 16}
FLOAT32 = dict.fromkeys(("prefill", "decode", "attention_pool"), SHARED)
QUESTIONS = ("What is the capital of France?", "And what is it known for?", "Tell me about its river.")
ANSWER = {"temperature": 0.0, "max_tokens": 100}
WINDOW = 8192
BEST = 20  # tokens of each step
# How far log-probabilities in bfloat16 may be from those of transformers in float32, as docs/models.md says:
# those of its own tokens on average, those of the best at each step on average, and any. In bfloat16
# transformers itself is 0.02, 0.05 and 0.33 away.
OWN_MEAN_MAX, BEST_MEAN_MAX, BFLOAT16_MAX = 0.05, 0.1, 0.5


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetched_smollm2()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("smollm2"), tables=FLOAT32, model="smollm2")
    with stack:
        yield stack
    stack.assert_gone()


def assert_reference(stack: Stack, reference: Any, session: str, turn: Turn) -> None:
    """Each token of the session's last turn is that of transformers."""
    tokens = stack.client.session(session)["token_ids"]
    prompt = tokens[: turn.prompt_tokens]
    made = tokens[turn.prompt_tokens : turn.prompt_tokens + turn.completion_tokens]
    assert len(made) == turn.completion_tokens
    assert_greedy(made, logits_of(reference, prompt, made))


def converse(stack: Stack, reference: Any, session: str, **parameters: Any) -> list[str]:
    """The answers; asserts that each token is the reference's, and that later turns reuse."""
    answers = []
    for question in QUESTIONS:
        turn = stack.client.say(question, session, **{**ANSWER, **parameters})
        assert_reference(stack, reference, session, turn)
        assert not answers or turn.cached_tokens > 0
        answers.append(turn.text)
    return answers


def test_a_conversation_makes_sense_and_its_tokens_are_the_reference(served: Stack, reference: Any) -> None:
    assert served.client.get("/v1/models")["data"][0]["id"] == MODELS["smollm2"].name
    first, second, third = converse(served, reference, "paris")
    assert first == "The capital of France is Paris."
    assert "Paris" in second, "what it was asked about is known from the turn before"
    assert "Paris" in third


def test_the_tokenizer_and_the_template_are_those_of_transformers(served: Stack, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turn = served.client.say(QUESTIONS[0], "template", **ANSWER)
    tokens = served.client.session("template")["token_ids"]
    assert tokens[: turn.prompt_tokens] == rendered


def test_answers_keep_to_random_schemas(served: Stack) -> None:
    """With a vocabulary of 49,152 tokens that cut words and numbers as they come."""
    model = MODELS["smollm2"].name
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=scaled(300)) as sdk:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(answered, sdk, seed, model=model) for seed in range(50)]
            reasons = [reason for one in asked for reason in one.result()]
    assert reasons.count("stop") > 50  # of twice as many


def test_three_pools_share_its_three_kv_heads(folder: Path, reference: Any, tmp_path: Path) -> None:
    """They divide by three only."""
    tables = {**FLOAT32, "decode": {**SHARED, "placement": "offload"}, "up": {"heads": True}}
    with Stack(tmp_path, tables=tables, model="smollm2", attention_pool=3) as stack:
        assert converse(stack, reference, "heads")[0] == "The capital of France is Paris."
        stack.assert_no_block_is_held()


def test_one_chats_on_a_document_of_the_whole_window(served: Stack, folder: Path, reference: Any) -> None:
    """On a licence, over and over, which was computed in the background."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    room = ANSWER["max_tokens"] + 100  # for question and answer
    text = tokenizer.decode(tokenizer(4 * licence).input_ids[: WINDOW - room])
    served.client.post("/v1/sessions/licence/prefill", {"content": text})
    wait_until(lambda: served.client.get("/v1/sessions/licence/prefill")["status"] != "running", within_s=400)
    turn = served.client.say("In one sentence: what is this document?", "licence", **ANSWER)
    assert turn.prompt_tokens > WINDOW - room
    assert turn.cached_tokens > turn.prompt_tokens * 0.98
    assert "legal document" in turn.text
    assert_reference(served, reference, "licence", turn)


def test_an_answer_goes_on_when_its_instance_dies(folder: Path, reference: Any, tmp_path: Path) -> None:
    with Stack(tmp_path, tables=FLOAT32, model="smollm2", decode=2, attention_pool=0) as stack:
        victims = Victims(stack, "decode")
        parts: list[str | Turn] = []
        for part in stack.client.chat("Tell me about Paris.", "paris", **ANSWER):
            parts.append(part)
            if len(parts) == 10:
                assert victims.kill_busy()
        turn = parts[-1]
        assert isinstance(turn, Turn)
        assert turn.timings["resumptions"] == 1
        assert_reference(stack, reference, "paris", turn)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ({"colocated": True}, {"decode"}),
        ({"stages": 2, "decode_stages": 2}, {"prefill", "decode", "prefill-stage-1", "decode-stage-1"}),
        (
            {"tensor": 3, "decode_tensor": 3},
            {f"{service}{rank}" for service in ("prefill", "decode") for rank in ("", "-rank-1", "-rank-2")},
        ),
    ],
    ids=["colocated", "stages", "tensor"],
)
def test_a_stack_of_another_shape_gives_the_reference(
    folder: Path, reference: Any, tmp_path: Path, flags: dict[str, Any], processes: set[str]
) -> None:
    """tests/contract/test_engine_smollm2.py has the other paths, on instances of one process."""
    with Stack(tmp_path, tables=FLOAT32, model="smollm2", attention_pool=0, **flags) as stack:
        found = {process.name for process in stack.processes()}
        assert {name for name in found if name.startswith(("prefill", "decode"))} == processes
        converse(stack, reference, "shape", max_tokens=16)


def test_bfloat16_stays_near_the_reference_in_float32(folder: Path, reference: Any, tmp_path: Path) -> None:
    with Stack(tmp_path, model="smollm2") as stack:
        body = {
            "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
            "session_id": "story", "logprobs": True, "top_logprobs": BEST, **ANSWER,
        }  # fmt: skip
        answer = stack.client.post("/v1/chat/completions", body)
        tokens = stack.client.session("story")["token_ids"]
    steps = answer["choices"][0]["logprobs"]["content"]
    start = answer["usage"]["prompt_tokens"]
    made = tokens[start : start + len(steps)]
    logprobs = logits_of(reference, tokens[:start], made).log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(made).unsqueeze(1))[:, 0]
    best = [sorted((top["logprob"] for top in step["top_logprobs"]), reverse=True) for step in steps]
    for name, reported, expected, mean_max in (
        ("own", [step["logprob"] for step in steps], own, OWN_MEAN_MAX),
        ("best", best, logprobs.topk(BEST).values, BEST_MEAN_MAX),
    ):
        distance = (torch.tensor(reported) - expected).abs()
        print(f"{name}: mean {distance.mean():.4f}, most {distance.max():.4f}")
        assert distance.mean() < mean_max
        assert distance.max() < BFLOAT16_MAX
