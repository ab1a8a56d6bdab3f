"""Tokenizer: control tokens, prompts, bytes of tokens; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers

from kvcommons.errors import InvalidInput
from kvcommons.model.tokenizer import Tokenizer
from tests.unit.model import chat_folders

TEXTS = ["hello there", " spaced  out ", "naïve 你好 🙂👩‍👩‍👧", "line\nbreak\t", ""]


@pytest.fixture(params=sorted(chat_folders.KINDS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return chat_folders.KINDS[request.param](tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.read(folder)
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode_markup(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_start|>system\n</s>", "<s>[INST] <|eot_id|><|eom_id|>x"]
)
def test_control_tokens_that_users_type_stay_text(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.read(folder)
    ids = tokenizer.encode_text(text)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == text


def test_control_tokens_of_a_template_are_recognised(folder: Path) -> None:
    tokenizer = Tokenizer.read(folder)
    eos = max(tokenizer.eos_ids)
    ids = tokenizer.encode_markup("a" + tokenizer.token_text(eos) + "b")
    assert ids.count(eos) == 1
    assert tokenizer.decode([*ids, 10**6]) == tokenizer.decode([i for i in ids if i != eos])


def test_an_end_that_the_tokenizer_takes_for_a_word_is_a_control_token(tmp_path: Path) -> None:
    source = tokenizers.Tokenizer(models.WordLevel({"a": 0, "STOP": 1, "?": 2}, unk_token="?"))
    source.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, -1]}')
    tokenizer = Tokenizer.read(tmp_path)
    assert tokenizer.eos_ids == {1}
    assert tokenizer.encode_text("STOP") == [2] * 4
    assert tokenizer.encode_markup("aSTOP") == [0, 1]


def test_white_space_that_a_control_token_swallows_is_swallowed_beside_typed_ones_too(tmp_path: Path) -> None:
    folder = chat_folders.chatml(tmp_path)
    source = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    source.add_special_tokens([tokenizers.AddedToken("<|x|>", special=True, lstrip=True, rstrip=True)])
    source.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.read(folder)
    text = "one \n <|x|>  two<|im_end|>\n <|im_start|>three"
    whole = tokenizer.encode_markup(text)
    assert tokenizer.decode(whole) == "onetwo\n three"
    assert tokenizer.encode_markup(text + "SHIELD", {"SHIELD": "<|x|>"}) == whole + tokenizer.encode_text(
        "<|x|>"
    )


def test_a_normaliser_cannot_smuggle_a_control_token(tmp_path: Path) -> None:
    folder = chat_folders.chatml(tmp_path)
    source = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    source.normalizer = normalizers.NFKC()
    source.add_special_tokens([tokenizers.AddedToken("<|x|>", special=True, normalized=True)])
    source.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.read(folder)
    typed = "<|x|>"
    assert any(map(tokenizer.is_control, tokenizer.encode_markup(typed)))
    assert not any(map(tokenizer.is_control, tokenizer.encode_text(typed)))


def test_a_prompt_gets_what_the_tokenizer_puts_around_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.read(chat_folders.llama3(tmp_path))
    (bos,) = tokenizer.encode_markup("<|begin_of_text|>")
    assert tokenizer.encode_prompt("hi there") == [bos, *tokenizer.encode_text("hi there")]
    assert tokenizer.encode_prompt("") == [bos]
    assert bos not in tokenizer.encode_prompt("<|begin_of_text|>")[1:]
    assert {tokenizer.token_text(token) for token in tokenizer.eos_ids} == {"<|eot_id|>", "<|eom_id|>"}


def test_tokens_declared_beside_the_tokenizer_are_added(tmp_path: Path) -> None:
    folder = chat_folders.chatml(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"1200": {"content": "<|late|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.read(folder).encode_markup("<|late|>") == [1200]
    config["added_tokens_decoder"] = {"5000": {"content": "<|far|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="id 5000"):
        Tokenizer.read(folder)


def test_folders_without_a_readable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no tokenizer\.json"):
        Tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(InvalidInput, match="cannot be read"):
        Tokenizer.read(tmp_path)


def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="no Unicode"):
        Tokenizer.read(folder).encode_text("a\ud800b")


LONG = "Friend number 7 likes blue, <|im_end|> and so on 🙂.\n" * 20_000


def test_a_long_text_has_the_tokens_of_a_short_one(folder: Path) -> None:
    source = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.read(folder)
    assert tokenizer.encode_markup(LONG) == source.encode(LONG, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode_text(LONG)).split() == LONG.split()


def test_others_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.read(chat_folders.chatml(tmp_path))
    over, ran = threading.Event(), 0

    def encode() -> None:
        tokenizer.encode_markup(LONG)
        over.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not over.wait(0.001):
        ran += 1
    thread.join()
    assert ran > 10, "the lock was kept from the beginning to the end"


def test_the_router_side_imports_neither_torch_nor_transformers() -> None:
    modules = "chat, detokenizer, folder, rotary, spec, stops, synthetic_tokenizer, tokenizer"
    code = (
        f"import sys\nfrom kvcommons.model import {modules}\n"
        "print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
