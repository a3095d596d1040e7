"""A model in parts is one model: its header, its refusals, and real runs of it."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest

from lab.core import results, split_files
from lab.errors import LabError
from lab.features.start import pages
from lab.models import catalog, hub, obtain
from lab.process.worker import Worker
from lab.runner.warm_engine import WarmEngine
from tests.support import loopback_hub
from tests.support.command import run_lab
from tests.support.loopback_hub import LoopbackHub
from tests.support.split_models import split

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
def in_parts(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split(mini, tmp_path_factory.mktemp("parts") / "mini", 3)


@pytest.mark.parametrize("name", WHOLE_NAMES)
def test_other_names_are_whole_files(name: str) -> None:
    assert split_files.names_of(name) == (name,)
    assert not split_files.is_later(name)


@pytest.mark.parametrize("stem", ["m", "a b", "UD-Q4_K_XL/x", "ä-00001-of-00002-ö", "x.Q8_0"])
@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_each_part_names_all(stem: str, suffix: str) -> None:
    names = tuple(f"{stem}-{number:05}-of-00012{suffix}" for number in range(1, 13))
    for name in names:
        assert split_files.names_of(name) == names
        assert split_files.is_later(name) == (name != names[0])
        assert split_files.stem(name) == stem.rpartition("/")[2]


@pytest.mark.parametrize("is_first_empty", [False, True])
def test_a_split_model_is_the_sum_of_its_parts(
    mini: Path, tmp_path: Path, worker: Worker, is_first_empty: bool
) -> None:
    paths = split(mini, tmp_path / "mini", 3, is_first_empty)
    unsplit = worker.read_model(mini, "mini", "file")
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
        assert getattr(model, field) == getattr(unsplit, field), field
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
        "Missing: mini-00003-of-00003.gguf."
    )
    assert "lab models pull" in problem.hint


def test_parts_of_two_models_are_refused(
    mini: Path, in_parts: list[Path], tmp_path: Path, worker: Worker
) -> None:
    wrong_parts = split(mini, tmp_path / "mini", 3, is_first_empty=True)
    shutil.copy(in_parts[1], wrong_parts[1])
    assert "are not parts of one model" in refusal(worker, wrong_parts[0]).what
    shutil.copy(in_parts[0], wrong_parts[1])
    assert "are not parts of one model" in refusal(worker, wrong_parts[0]).what
    shutil.copy(mini, wrong_parts[1])
    assert "mini-00002-of-00003.gguf and mini-00001" in refusal(worker, wrong_parts[0]).what


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


QUICK = ("-p", "8", "-n", "3", "-r", "1", "-t", "1", "--no-plot", "--prompt", "random")


def test_any_part_or_the_folder_is_measured(in_parts: list[Path], tmp_path: Path) -> None:
    for number, name in enumerate((*in_parts, in_parts[0].parent)):
        folder = tmp_path / str(number)
        status, _, err = run_lab("measure", "-m", name, *QUICK, "-o", folder)
        assert status == 0, err
        model = results.read([folder]).records[-1].model
        assert model.name == "mini"
        assert model.file == in_parts[0].name
        content = b"".join(path.read_bytes() for path in in_parts)
        assert model.sha256 == hashlib.sha256(content).hexdigest()
        assert model.n_bytes == len(content)


def test_a_missing_part_is_named_by_each_command(in_parts: list[Path], tmp_path: Path) -> None:
    for path in in_parts[:2]:
        shutil.copy(path, tmp_path)
    for name in (tmp_path / in_parts[0].name, tmp_path / in_parts[2].name, tmp_path):
        for command in (
            ("models", "info", name),
            ("measure", "-m", name),
            ("start", "-m", name),
        ):
            status, _, err = run_lab(*command)
            assert status == 1
            assert "Missing: mini-00003-of-00003.gguf" in err


def test_a_folder_of_several_models_names_each_once(
    mini: Path, in_parts: list[Path], tmp_path: Path
) -> None:
    for path in (*in_parts, mini):
        shutil.copy(path, tmp_path)
    status, _, err = run_lab("measure", "-m", tmp_path)
    assert status == 1
    assert "Name one of its files: mini-00001-of-00003.gguf, mini.gguf" in err


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(LabError, match="cannot be read: Permission denied"):
        catalog.parse(str(tmp_path))


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to("gone.gguf")
    with pytest.raises(LabError, match=r"is a link to gone\.gguf, which is not there"):
        catalog.parse(str(link))


def test_a_projector_beside_the_model_is_no_second_model(mini: Path, tmp_path: Path) -> None:
    shutil.copy(mini, tmp_path / "model.gguf")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert catalog.parse(str(tmp_path)).path == tmp_path / "model.gguf"


def test_a_start_drops_and_reads_all_parts(in_parts: list[Path], tmp_path: Path) -> None:
    status, out, err = run_lab(
        "start", "-m", in_parts[1], "-r", "1", "-t", "1", "--no-plot", "-o", tmp_path
    )
    assert status == 0, err
    assert "mini" in out


def test_shares_of_pages_are_those_of_all_parts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(b"x" * 2**20)
    pages.read_seconds(*paths)
    share = pages.resident_share(*paths)
    assert share is None or share == 1


def test_a_split_model_is_compared_and_quantized(
    mini: Path, in_parts: list[Path], tmp_path: Path, worker: Worker
) -> None:
    target = tmp_path / "q8.gguf"
    worker.quantize(in_parts[0], target, "Q8_0", lambda done: None)
    assert worker.read_model(target, "q8", "file").quantization == "Q8_0"
    unsplit = worker.read_model(mini, "mini", "file")
    assert worker.read_model(target, "q8", "file").n_params == unsplit.n_params


@pytest.fixture
def hub_with_parts(
    in_parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))
    loopback_hub.set_home(monkeypatch, tmp_path / "hf")
    contents = {f"Q4_0/{path.name}": path.read_bytes() for path in in_parts}
    with loopback_hub.running() as server:
        server.repos["owner/big"] = loopback_hub.Repo({**contents, "README.md": b"hello"})
        loopback_hub.set_endpoint(monkeypatch, server.endpoint)
        yield server


def test_a_pull_gets_all_parts_and_announces_them(
    hub_with_parts: LoopbackHub, in_parts: list[Path], tmp_path: Path
) -> None:
    spec = f"hf:owner/big/Q4_0/{in_parts[1].name}"
    n_bytes = sum(path.stat().st_size for path in in_parts)
    assert "3 layers" in run_lab("models", "info", spec)[1]  # from the headers of all parts
    hub_with_parts.n_bytes = 0
    status, out, err = run_lab("models", "pull", spec)
    assert status == 0, err
    sizes = " + ".join(f"{path.stat().st_size / 1e6:,.0f}" for path in in_parts)
    assert f"downloading 3 of 3 parts ({sizes} MB)" in err
    assert hub_with_parts.n_bytes == n_bytes
    file = obtain.locate(catalog.parse(spec))
    assert file is not None
    assert (file.name, file.n_bytes) == ("mini", n_bytes)
    assert f"{n_bytes / 1e6:,.0f} MB  {file.path}" in out
    status, _, err = run_lab("measure", "-m", spec, *QUICK, "-o", tmp_path / "out")
    assert status == 0, err
    model = results.read([tmp_path / "out"]).records[-1].model
    assert model.file == f"Q4_0/{in_parts[0].name}"
    assert obtain.locate(catalog.parse(catalog.spec_of(model))) is not None
    file.paths[2].unlink()
    assert obtain.locate(catalog.parse(spec)) is None
    status, _, err = run_lab("models", "pull", spec)
    assert "downloading 1 of 3 parts" in err
    assert f"{n_bytes / 1e6:,.0f} MB freed" in run_lab("models", "remove", spec)[1]
    assert not list((tmp_path / "hf" / "hub").glob("models--*/blobs/*"))


def test_of_later_parts_only_the_table_of_tensors_is_read(
    hub_with_parts: LoopbackHub,
    in_parts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "LATER_HEADER_BYTES", 4_000)
    name = f"Q4_0/{in_parts[0].name}"
    assert "3 layers" in run_lab("models", "info", f"hf:owner/big/{name}")[1]
    first = hub.header(hub.HubFile("owner/big", name), tmp_path)
    assert first.read_bytes() == in_parts[0].read_bytes()
    later = (tmp_path / in_parts[1].name).read_bytes()
    assert later.rstrip(b"\0") == in_parts[1].read_bytes()[:4_000].rstrip(b"\0")
    assert len(later) == in_parts[1].stat().st_size


def test_a_part_that_the_repo_lacks_is_named(
    hub_with_parts: LoopbackHub, in_parts: list[Path]
) -> None:
    del hub_with_parts.repos["owner/big"].files[f"Q4_0/{in_parts[2].name}"]
    status, _, err = run_lab("models", "pull", f"hf:owner/big/Q4_0/{in_parts[0].name}")
    assert status == 1
    assert f"has no file 'Q4_0/{in_parts[2].name}'" in err
    assert hub_with_parts.n_bytes == 0


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_damaged_file_in_the_cache_is_pulled_again(
    damage: str, hub_with_parts: LoopbackHub, in_parts: list[Path]
) -> None:
    spec = f"hf:owner/big/Q4_0/{in_parts[0].name}"
    run_lab("models", "pull", spec)
    file = obtain.locate(catalog.parse(spec))
    assert file is not None
    content = file.paths[1].read_bytes()
    changed = content[:-1] if damage == "shorter" else content[:-1] + bytes([content[-1] ^ 1])
    file.paths[1].write_bytes(changed)
    if damage == "shorter":
        _, _, err = run_lab("measure", "-m", spec, *QUICK)
        assert "is truncated" in err
        assert f"Pull it again: lab models pull {spec}" in err
    status, _, err = run_lab("models", "pull", spec)
    assert status == 0, err
    assert "is damaged: the lab deleted it" in err
    assert file.paths[1].read_bytes() == content
    hub_with_parts.repos.clear()  # a complete one needs no hub
    status, _, err = run_lab("models", "pull", spec)
    assert status == 0, err


def replace(path: Path) -> None:
    """Another content of the same size."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [pytest.param(replace, True, id="replaced"), pytest.param(os.utime, False, id="touched")],
)
def test_a_file_that_is_replaced_between_rounds_ends_the_session(
    mini: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    is_refused: bool,
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(mini, path)
    renew = WarmEngine.renew

    def renewed(engine: WarmEngine) -> None:
        renew(engine)
        change(path)

    monkeypatch.setattr(WarmEngine, "renew", renewed)
    options = ("-p", "8", "-n", "3", "-r", "2", "-t", "1", "--no-plot", "--prompt", "random")
    status, _, err = run_lab("measure", "-m", path, *options, "-o", tmp_path / "out")
    assert status == int(is_refused), err
    assert ("model.gguf was replaced during the measurement" in err) == is_refused
    sums = {record.model.sha256 for record in results.read([tmp_path / "out"]).records}
    assert sums == {catalog.sha256(mini)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_no_matter_of_the_quantization(
    mini: Path, tmp_path: Path, worker: Worker
) -> None:
    target = tmp_path / "full.gguf"
    target.symlink_to("/dev/full")
    with pytest.raises(LabError, match="could not be written") as refused:
        worker.quantize(mini, target, "Q8_0", lambda done: None)
    assert "MINI_LAB_CACHE" in refused.value.hint


@pytest.mark.parametrize("chosen", ["~/x", "~"])
def test_the_folder_of_made_models_may_begin_with_the_home(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("MINI_LAB_CACHE", chosen)
    assert obtain.cache_folder() == tmp_path / chosen[2:]


@pytest.mark.parametrize(
    "chosen", ["/a/b", "rel/ative", "a~b", "/tmp/~x", "C:\\m", "ü b", "./~"]
)
def test_other_folders_of_made_models_stay(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_LAB_CACHE", chosen)
    assert obtain.cache_folder() == Path(chosen)


def test_the_sizes_stay_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run_lab("models", "--details")[1]
    assert "~2,390" in out
    assert "quantization" in out.rpartition("Columns left out")[2]
