"""What a stack is made of: settings, threads, addresses and names."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from devstack import toml
from devstack.plan import Place, brings_identities, names, processes, tables, threads_by_service
from devstack.settings import UpSettings
from devstack.supervisor import restart_delay_s
from kvcommons.config import load
from kvcommons.errors import InvalidInput

PLACE = Place(data=Path("/data"), runtime=Path("/tmp/kvc-x"))


def flags(command: tuple[str, ...]) -> dict[str, str]:
    return dict(command[i + 1].split("=", 1) for i, word in enumerate(command) if word == "--set")


def test_offloading_to_nobody_is_refused() -> None:
    user = {"decode": {"placement": "offload"}}
    with pytest.raises(InvalidInput, match="attention_pool in"):
        tables(UpSettings(attention_pool=0), PLACE, 8, user)
    assert tables(UpSettings(), PLACE, 8, user)["decode"]["placement"] == "offload"


@pytest.mark.parametrize(
    ("alone", "field", "wanted"),
    [
        (UpSettings(heads=True, attention_pool=0), "heads", "attention_pool = 0: set it to 2 or more"),
        (UpSettings(heads=True, attention_pool=1), "heads", "attention_pool = 1: set it to 2 or more"),
        (UpSettings(rotate=True, decode=1), "rotate", "decode = 1: set it to 2 or more"),
    ],
)
def test_a_group_of_one_is_refused(alone: UpSettings, field: str, wanted: str) -> None:
    with pytest.raises(InvalidInput, match=wanted) as refused:
        tables(alone, PLACE, 8, {})
    assert refused.value.param == field
    together = replace(alone, attention_pool=2, decode=2)
    assert tables(together, PLACE, 8, {})


def test_processes_have_their_own_addresses_and_share_the_rest() -> None:
    settings = UpSettings(decode=2, ledger=2)
    plans = {plan.name: plan for plan in processes(settings, PLACE, 8, 8123, {}, user={})}
    expected = {
        "ledger-1",
        "ledger-2",
        "kvstore",
        "prefill",
        "decode-1",
        "decode-2",
        "attention_pool",
        "router",
    }
    assert plans.keys() == expected
    sockets = [socket for plan in plans.values() for socket in plan.sockets]
    assert len(sockets) == len(set(sockets))
    assert flags(plans["decode-2"].command)["listen"] == "unix:/tmp/kvc-x/decode-2.c"
    assert flags(plans["kvstore"].command)["data"] == "/data/kvstore"
    assert flags(plans["router"].command)["port"] == "8123"
    assert {plan.command[2] for plan in plans.values()} >= {"services.decode", "services.router"}


def test_a_stack_that_gets_a_second_kvstore_keeps_the_first_one_s_folder() -> None:
    for count, folders in ((1, ["kvstore"]), (2, ["kvstore", "kvstore-2"])):
        plans = processes(UpSettings(kvstore=count), PLACE, 8, 8123, {}, user={})
        found = [flags(plan.command) for plan in plans if plan.service == "kvstore"]
        assert [one["folder"] for one in found] == folders
        assert [one["data"] for one in found] == [f"/data/{folder}" for folder in folders]


def test_only_the_router_has_a_port() -> None:
    plans = processes(UpSettings(), PLACE, 8, 8000, {}, user={})
    for plan in plans:
        addresses = [value for name, value in flags(plan.command).items() if name.endswith("listen")]
        assert addresses
        assert all(address.startswith(("unix:", "shm:")) for address in addresses), plan.name


@pytest.mark.parametrize(("cores", "decode", "threads"), [(2, 1, 1), (16, 1, 5), (16, 2, 4), (1, 8, 1)])
@pytest.mark.parametrize(
    ("rotate", "user"),
    [(True, {}), (False, {}), (False, {"placement": "offload"}), (False, {"pipelining": "on"})],
    ids=["rotate", "no lock", "offload", "pipelining"],
)
def test_processes_that_compute_at_the_same_time_run_no_more_threads_than_there_are_cores(
    cores: int, decode: int, threads: int, rotate: bool, user: dict[str, str]
) -> None:
    settings = UpSettings(
        decode=max(decode, 2) if rotate else decode, rotate=rotate, core_lock=bool(user or rotate)
    )
    if rotate and decode == 1:
        threads = max(1, cores // 4)
    decodes = {"decode": user}
    expected = {"prefill": threads, "decode": threads, "attention_pool": threads}
    assert threads_by_service(cores, settings, decodes) == expected
    made = tables(settings, PLACE, cores, decodes)
    assert not [service for service, table in made.items() if "core_lock" in table]
    plans = processes(settings, PLACE, cores, 1, {}, user=decodes)
    bounds = {plan.service: plan.environment["OMP_NUM_THREADS"] for plan in plans}
    assert (bounds["prefill"], bounds["router"]) == (str(threads), "1")


def test_engines_that_compute_one_after_another_have_all_cores_each() -> None:
    settings = UpSettings(decode=2)
    assert threads_by_service(16, settings, {}) == {"prefill": 16, "decode": 16, "attention_pool": 4}
    made = tables(settings, PLACE, 16, {})
    locks = {service: table["core_lock"] for service, table in made.items() if "core_lock" in table}
    assert locks == {"prefill": "/tmp/kvc-x/cores", "decode": "/tmp/kvc-x/cores"}
    plans = {plan.name: plan for plan in processes(settings, PLACE, 16, 1, {}, user={})}
    threads = {name: plan.environment["OMP_NUM_THREADS"] for name, plan in plans.items()}
    assert threads["prefill"] == threads["decode-2"] == "16"
    assert (threads["attention_pool"], threads["router"]) == ("4", "1")


def test_the_users_tables_beat_the_defaults_and_a_flag_beats_both() -> None:
    user = {
        "decode": {"threads": 3, "dtype": "float32"},
        "kvstore": {"dram_bytes": 7},
        "router": {"secret_file": "/own/secret"},
    }
    made = tables(UpSettings(), PLACE, 2, user)
    assert made["router"]["secret_file"] == "/own/secret"
    assert tables(UpSettings(), PLACE, 2, {})["router"]["secret_file"] == str(PLACE.secret_file)
    assert (made["decode"]["threads"], made["decode"]["dtype"]) == (3, "float32")
    assert made["prefill"]["threads"] == 2
    assert made["kvstore"]["dram_bytes"] == 7
    settings = UpSettings(model="org/name")
    for named, expected in ((True, "org/name"), (False, None)):
        plans = {
            p.name: p
            for p in processes(settings, PLACE, 2, 1, {}, user={}, flagged={"model"} if named else ())
        }
        assert "secret_file" not in flags(plans["router"].command)
        assert flags(plans["decode"].command).get("model") == expected
        assert "model" not in flags(plans["kvstore"].command)


def test_attention_pools_are_one_head_group_if_the_settings_say_so() -> None:
    for heads, expected in ((False, [None, None]), (True, ["0/2", "1/2"])):
        settings = UpSettings(attention_pool=2, heads=heads)
        plans = processes(settings, PLACE, 2, 1, {}, user={})
        pools = [flags(plan.command) for plan in plans if plan.service == "attention_pool"]
        assert [pool.get("heads") for pool in pools] == expected
        assert len({pool.get("head_group") for pool in pools}) == 1


def test_decode_instances_rotate_if_the_settings_say_so() -> None:
    """Each finds its own address in the list that all of them have."""
    assert "replicas" not in tables(UpSettings(decode=2), PLACE, 2, {})["decode"]
    settings = UpSettings(decode=2, rotate=True)
    replicas = tables(settings, PLACE, 2, {})["decode"]["replicas"]
    plans = processes(settings, PLACE, 2, 1, {}, user={})
    listening = [flags(plan.command)["data_listen"] for plan in plans if plan.service == "decode"]
    assert replicas == listening
    assert len(set(replicas)) == 2
    assert "replicas" not in tables(settings, PLACE, 2, {})["prefill"]


def test_the_demo_model_has_small_blocks() -> None:
    assert tables(UpSettings(), PLACE, 2, {})["prefill"]["block_tokens"] == 16
    assert "block_tokens" not in tables(replace(UpSettings(), model="org/name"), PLACE, 2, {})["prefill"]


def test_settings_are_written_as_toml_that_reads_the_same() -> None:
    document = {
        "a": {"text": 'quo"te\n\\ü😀', "n": 1, "x": 0.5, "yes": True, "list": ["a", "b"]},
        "b": {"weights": {"some one": 3.0, "none": {}}},
    }
    assert tomllib.loads(toml.dumps(document)) == document
    assert math.isnan(tomllib.loads(toml.dumps({"a": {"x": math.nan}}))["a"]["x"])
    assert tomllib.loads(toml.dumps({"a": {"x": -math.inf}})) == {"a": {"x": -math.inf}}


def test_names() -> None:
    assert names("decode", 1) == ["decode"]
    assert names("decode", 2) == ["decode-1", "decode-2"]
    assert names("attention_pool", 0) == []


def test_up_is_set_by_file_environment_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "kvcommons.toml"
    file.write_text("[up]\ndecode = 2\nport = 1\n[decode]\nthreads = 1\n")
    environ = {"KVCOMMONS_UP__PORT": "2", "KVCOMMONS_DECODE__THREADS": "1"}
    settings = load("up", UpSettings, file=file, environ=environ, flags={"prefill": "3"})
    assert (settings.decode, settings.port, settings.prefill) == (2, 2, 3)
    with pytest.raises(InvalidInput, match="'prefill'"):
        load("up", UpSettings, file=None, environ={}, flags={"prefil": "3"})
    with pytest.raises(InvalidInput, match="decode"):
        load("up", UpSettings, file=None, environ={}, flags={"decode": "0"})


def test_restarts_back_off() -> None:
    delays = [restart_delay_s(deaths) for deaths in range(1, 10)]
    assert delays[0] <= 0.2
    assert delays == sorted(delays)
    assert delays[-1] == 10


def test_colocated_instances_load_the_model_once() -> None:
    settings = UpSettings(colocated=True, decode=2, attention_pool=0)
    plans = processes(settings, PLACE, 2, 8000, {}, user={})
    assert [plan.name for plan in plans if plan.service in ("prefill", "decode")] == ["decode-1", "decode-2"]
    assert tables(settings, PLACE, 2, {})["decode"]["colocated"] is True
    alone = UpSettings(colocated=True, attention_pool=0)
    assert threads_by_service(2, alone, {"decode": {"pipelining": "on"}})["decode"] == 2
    with pytest.raises(InvalidInput, match="leave one of them out"):
        tables(UpSettings(colocated=True, prefill=2), PLACE, 2, {})


def test_stages_of_a_prefill_are_processes_that_find_each_other() -> None:
    settings = UpSettings(prefill=2, stages=3)
    plans = {plan.name: plan for plan in processes(settings, PLACE, 8, 1, {}, user={})}
    ours = {name: flags(plan.command) for name, plan in plans.items() if plan.service == "prefill"}
    assert {name: (one["stage_group"], one["stage"]) for name, one in ours.items()} == {
        f"{group}{suffix}": (group, str(stage))
        for group in ("prefill-1", "prefill-2")
        for stage, suffix in enumerate(["", "-stage-1", "-stage-2"])
    }
    assert all(("data_listen" in one) == (one["stage"] != "0") for one in ours.values())
    assert len({one["listen"] for one in ours.values()}) == 6
    written = tables(settings, PLACE, 8, {})["prefill"]
    assert written["stages"] == 3
    assert "core_lock" not in written
    assert threads_by_service(8, settings, {})["prefill"] == 1


def test_ranks_of_stages_are_processes_of_the_same_instance() -> None:
    settings = UpSettings(stages=2)
    user = {"prefill": {"tensor": 2}}
    plans = processes(settings, PLACE, 8, 1, {}, user=user)
    ours = {plan.name: flags(plan.command) for plan in plans if plan.service == "prefill"}
    assert {name: (one["stage"], one["rank"]) for name, one in ours.items()} == {
        "prefill": ("0", "0"),
        "prefill-rank-1": ("0", "1"),
        "prefill-stage-1": ("1", "0"),
        "prefill-stage-1-rank-1": ("1", "1"),
    }
    assert {one["stage_group"] for one in ours.values()} == {"prefill"}
    assert [name for name, one in ours.items() if "data_listen" not in one] == ["prefill"]
    written = tables(settings, PLACE, 8, user)["prefill"]
    assert (written["stages"], written["tensor"]) == (2, 2)
    assert "core_lock" not in written
    with pytest.raises(InvalidInput, match="tensor = 2") as refused:
        tables(UpSettings(colocated=True), PLACE, 8, user)
    assert refused.value.param == "tensor"


def test_stages_of_the_settings_file_count_as_those_of_up() -> None:
    user = {"prefill": {"stages": 2}}
    plans = processes(UpSettings(), PLACE, 8, 1, {}, user=user)
    assert [plan.name for plan in plans if plan.service == "prefill"] == ["prefill", "prefill-stage-1"]
    assert tables(UpSettings(), PLACE, 8, user)["prefill"]["stages"] == 2


def test_stages_of_a_decode_are_processes_with_an_address_each() -> None:
    settings = UpSettings(decode=2, decode_stages=2)
    plans = processes(settings, PLACE, 8, 1, {}, user={})
    ours = {plan.name: flags(plan.command) for plan in plans if plan.service == "decode"}
    assert {name: (one["stage_group"], one["stage"]) for name, one in ours.items()} == {
        "decode-1": ("decode-1", "0"), "decode-1-stage-1": ("decode-1", "1"),
        "decode-2": ("decode-2", "0"), "decode-2-stage-1": ("decode-2", "1"),
    }  # fmt: skip
    assert len({one["data_listen"] for one in ours.values()}) == 4
    written = tables(settings, PLACE, 8, {})
    assert (written["decode"]["stages"], "stages" in written["prefill"]) == (2, False)
    assert "core_lock" not in written["decode"]
    assert threads_by_service(8, settings, {})["decode"] == 1
    with pytest.raises(InvalidInput, match="leave one of them out") as refused:
        tables(UpSettings(decode=2, decode_stages=2, rotate=True), PLACE, 8, {})
    assert refused.value.param == "decode_stages"


def test_ranks_of_a_decode_are_processes_with_an_address_each() -> None:
    settings = UpSettings(decode_stages=2, decode_tensor=2)
    plans = processes(settings, PLACE, 8, 1, {}, user={})
    ours = {plan.name: flags(plan.command) for plan in plans if plan.service == "decode"}
    assert {name: (one["stage"], one["rank"]) for name, one in ours.items()} == {
        "decode": ("0", "0"), "decode-rank-1": ("0", "1"),
        "decode-stage-1": ("1", "0"), "decode-stage-1-rank-1": ("1", "1"),
    }  # fmt: skip
    assert len({one["data_listen"] for one in ours.values()}) == 4
    written = tables(settings, PLACE, 8, {})
    assert (written["decode"]["stages"], written["decode"]["tensor"]) == (2, 2)
    assert "tensor" not in written["prefill"]
    with pytest.raises(InvalidInput, match="leave one of them out") as refused:
        tables(UpSettings(decode=2, decode_tensor=2, rotate=True), PLACE, 8, {})
    assert refused.value.param == "decode_tensor"


def test_one_stage_is_the_prefill_that_there_was() -> None:
    plans = processes(UpSettings(), PLACE, 8, 1, {}, user={})
    (prefill,) = [plan for plan in plans if plan.service == "prefill"]
    assert "stage" not in flags(prefill.command)
    assert "stages" not in tables(UpSettings(), PLACE, 8, {})["prefill"]


def test_colocated_instances_have_decodes_stages() -> None:
    with pytest.raises(InvalidInput, match="decode_stages is for those") as refused:
        tables(UpSettings(colocated=True, stages=2), PLACE, 8, {})
    assert refused.value.param == "stages"
    settings = UpSettings(colocated=True, decode_stages=2, decode_tensor=2, attention_pool=0)
    decode = tables(settings, PLACE, 8, {})["decode"]
    assert (decode["colocated"], decode["stages"], decode["tensor"]) == (True, 2, 2)
    assert "core_lock" not in decode
    plans = processes(settings, PLACE, 8, 1, {}, user={})
    assert [plan.name for plan in plans if plan.service in ("prefill", "decode")] == [
        "decode",
        "decode-rank-1",
        "decode-stage-1",
        "decode-stage-1-rank-1",
    ]


def test_the_router_gets_the_files_of_https(tmp_path: Path) -> None:
    settings = UpSettings(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    place = Place(data=tmp_path / "data", runtime=tmp_path / "run")
    router = tables(settings, place, 2, {})["router"]
    assert (router["tls_cert"], router["tls_key"]) == (f"{tmp_path}/cert.pem", f"{tmp_path}/key.pem")
    (flagged,) = (
        plan
        for plan in processes(settings, place, 2, 1, {}, user={}, flagged=["tls_cert", "tls_key"])
        if plan.service == "router"
    )
    assert f"tls_cert={tmp_path}/cert.pem" in flagged.command
    assert f"tls_key={tmp_path}/key.pem" in flagged.command


def test_services_are_given_their_own_identity_and_no_other() -> None:
    made = tables(UpSettings(), PLACE, 2, {}, certificates=PLACE.certificates)
    for service, table in made.items():
        assert table["certificates"] == f"/data/certificates/{service}"
    keys = {service: table["tenant_key"] for service, table in made.items() if "tenant_key" in table}
    assert keys == {
        "router": "/data/certificates/router/tenants.key",
        "prefill": "/data/certificates/prefill/tenants.pub",
        "decode": "/data/certificates/decode/tenants.pub",
        "kvstore": "/data/certificates/kvstore/tenants.pub",
    }
    for table in tables(UpSettings(), PLACE, 2, {}).values():
        assert not {"certificates", "tenant_key"} & table.keys()


@pytest.mark.parametrize(
    ("user", "environ", "brings"),
    [
        ({}, {"HOME": "/", "KVCOMMONS_PORT": "1"}, False),
        ({"router": {"tls_cert": "x"}}, {}, False),
        ({"decode": {"token_file": "x"}}, {}, True),
        ({"kvstore": {"tenant_key": "x"}}, {}, True),
        ({}, {"KVCOMMONS_LEDGER__CERTIFICATES": "x"}, True),
    ],
)
def test_who_says_how_services_know_each_other_says_it_for_all(
    user: dict[str, dict[str, str]], environ: dict[str, str], brings: bool
) -> None:
    assert brings_identities(user, environ) is brings
