"""A mistake in a stack's settings is named before any of its processes starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devstack import supervisor, toml, up
from devstack.checks import check_access, check_model, check_services, unused_pools
from devstack.cli import main
from devstack.plan import MODEL_SERVICES, Place, ProcessPlan, processes, tables
from devstack.settings import UpSettings
from devstack.up import _url
from kvcommons.errors import InvalidInput, ModelNotFound
from services.router.http.keys import read_keys

KEYS = "ann key-of-ann-1\nbob key-of-bob-1\n"
OPEN = "0.0.0.0"


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child processes of a stack that should not come to them."""

    async def start(_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(supervisor.Supervisor, "start", start)


def planned(
    folder: Path, settings: UpSettings, user: dict[str, Any], environ: dict[str, str], flagged: set[str]
) -> list[ProcessPlan]:
    place = Place(data=folder, runtime=folder)
    place.settings_file.write_text(toml.dumps(tables(settings, place, 2, user), origin=Path("mine.toml")))
    return processes(settings, place, 2, 8000, environ, user=user, flagged=flagged)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"KVCOMMONS_ROUTER__LISTN": "x"}, "(KVCOMMONS_ROUTER__LISTN): did you mean 'listen'?"),
        ({"KVCOMMONS_ROUTR__PORT": "1"}, "KVCOMMONS_ROUTR__PORT: did you mean 'router'?"),
        ({"KVCOMMONS_ROUTER_PORT": "1"}, "did you mean KVCOMMONS_ROUTER__PORT?"),
        ({"KVCOMMONS_KVSTORE__DRAM_BYTES": "lots"}, "dram_bytes = 'lots'"),
        ({"KVCOMMONS_ROUTER__MAX_QUEUE": "0"}, "max_queue must be at least 1"),
        ({"KVCOMMONS_DECODE__CAPACITY_TOKEN": "9"}, "did you mean 'capacity_tokens'?"),
        ({"KVCOMMONS_PREFILL__BLOCK_TOKENS": "0"}, "block_tokens = '0'"),
        ({"KVCOMMONS_API_KEYS": "x"}, "did you mean KVCOMMONS_API_KEY?"),
        ({"KVCOMMONS_UP__DECODE": "many"}, "decode = 'many'"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_starts(
    environ: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nothing_starts: None,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["up", "--data", str(tmp_path / "data"), "--port", "0"]) == 2
    assert says in capsys.readouterr().out


def test_a_wrong_table_is_named_with_the_file_that_it_is_in(tmp_path: Path) -> None:
    plans = planned(tmp_path, UpSettings(), {"kvstore": {"dram_byte": 4096}}, {}, set())
    with pytest.raises(InvalidInput, match=r"'dram_byte' in \[kvstore\] of mine.toml .*: did you mean"):
        check_services(plans)
    found = check_services(planned(tmp_path, UpSettings(), {"router": {"max_queue": 7}}, {}, set()))
    assert found.keys() == {"router", "prefill", "decode", "attention_pool", "kvstore", "ledger"}
    assert found["router"].max_queue == 7


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "there is no model folder /no/such/folder"),
        ("./folder", "there is no model folder ./folder"),
        ("a/b/c", "there is no model folder a/b/c"),
        ("smolm2", "did you mean 'smollm2'?"),
        (__file__, "is a file: name the folder"),
    ],
)
def test_a_model_that_is_not_there_is_named_before_anything_starts(
    model: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_starts: None
) -> None:
    assert main(["up", "--data", str(tmp_path / "data"), "--port", "0", "--model", model]) == 2
    assert says in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


def test_a_folder_that_lacks_something_of_a_model_is_refused(tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "demo" / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / name
        folder.mkdir()
        for file in demo.iterdir():
            if file.name != name:
                (folder / file.name).symlink_to(file)
        with pytest.raises(InvalidInput, match=f"has no {name}"):
            check_model(str(folder), print)
    check_model(str(demo), print)
    with pytest.raises(ModelNotFound):
        check_model(str(tmp_path / "none"), print)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stages", "9"], "--stages, or [prefill]: stages = 9, and the model has 2 layers"),
        (["--decode-stages", "3"], "--decode-stages, or [decode]: stages = 3, and the model has 2 layers"),
        (["--tensor", "3"], "--tensor, or [prefill]: tensor = 3 does not divide"),
        (["--decode-tensor", "3"], "--decode-tensor, or [decode]: tensor = 3 does not divide"),
    ],
)
def test_more_stages_or_ranks_than_the_model_has_are_named_before_anything_starts(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nothing_starts: None,
) -> None:
    assert main(["up", "--data", str(tmp_path / "data"), "--port", "0", *arguments]) == 2
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("up", "tensor", "placement", "useless"),
    [
        ({}, 1, "overflow", False),
        ({}, 2, "overflow", True),
        ({}, 2, "local", False),
        ({"attention_pool": 0}, 2, "grow", False),
        ({"attention_pool": 4, "heads": True}, 2, "offload", False),
        ({"attention_pool": 3, "heads": True}, 2, "offload", True),
        ({"attention_pool": 4}, 2, "offload", True),
    ],
)
def test_pools_that_lend_nothing_to_ranks_are_said_at_the_start(
    up: dict[str, Any], tensor: int, placement: str, useless: bool
) -> None:
    decode = SimpleNamespace(shape=SimpleNamespace(tensor=tensor), placement=placement)
    said = unused_pools({"decode": decode}, UpSettings(**up))
    assert bool(said) == useless
    assert not useless or "attention_pool to a multiple of 2 in [up]" in said


