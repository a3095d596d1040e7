"""JSON that is nested deeper than Python's parser goes: a sentence, and never a traceback, from
each place where JSON of a stranger is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.errors import LabError
from lab.features.recording import differences
from lab.features.turns import recorded_calls
from lab.features.why import pairing
from lab.formats import llama_bench_import
from lab.process.worker import Worker
from lab.remote.access import access
from lab.remote.client import Client
from lab.runner import as_options
from tests.support.command import run_lab
from tests.support.odd_server import raw_server

DEPTHS = [985, 10_000, 100_000]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def read_settings(path: Path) -> object:
    return as_options.settings(path.stem)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    # What reads, the file with NESTED in it, and the function.
    "why": (
        '{"timings": {"predicted_per_second": NESTED}}',
        lambda p: pairing.figures_of(str(p)),
    ),
    "why, lines": ('data: {"choices": NESTED}\n' * 3, lambda p: pairing.figures_of(str(p))),
    "import": ('[{"build_commit": NESTED}]', lambda p: llama_bench_import.read(str(p))),
    "--settings": ('{"unknown": NESTED}', read_settings),
    "--replay": ('{"messages": NESTED}', recorded_calls.read_recording),
    "--replay, a text": ('{"body": "NESTED"}', recorded_calls.read_recording),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("reader", READERS)
def test_a_nested_file_is_a_sentence(
    reader: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, read = READERS[reader]
    path = tmp_path / "a.json"
    path.write_text(template.replace("NESTED", nested(depth)))
    monkeypatch.setenv(as_options.FOLDER, str(tmp_path))
    with pytest.raises(LabError):
        read(path)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_nested_schema_is_a_sentence(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"items": {nested(depth)}}}')
    with Worker() as worker, pytest.raises(LabError):
        worker.grammar(path.read_text(), is_schema=True)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_nested_answer_of_a_server_is_none(depth: int) -> None:
    body = json.dumps({"data": "X"}).replace('"X"', nested(depth)).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with raw_server([(head, body)]) as url, Client(access(url)) as client:
        answer = client.ask(f"{url}/models")
    assert answer.parsed is None or answer.parsed["data"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_nested_message_has_an_order(depth: int) -> None:
    assert differences.in_order(nested(depth))


def test_a_folder_with_a_nested_line_is_shown(tmp_path: Path) -> None:
    sample = Path("results/sample-sweep-smollm2-135m-amd-epyc.jsonl").read_bytes()
    line = f'{{"schema": 4, "kind": "run", "unknown": {nested(985)}}}\n'
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_bytes(sample)
    code, out, err = run_lab("show", tmp_path)
    assert code == 0
    assert "a.jsonl line 1 skipped" in err
    assert "SmolLM2" in out or "smollm2" in out
