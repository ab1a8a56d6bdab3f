"""The demo model: a complete folder, a card that tells the truth, a seeded generator, and recall."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from demo import MODEL_DIR
from demo.conversations import Message, training_conversation
from demo.names import NameMix, held_out_name, is_held_out, training_name
from demo.tokens import CHAT_TEMPLATE, ChatTokens

torch = pytest.importorskip("torch")

from demo.llama import Llama, load_model  # noqa: E402
from demo.recall import measure, share, table  # noqa: E402

FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "recall.json",
    "recall.png",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.set_num_threads(1)
    return load_model(MODEL_DIR)


@pytest.fixture(scope="module")
def tokens() -> ChatTokens:
    return ChatTokens.load(MODEL_DIR)


def length(text: str) -> int:
    return len(text) // 3


def test_the_folder_is_complete_and_small() -> None:
    assert sorted(path.name for path in MODEL_DIR.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 20e6


def test_the_model_is_small_and_its_end_token_is_the_end_of_a_turn(model: Llama, tokens: ChatTokens) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert sum(parameter.numel() for parameter in model.parameters()) <= 5_000_000
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["eos_token_id"] == generation["eos_token_id"] == tokens.end


def test_the_card_says_what_was_measured() -> None:
    card = (MODEL_DIR / "README.md").read_text()
    figures = json.loads((MODEL_DIR / "recall.json").read_text())
    training = json.loads((MODEL_DIR / "training.json").read_text())
    assert table(figures) in card
    assert f"{figures['parameters']:,}" in card
    assert f"{training['total']:,} steps" in card
    for phase in training["ends"]:
        assert re.search(rf"\| {phase['name']} \| \d+ \| {phase['steps']} \| {phase['loss']} \|", card)


def test_the_tokenizer_gives_back_any_text(tokens: ChatTokens) -> None:
    for text in ("My cat is called Zuzu.", "Zoë 小白 🐱 Мурка", " \t two  spaces\n\n", "\x00\x7f"):
        assert tokens.decode(tokens.encode(text)) == text


def test_the_stored_chat_template_gives_the_ids_of_training(tokens: ChatTokens) -> None:
    jinja2 = pytest.importorskip("jinja2")
    stored = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"]
    assert stored == CHAT_TEMPLATE
    messages = [Message("system", "Be kind."), Message("user", "Hello"), Message("assistant", "Hello!")]
    messages.append(Message("user", "What is my cat called?"))
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = jinja2.Template(stored).render(messages=turns, add_generation_prompt=True)
    assert tokens.tokenizer.encode(text).ids == tokens.prompt(messages)


def test_the_generator_is_seeded() -> None:
    first, again = (training_conversation(Random(7), length, 600, hard=True) for _ in range(2))
    other = training_conversation(Random(8), length, 600, hard=True)
    assert first == again
    assert first != other


def test_training_never_sees_a_held_out_name() -> None:
    rng = Random(3)
    training = {make(rng).lower() for make in (training_name, NameMix(0.3, 0.3)) for _ in range(3000)}
    held_out = {held_out_name(rng).lower() for _ in range(2000)}
    assert all(is_held_out(name) for name in held_out)
    assert not any(is_held_out(name) for name in training)
    stated = [
        fact.value
        for seed in range(40)
        for message in training_conversation(Random(seed), length, 600, hard=True)
        for fact in message.states
        if " is called " in fact.answer
    ]
    assert stated
    assert not held_out & {value.lower() for value in stated}


@pytest.mark.parametrize("distance", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_it_recalls_names_it_has_never_seen(model: Llama, tokens: ChatTokens, distance: int) -> None:
    results = measure(model, tokens, distance, cases=40, seed=11)
    assert share(results, "greedy") >= 95.0


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_it_chats(model: Llama, tokens: ChatTokens, system: str | None) -> None:
    messages = [Message("system", system)] if system else []
    answers = []
    for said in ("My cat is called Zuzu.", "hello", "What is my cat called?"):
        messages.append(Message("user", said))
        out = model.generate(tokens.prompt(messages), tokens.end)
        assert out[-1] == tokens.end
        answers.append(tokens.decode(out))
        messages.append(Message("assistant", answers[-1]))
    assert answers[1] == "Hello! How can I help you?"
    assert answers[2] == "Your cat is called Zuzu."


def test_it_says_so_when_it_was_told_nothing(model: Llama, tokens: ChatTokens) -> None:
    out = model.generate(tokens.prompt([Message("user", "What is my cat called?")]), tokens.end)
    assert tokens.decode(out) == "Your cat is called something that you have not told me."


def test_small_steps_with_the_cache_equal_one_large_step(model: Llama) -> None:
    ids = torch.randint(0, model.shape.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole, _ = model(ids)
        first, cache = model(ids[:, :40])
        second, _ = model(ids[:, 40:], cache)
    assert torch.allclose(torch.cat((first, second), dim=1), whole, atol=1e-4)
