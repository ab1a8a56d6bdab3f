"""Classes of service: which one a request gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.config import load
from kvcommons.errors import InvalidInput, Overloaded, PermissionDenied
from services.router.admission.classes import BEST_EFFORT, ClassObjectives, ServiceClass, ServiceClasses
from services.router.config import RouterConfig

FAST = ClassObjectives(ttft_s=1.0, tbt_s=0.05, unmet="refuse")
SLOW = ClassObjectives(tbt_s=2.0)
CLASSES = {"priority": FAST, "batch": SLOW}
FLAGS = {"listen": "unix:/tmp/r.sock", "ledger": "unix:/tmp/l.sock", "model": "demo"}


def configured(folder: Path, text: str) -> RouterConfig:
    file = folder / "kvcommons.toml"
    file.write_text(f"[router]\n{text}\n")
    return load("router", RouterConfig, file=file, environ={}, flags=FLAGS)


@pytest.mark.parametrize("asked", [None, "auto", "default", "flex", "priority", "scale"])
def test_what_openais_clients_send_is_served_without_any_class(asked: str | None) -> None:
    assert ServiceClasses({}).of("local", asked) == BEST_EFFORT


def test_openais_names_are_classes_where_the_settings_have_them() -> None:
    classes = ServiceClasses(CLASSES)
    assert classes.of("ann", "priority") == ServiceClass(name="priority", objectives=FAST)
    assert classes.of("ann", "flex").name == "default"
    assert classes.of("ann", "batch").objectives == SLOW
    assert classes.of("ann", "auto").name == "default"


def test_default_may_have_objectives() -> None:
    assert ServiceClasses({"default": SLOW}).of("ann", None).objectives == SLOW


def test_a_tenant_gets_what_it_is_entitled_to() -> None:
    classes = ServiceClasses(CLASSES, {"ann": ("priority", "batch"), "bob": ("batch",)})
    assert classes.of("ann", None).name == "priority", "the first of its classes is what it has"
    assert classes.of("ann", "batch").name == "batch"
    assert classes.of("bob", "auto").name == "batch"
    assert classes.of("bob", "default").name == "default", "which is everybody's"
    assert classes.of("eve", None).name == "default", "whoever is not named"
    for tenant in ("bob", "eve"):
        with pytest.raises(PermissionDenied, match="may not ask for 'priority'") as refused:
            classes.of(tenant, "priority")
        assert refused.value.param == "service_tier"
    others = ServiceClasses(CLASSES, {"ann": ("priority",), "*": ("batch",)})
    assert (others.of("eve", None).name, others.of("ann", None).name) == ("batch", "priority")


def test_a_class_that_nobody_knows_is_an_error_that_names_the_field() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'priority'") as unknown:
        ServiceClasses(CLASSES).of("ann", "prioritty")
    assert unknown.value.param == "service_tier"
    with pytest.raises(InvalidInput) as other:
        ServiceClasses(CLASSES, {"ann": ("priority",)}).of("eve", "prioritty")
    assert "'priority'" not in other.value.message, "a tenant hears of its own classes only"


def test_an_objective_that_cannot_be_met_is_refused_or_given_up_as_the_class_says() -> None:
    strict = ServiceClass(name="priority", objectives=FAST)
    assert strict.expecting(1.0) is strict
    with pytest.raises(Overloaded, match="'priority' promises the first token within 1 s") as refused:
        strict.expecting(6.4)
    assert refused.value.retry_after_ms == 5400
    assert refused.value.http_status == 429
    lenient = ServiceClass(name="quick", objectives=ClassObjectives(ttft_s=1.0, tbt_s=0.05))
    assert lenient.expecting(6.4) == BEST_EFFORT
    assert ServiceClass(name="slow", objectives=SLOW).expecting(1e6).name == "slow", "it promises none"


def test_classes_are_read_from_the_settings(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        'service_classes = {priority = {ttft_s = 1.0, tbt_s = 0.05, unmet = "refuse"}, batch = {tbt_s = 2}}\n'
        'entitlements = {ann = ["priority"]}',
    )
    assert config.service_classes == CLASSES
    assert config.entitlements == {"ann": ("priority",)}
    tables = "[router.service_classes.priority]\nttft_s = 1\n"
    assert configured(tmp_path, tables).service_classes == {"priority": ClassObjectives(ttft_s=1.0)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("service_classes = {priority = {ttft_s = 0}}", "priority.ttft_s"),
        ("service_classes = {priority = {tbt_s = -1}}", "priority.tbt_s"),
        ("service_classes = {priority = {tbt_s = 0.0001}}", "priority.tbt_s"),
        ("service_classes = {priority = {ttft_s = nan}}", "priority.ttft_s"),
        ('service_classes = {priority = {unmet = "wait"}}', "priority.unmet"),
        ("service_classes = {priority = {ttft = 1}}", "priority.ttft"),
        ("service_classes = {auto = {}}", "'auto'"),
        ("service_classes = {'a b' = {}}", "'a b'"),
        ('entitlements = {ann = ["priority"]}', "the class 'priority', which service_classes does not have"),
        ("entitlements = {ann = []}", "'ann' has no class"),
        ("entitlements = {ann = [1]}", "ann.0"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        configured(tmp_path, text)
    assert says in refused.value.message
    assert refused.value.param == text.split(maxsplit=1)[0]
