"""Settings with a name: kept in a file, taken by every command with settings of the engine."""

import json
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.asked_settings import table
from lab.errors import LabError
from lab.features.ab import parse_variant
from lab.main import lab as main
from lab.runner.as_options import save, settings as load
from tests.support.command import run_lab

FAST = {
    "threads": 1,
    "ubatch": 64,
    "repack": False,
    "device": ["CUDA0", "CUDA1"],
    "kv_unified": True,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_SETTINGS", str(tmp_path / "settings"))
    return tmp_path / "settings"


def parameters(name: str, *arguments: str) -> dict[str, Any]:
    """The parameters of a command after parsing."""
    return main.commands[name].make_context(name, list(arguments)).params


# The file


def test_saved_settings_come_back_as_keywords(folder: Path) -> None:
    path = save("fast", FAST | {"mmap": None})
    assert path == folder / "fast.json"
    assert json.loads(path.read_text()) == FAST
    assert load("fast") == lab.settings("fast") == FAST
    save("fast", {"threads": 2})
    assert load("fast") == {"threads": 2}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(LabError, match=r"no settings named fast\.\nNone are saved yet"):
        load("fast")
    save("slow", {})
    save("best-4.users", {})
    with pytest.raises(
        LabError, match=r"no settings named fast\.\nSaved are: best-4\.users, slow\."
    ):
        load("fast")


@pytest.mark.parametrize(
    "name", ["", "../fast", "a/b", "a b", ".hidden", "-x", "a\nb", "ü", "x" * 65]
)
def test_odd_names_are_refused(name: str) -> None:
    for use in (lambda: load(name), lambda: save(name, {})):
        with pytest.raises(LabError, match="cannot name settings"):
            use()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is not JSON"),
        ("[]", "AskedSettings"),
        ('{"threads": "many"}', "AskedSettings.threads is text, not a whole number"),
        ('{"colour": 1, "threads": 2}', "this lab has no setting colour"),
        ('{"threads": 0}', "--threads 0 is not possible"),
        ('{"flash_attn": "maybe"}', "--flash-attn maybe is not possible"),
    ],
)
def test_broken_files_are_refused(
    folder: Path,
    text: str,
    reason: str,
) -> None:
    folder.mkdir()
    (folder / "fast.json").write_text(text)
    with pytest.raises(LabError) as problem:
        load("fast")
    assert problem.value.what.startswith("The settings fast cannot be used: ")
    assert reason in problem.value.what
    assert problem.value.hint == f"Correct or delete {folder / 'fast.json'}"


# The option


def test_all_commands_with_settings_of_the_engine_have_it() -> None:
    with_settings = set()
    for name, command in main.commands.items():
        options = {option.name for option in command.params}
        has_engine_options = {"ubatch", "threads_batch"} <= options
        assert ("settings" in options) is has_engine_options
        if has_engine_options:
            with_settings.add(name)
    assert {"measure", "sweep", "ab", "batch", "predict", "doctor", "claims"} <= with_settings


@pytest.mark.parametrize("name", ["measure", "batch", "doctor", "sweep"])
def test_saved_settings_are_the_defaults_of_a_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save("fast", FAST)
    values = parameters(name, "--threads", "2", "--settings", "fast")
    assert values["threads"] == 2
    assert values["ubatch"] == 64
    assert values["repack"] is False
    assert values["device"] == "CUDA0,CUDA1"
    assert values["batch"] == 2048
    options = "--threads 1 --ubatch 64 --no-repack --device CUDA0,CUDA1"
    if name != "doctor":  # which has no such option
        options += " --kv-unified on"
    assert capsys.readouterr().err == f"Note: --settings fast stands for {options}.\n"


def test_every_setting_can_be_saved_and_given() -> None:
    values = {name: setting.example for name, setting in table().items()}
    save("all", values)
    parsed = parameters("measure", "--settings", "all")
    for name, value in values.items():
        expected = ",".join(value) if isinstance(value, list) else value
        assert parsed[name] == expected, name


def test_a_variant_may_name_saved_settings() -> None:
    save("fast", {"ubatch": 64, "threads": 1})
    assert parse_variant("--settings fast --threads 4") == {"ubatch": 64, "threads": 4}
    with pytest.raises(LabError, match="no settings named slow"):
        parse_variant("--settings slow")


def test_wrong_uses_are_errors_without_a_traceback(folder: Path) -> None:
    status, _, err = run_lab("measure", "--settings", "fast")
    assert status == 1
    assert err == (
        "Error: There are no settings named fast.\n"
        "None are saved yet: lab tune --save NAME saves some.\n"
    )
    save("fast", {"threads": 1})
    status, _, err = run_lab("measure", "--settings", "fast", "--url", "http://127.0.0.1:1/v1")
    assert status == 1
    assert "--settings is only for the lab's own engine, not for a server." in err
    (folder / "fast.json").write_text('{"colour": 1}')
    status, _, err = run_lab("batch", "--settings", "fast")
    assert status == 1
    assert "The settings fast cannot be used: this lab has no setting colour" in err
