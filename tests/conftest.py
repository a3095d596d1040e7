"""Shared by the tests: hand-made records, a fake engine with exact times, and the lab as a real
command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from lab.core.record import (
    Noise,
    NoiseReading,
)
from lab.models import catalog, synthetic
from lab.process.worker import Worker
from lab.roofline import prediction
from lab.runner import disturbances, noise_watch
from tests.support import miniature
from tests.support.browser import browser  # noqa: F401  (a fixture)
from tests.support.fake_worker import FakeWorker

# A suite that is started in the background of a script inherits that Ctrl-C is ignored, and would
# hand it on.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop(
    "COLUMNS", None
)  # what is printed shall not depend on the terminal that runs the tests

# Processes that tests start shall not compile the lab anew each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Threads of an engine that wait for each other sleep: where they spin on a busy machine, a test
# takes minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The processes of `-n auto`: two for the whole suite; none for a part of it, which starts
    sooner alone."""
    return (
        2
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not config.option.keyword
        else 0
    )


@pytest.fixture(autouse=True)
def no_counters_of_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are the same on machines that have some: those that are about energy make their own."""
    monkeypatch.setattr(noise_watch, "energy_counters", lambda gpus: [])


class QuietWatch:
    """Stands in for noise_watch.NoiseWatch where time is made up: nothing else happens on this
    machine."""

    def __init__(self, *_: object) -> None: ...

    def sample(self) -> None: ...

    def finish(self, *_: object) -> Noise:
        nothing = NoiseReading()
        return Noise(nothing, nothing)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many made-up sessions: the real machine is not watched, and no line is waited for until
    the disk has it."""
    monkeypatch.setattr(noise_watch, "NoiseWatch", QuietWatch)
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture
def fake_worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A real engine without a model."""
    with Worker() as started:
        yield started


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A file for the fake engine, which reads none."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture(scope="session")
def embedded() -> Path:
    return catalog.embedded_path()


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file of three narrow layers with random weights: the real engine runs it in no
    time."""
    path = tmp_path_factory.mktemp("models") / "mini.gguf"
    synthetic.write(miniature.entry("llama").shape, "Q4_0", path)
    return path


@pytest.fixture(scope="session")
def shallow(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with one of its 30 layers: where tokens count, and times do not."""
    folder = tmp_path_factory.mktemp("shallow")
    return miniature.first_layer(embedded, folder / embedded.name)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does is not held against the runs, so that what they show is
    said."""
    monkeypatch.setattr(disturbances, "disturbances", lambda record: {})
    monkeypatch.setattr(disturbances, "of_request", lambda record: {})


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have empty pictures: where their sentences are read, of a third of a second each."""
    monkeypatch.setattr("lab.show.page.inline", lambda *_: "<svg></svg>")


@pytest.fixture(scope="module")
def started() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture
def one_engine(started: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """All predictions of a file of tests ask one engine of this machine, instead of one each."""
    monkeypatch.setattr(prediction, "Worker", lambda: nullcontext(started))
