"""A model in parts is one model: its header, its refusals, and real runs of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from lab.core import parts
from lab.errors import LabError
from lab.process.worker import Worker
from tests.split_models import split

WHOLE_NAMES = (
    "model.gguf",
    "Model.GGUF",
    "sha256-" + "a" * 64,
    "Qwen2.5-7B-Instruct-Q4_K_M.gguf",
    "llama-2-7b.Q4_0.gguf",
    "x-1-of-2.gguf",
    "x-00001-of-00002.safetensors",
    "x-00001-of-00002.gguf.part",
    "x-00000-of-00002.gguf",
    "x-00003-of-00002.gguf",
    "x-00001of00002.gguf",
    "-00001-of-00002.gguf",
    "Modell mit Leerzeichen & Umlauten äöü.gguf",
    "モデル.gguf",
    "a" * 250 + ".gguf",
    "2-of-3.gguf",
    "best-of-00003.gguf",
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@pytest.fixture(scope="module")
def in_parts(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split(mini, tmp_path_factory.mktemp("parts") / "mini", 3)


@pytest.mark.parametrize("name", WHOLE_NAMES)
def test_other_names_are_whole_files(name: str) -> None:
    assert parts.names_of(name) == (name,)
    assert not parts.is_later(name)


@pytest.mark.parametrize("stem", ["m", "a b", "UD-Q4_K_XL/x", "ä-00001-of-00002-ö", "x.Q8_0"])
@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_each_part_names_all(stem: str, suffix: str) -> None:
    names = tuple(f"{stem}-{number:05}-of-00012{suffix}" for number in range(1, 13))
    for name in names:
        assert parts.names_of(name) == names
        assert parts.is_later(name) == (name != names[0])
        assert parts.stem(name) == stem.rpartition("/")[2]


@pytest.mark.parametrize("is_first_empty", [False, True])
def test_a_split_model_is_the_sum_of_its_parts(
    mini: Path, tmp_path: Path, worker: Worker, is_first_empty: bool
) -> None:
    paths = split(mini, tmp_path / "mini", 3, is_first_empty)
    whole = worker.read_model(mini, "mini", "file")
    model = worker.read_model(paths[0], "mini", "file")
    assert model.n_bytes == sum(path.stat().st_size for path in paths)
    for field in (
        "n_layer",
        "n_params",
        "tensor_bytes",
        "matrices",
        "n_vocab",
        "quantization",
    ):
        assert getattr(model, field) == getattr(whole, field), field
    assert set(worker.tensors(paths[0])) == set(worker.tensors(mini))


def refusal(worker: Worker, path: Path) -> LabError:
    with pytest.raises(LabError) as refused:
        worker.read_model(path, path.stem, "file")
    with pytest.raises(LabError):
        worker.tensors(path)
    return refused.value


def test_a_missing_part_is_named(in_parts: list[Path], tmp_path: Path, worker: Worker) -> None:
    for path in in_parts[:2]:
        shutil.copy(path, tmp_path)
    problem = refusal(worker, tmp_path / in_parts[0].name)
    assert problem.what == (
        "mini-00001-of-00003.gguf is one of 3 parts of a model. "
        "Missing beside it: mini-00003-of-00003.gguf."
    )
    assert "lab models pull" in problem.hint


def test_parts_of_two_models_are_refused(
    mini: Path, in_parts: list[Path], tmp_path: Path, worker: Worker
) -> None:
    others = split(mini, tmp_path / "mini", 3, is_first_empty=True)
    shutil.copy(in_parts[1], others[1])
    assert "are not parts of one model" in refusal(worker, others[0]).what
    shutil.copy(in_parts[0], others[1])
    assert "are not parts of one model" in refusal(worker, others[0]).what
    shutil.copy(mini, others[1])
    assert "mini-00002-of-00003.gguf and mini-00001" in refusal(worker, others[0]).what


def test_a_truncated_part_is_named(
    in_parts: list[Path], tmp_path: Path, worker: Worker
) -> None:
    for path in in_parts:
        shutil.copy(path, tmp_path)
    last = tmp_path / in_parts[2].name
    last.write_bytes(last.read_bytes()[:-9])
    assert f"{last.name} is truncated" in refusal(worker, tmp_path / in_parts[0].name).what


def test_a_renamed_part_is_told_from_its_header(
    in_parts: list[Path], tmp_path: Path, worker: Worker
) -> None:
    for number, path in enumerate(in_parts):
        renamed = tmp_path / f"renamed{number}.gguf"
        shutil.copy(path, renamed)
        problem = refusal(worker, renamed)
        assert f"is part {number + 1} of 3 by its header" in problem.what
        assert "NAME-00001-of-00003.gguf" in problem.hint


def test_one_part_of_one_is_a_model(mini: Path, tmp_path: Path, worker: Worker) -> None:
    (path,) = split(mini, tmp_path / "one", 1)
    assert path.name == "one-00001-of-00001.gguf"
    assert worker.read_model(path, "one", "file").n_layer == 3
    shutil.copy(mini, path)  # without the keys of a split
    assert worker.read_model(path, "one", "file").n_layer == 3
    assert gguf.GGUFReader(path).get_field("split.count") is None
