"""The command that a session stores: the words that make it again, without secrets."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from lab.app.command_words import line, words_of_command, words_of_values
from lab.main import lab as cli
from tests.support.records import make_record


def context_of(*command: str) -> click.Context:
    name, *arguments = command
    return cli.commands[name].make_context(name, list(arguments))


@pytest.mark.parametrize(
    "command",
    [
        ("measure",),
        ("measure", "--prompt-len", "10,100", "--gen", "16", "--repeat", "3"),
        ("measure", "--threads", "1", "--no-mmap", "--flash-attn", "on", "--seed", "7"),
        ("sweep", "--max-len", "4096", "--every", "256"),
        ("ab", "--threads 1", "--threads 2", "--repeat", "4"),
        ("batch", "--sequences", "1,4", "--kv-unified", "on"),
    ],
)
def test_the_stored_words_make_the_same_command(command: tuple[str, ...]) -> None:
    asked = context_of(*command)
    stored = words_of_command(asked)
    assert sorted(stored) == sorted(command)
    assert context_of(*stored).params == asked.params


def test_options_of_output_are_not_stored() -> None:
    asked = context_of("measure", "--gen", "16", "--json", "--no-plot", "--out", "elsewhere")
    assert words_of_command(asked) == ["measure", "--gen", "16"]


def test_secrets_and_folders_are_not_stored(tmp_path: Path) -> None:
    prompt = tmp_path / "letter.txt"
    prompt.write_text("Dear reader")
    asked = context_of(
        *("measure", "--url", "http://me:secret@127.0.0.1:8080/v1?key=secret"),
        *("--header", "Authorization: Bearer secret", "--prompt", str(prompt)),
    )
    stored = words_of_command(asked)
    assert "secret" not in " ".join(stored)
    assert "Authorization" not in " ".join(stored)
    assert stored[stored.index("--url") + 1] == "http://127.0.0.1:8080/v1"
    assert stored[stored.index("--prompt") + 1] == "letter.txt"


def test_a_folder_inside_the_current_one_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the command finds the file again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "agent.jsonl").write_text("{}")
    (tmp_path.parent / "agent.jsonl").write_text("{}")
    inside = words_of_command(context_of("turns", "--replay", "sessions/agent.jsonl"))
    outside = words_of_command(context_of("turns", "--replay", "../agent.jsonl"))
    assert inside == ["turns", "--replay", "sessions/agent.jsonl"]
    assert outside == ["turns", "--replay", "agent.jsonl"]


def test_a_call_of_a_function_is_stored_as_a_command() -> None:
    values = {
        "prompt_len": "10,20",
        "gen": 16,
        "mmap": False,
        "repeat": None,
    }
    command = words_of_values(cli.commands["measure"], values)
    assert command == ["measure", "--prompt-len", "10,20", "--gen", "16", "--no-mmap"]


def test_a_command_is_quoted_and_must_be_one_of_the_lab() -> None:
    evil = make_record(command=("measure", "--prompt", "$(reboot); x"))
    assert line([evil]) == "lab measure --prompt '$(reboot); x'"
    assert line([make_record(command=("reboot",))]) is None
    assert line([make_record()]) is None