def test_an_error_is_an_object_of_json_where_no_terminal_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_starts: None
) -> None:
    wrong = ["up", "--data", str(tmp_path / "data"), "--port", "0", "--decode", "0"]
    assert main(wrong) == main([*wrong, "--log-format", "json"]) == 2
    for line in capsys.readouterr().out.splitlines():
        reported = json.loads(line)
        assert (reported["level"], reported["service"]) == ("error", "up")
        assert "decode" in reported["message"]
    assert main([*wrong, "--log-format", "text"]) == 2
    assert capsys.readouterr().out.startswith("kvcommons up: decode")


def test_beyond_loopback_a_stack_has_keys_or_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_starts: None
) -> None:
    data = ["--data", str(tmp_path / "data"), "--port", "0"]
    assert main(["up", *data, "--host", OPEN]) == 2
    said = capsys.readouterr().out
    assert f"--host {OPEN}" in said
    assert "--api-key-file" in said
    assert main(["up", *data, "--host", OPEN, "--api-key-file", str(tmp_path / "none")]) == 2
    assert "none cannot be read: No such file" in capsys.readouterr().out
    check_access(UpSettings(), {}, {})
    check_access(UpSettings(bind="::1"), {}, {})
    check_access(UpSettings(bind=OPEN, api_keys=Path("keys")), {}, {})
    check_access(UpSettings(bind=OPEN), {"router": {"api_keys": "keys"}}, {})
    check_access(UpSettings(bind=OPEN), {}, {"KVCOMMONS_ROUTER__API_KEYS": "keys"})


def test_host_and_keys_reach_the_router_and_beat_its_table(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    assert {key: grant.tenant for key, grant in read_keys(keys).items()} == {
        "key-of-ann-1": "ann", "key-of-bob-1": "bob",
    }  # fmt: skip
    settings = UpSettings(bind=OPEN, api_keys=keys)
    user = {"router": {"bind": "127.0.0.2", "api_keys": "others"}}
    flagged = check_services(planned(tmp_path, settings, user, {}, {"bind", "api_keys"}))["router"]
    assert (flagged.bind, flagged.api_keys) == (OPEN, str(keys))
    of_table = check_services(planned(tmp_path, settings, user, {}, set()))["router"]
    assert (of_table.bind, of_table.api_keys) == ("127.0.0.2", "others")


def test_the_served_name_reaches_all_that_have_the_model(tmp_path: Path) -> None:
    settings = UpSettings(model_name="ours")
    made = tables(settings, Place(data=tmp_path, runtime=tmp_path), 2, {})
    assert {made[service]["model_name"] for service in MODEL_SERVICES} == {"ours"}
    user = {"decode": {"model_name": "theirs"}}
    for plan in planned(tmp_path, settings, user, {}, {"model_name"}):
        assert ("model_name=ours" in plan.command) == (plan.service in MODEL_SERVICES)


def test_what_is_given_to_up_reaches_the_processes_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_starts: None
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    planned: list[ProcessPlan] = []

    def checked(plans: list[ProcessPlan]) -> Any:
        planned.extend(plans)
        raise InvalidInput("that is enough")

    monkeypatch.setattr(up, "check_services", checked)
    flags = ["--host", OPEN, "--api-key-file", str(keys), "--served-model-name", "ours"]
    assert main(["up", "--data", str(tmp_path / "data"), "--port", "0", *flags]) == 2
    assert {plan.service for plan in planned} >= {*MODEL_SERVICES, "router"}
    for plan in planned:
        assert ("model_name=ours" in plan.command) == (plan.service in MODEL_SERVICES), plan
        assert (f"bind={OPEN}" in plan.command) == (plan.service == "router")
        assert (f"api_keys={keys}" in plan.command) == (plan.service == "router")


def test_a_server_on_all_addresses_is_reached_on_one() -> None:
    assert _url("http", OPEN, 8000) == "http://127.0.0.1:8000"
    assert _url("https", "::", 8000) == _url("https", "::1", 8000) == "https://[::1]:8000"
    assert _url("http", "192.0.2.7", 8000) == "http://192.0.2.7:8000"
