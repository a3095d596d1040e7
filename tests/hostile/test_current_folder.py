"""Files in the current folder that have the names of modules: no child of the lab runs them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.models import catalog
from lab.process.worker import Worker
from lab.remote import own_server

PLANTED = (
    "uvicorn",
    "llama_cpp",
    "fastapi",
    "random",
    "json",
    "numpy",
    "lab",
    "sitecustomize",
    "asyncio",
    "psutil",
)


def engine() -> None:
    with Worker() as worker:
        assert worker.build.devices


def own_llama_cpp_server() -> None:
    own_server.start_own(catalog.embedded_path(), catalog.DEFAULT, 1).end()


@pytest.mark.parametrize("start", [engine, own_llama_cpp_server])
def test_code_in_the_current_folder_does_not_run(
    start: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    start()
    assert not ran.exists(), ran.read_text()
