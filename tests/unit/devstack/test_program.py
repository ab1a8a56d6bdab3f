"""How the command line says what to type, and which version it is."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from devstack.cli import main
from devstack.program import program


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvcommons {version('kvcommons')}\n"


def test_the_help_names_the_variables_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["chat"], ["status"], ["prefill"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "KVCOMMONS_API_KEY" in capsys.readouterr().out, command


def test_a_command_that_no_shell_finds_is_shown_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / ".venv" / "bin" / "kvcommons"
    installed.parent.mkdir(parents=True)
    installed.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(installed)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/kvcommons"
    monkeypatch.chdir("/")
    assert program() == str(installed).lstrip("/")
    monkeypatch.setattr(sys, "argv", ["/somewhere/devstack/__main__.py"])
    assert program() == f"{sys.executable} -m devstack"
    monkeypatch.setenv("PATH", str(installed.parent))
    assert program() == "kvcommons"
