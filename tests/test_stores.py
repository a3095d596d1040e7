"""Files of Ollama, LM Studio, llama.cpp and the hub are listed and measured where they lie."""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.errors import LabError
from lab.models import catalog, obtain, stores
from lab.process.worker import Worker
from tests.support import loopback_hub
from tests.support.command import run_lab
from tests.support.split_models import split

IMAGE = "application/vnd.ollama.image."
QUICK = ("-p", "8", "-n", "3", "-r", "1", "-t", "1", "--no-plot", "--prompt", "random")
NAMES = {
    # as people write them: host, namespace, model and tag
    "llama3.2:3b": ("registry.ollama.ai", "library", "llama3.2", "3b"),
    "llama3.2": ("registry.ollama.ai", "library", "llama3.2", "latest"),
    "LLaMA3.2:3B": ("registry.ollama.ai", "library", "llama3.2", "3b"),
    "library/qwen3:0.6b": ("registry.ollama.ai", "library", "qwen3", "0.6b"),
    "registry.ollama.ai/library/gpt-oss:20b": (
        "registry.ollama.ai",
        "library",
        "gpt-oss",
        "20b",
    ),
    "jdoe/my-model": ("registry.ollama.ai", "jdoe", "my-model", "latest"),
    "jdoe/my_model:v1.5-q4_K_M": ("registry.ollama.ai", "jdoe", "my_model", "v1.5-q4_k_m"),
    "hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M": (
        "hf.co",
        "bartowski",
        "llama-3.2-1b-instruct-gguf",
        "q4_k_m",
    ),
    "hf.co/unsloth/Qwen3-GGUF": ("hf.co", "unsloth", "qwen3-gguf", "latest"),
    "localhost:5000/team/model:dev": ("localhost:5000", "team", "model", "dev"),
}


class Home:
    """A user's home, in which other tools have models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ollama = folder / ".ollama" / "models"

    def blob(self, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        path = self.ollama / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def manifest(self, name: str, layers: list[dict[str, Any]]) -> Path:
        path = self.ollama / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
        return path

    def pulled(self, name: str, content: bytes) -> Path:
        """Write a model as `ollama pull` leaves it."""
        layers = [
            {"mediaType": f"{IMAGE}model", **self.blob(content)},
            {"mediaType": f"{IMAGE}template", **self.blob(b"{{ .Prompt }}")},
            {"mediaType": f"{IMAGE}license", **self.blob(b"MIT")},
            {"mediaType": f"{IMAGE}params", **self.blob(b'{"stop":["<|end|>"]}')},
        ]
        return self.manifest(name, layers)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home of jürgen"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))
    loopback_hub.set_home(monkeypatch, tmp_path / "hf")
    yield Home(folder)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_ollama(name: str) -> None:
    assert stores._full_name(name) == NAMES[name]


def test_a_model_of_ollama_is_measured_where_it_lies(
    home: Home, mini: Path, tmp_path: Path
) -> None:
    home.pulled("registry.ollama.ai/library/tiny/3b", mini.read_bytes())
    before = sorted(home.folder.rglob("*"))
    for spec in ("ollama:tiny:3b", "ollama:library/tiny:3b", "ollama:Tiny:3B"):
        status, _, err = run_lab("measure", "-m", spec, *QUICK, "-o", tmp_path / "out")
        assert status == 0, err
    assert sorted(home.folder.rglob("*")) == before
    model = results.read([tmp_path / "out"]).records[-1].model
    assert (model.name, model.source) == ("tiny:3b", "ollama")
    assert model.sha256 == catalog.sha256(mini)
    assert catalog.spec_of(model) == "ollama:tiny:3b"
    status, _, err = run_lab("models", "remove", "ollama:tiny:3b")
    assert status == 1
    assert "did not create ollama:tiny:3b" in err
    assert sorted(home.folder.rglob("*")) == before
    assert "3 layers" in run_lab("models", "info", "ollama:tiny:3b")[1]


def test_what_is_no_model_file_says_why(home: Home, mini: Path) -> None:
    content = mini.read_bytes()
    home.pulled("registry.ollama.ai/library/tiny/latest", content)
    other = home.pulled("registry.ollama.ai/library/gone/latest", content + b"x")
    layer = json.loads(other.read_text())["layers"][0]
    (home.ollama / "blobs" / layer["digest"].replace(":", "-")).unlink()
    home.manifest("registry.ollama.ai/library/big/120b-cloud", [])
    home.manifest(
        "registry.ollama.ai/library/mlx/latest",
        [{"mediaType": f"{IMAGE}tensor", "digest": "sha256:" + "a" * 64, "size": 5}],
    )
    for name, text in {
        "half": '{"schemaVersion": 2, "lay',
        "list": "[]",
        "null": '{"layers": null}',
        "evil": json.dumps(
            {"layers": [{"mediaType": f"{IMAGE}model", "digest": "sha256:../../../x"}]}
        ),
        "deep": "[" * 100_000,
        "text": "not JSON",
    }.items():
        path = home.ollama / "manifests/registry.ollama.ai/library" / name / "latest"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (home.ollama / "manifests" / ".DS_Store").write_text("")
    for spec, says in {
        "gone": "is missing or may not be read",
        "big:120b-cloud": "no GGUF file on this machine",
        "mlx": "no GGUF file on this machine",
        "half": "is broken",
        "list": "is broken",
        "null": "no GGUF file",
        "evil": "is broken",
        "deep": "is broken",
        "text": "is broken",
    }.items():
        with pytest.raises(LabError, match=says):
            catalog.parse(f"ollama:{spec}")
    with pytest.raises(LabError) as unknown:
        catalog.parse("ollama:tiny:7b")
    assert "It has: ollama:tiny:latest." in unknown.value.hint
    status, out, _ = run_lab("models", "--found")
    assert status == 0
    assert out.count("cannot be measured") == 9


def test_no_ollama_at_all(home: Home) -> None:
    status, _, err = run_lab("measure", "-m", "ollama:llama3.2:3b")
    assert status == 1
    assert "Ollama has no model 'llama3.2:3b' on this machine." in err
    assert "OLLAMA_MODELS" in err
    assert "No model files" in run_lab("models", "--found")[1]


def test_the_largest_layer_of_weights_counts(home: Home, mini: Path) -> None:
    weights = {"mediaType": f"{IMAGE}model", **home.blob(mini.read_bytes())}
    projector = {"mediaType": f"{IMAGE}projector", **home.blob(b"GGUF" + b"p" * 9**6)}
    adapter = {"mediaType": f"{IMAGE}adapter", **home.blob(b"GGUF adapter")}
    small = {"mediaType": f"{IMAGE}model", **home.blob(b"GGUF small")}
    home.manifest("registry.ollama.ai/library/eyes/1b", [small, projector, weights, adapter])
    file = obtain.locate(catalog.parse("ollama:eyes:1b"))
    assert file is not None
    assert file.path.read_bytes() == mini.read_bytes()


@pytest.mark.parametrize("form", ["{}", "'{}'", '"{}"', "~/x"])
def test_ollamas_folder_may_be_chosen(
    form: str, home: Home, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.pulled("registry.ollama.ai/library/tiny/3b", mini.read_bytes())
    home.ollama.rename(home.folder / "x")
    monkeypatch.setenv("OLLAMA_MODELS", form.format(home.folder / "x"))
    assert stores.find_ollama("tiny:3b").n_bytes == mini.stat().st_size


def test_an_older_store_and_links(home: Home, mini: Path) -> None:
    """Blobs had a colon in their names; a store may be a link to another disk."""
    home.pulled("registry.ollama.ai/library/tiny/3b", mini.read_bytes())
    for path in list((home.ollama / "blobs").iterdir()):
        path.rename(path.with_name(path.name.replace("-", ":")))
    home.ollama.rename(home.folder / "disk")
    home.ollama.symlink_to(home.folder / "disk")
    assert stores.find_ollama("tiny:3b").path is not None


def write_everywhere(home: Home, mini: Path) -> dict[str, Path]:
    """Models of all tools; the expected names with their first files."""
    content = mini.read_bytes()
    lm_studio = home.folder / ".lmstudio" / "models"
    llama_cpp = home.folder / ".cache" / "llama.cpp"
    hub = Path(os.environ["HF_HOME"]) / "hub" / "models--owner--tiny"
    paths = [
        lm_studio / "lmstudio-community" / "Tiny-GGUF" / "Tiny-Q4_0.gguf",
        lm_studio / "jdoe" / "with blanks & ümlauts" / "Modell (1).GGUF",
        home.folder / ".cache" / "lm-studio" / "models" / "old" / "repo" / "m.gguf",
        llama_cpp / "owner_tiny_tiny-Q8_0.gguf",
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (lm_studio / "lmstudio-community" / "Tiny-GGUF" / "mmproj-F16.gguf").write_bytes(content)
    (llama_cpp / "manifest=owner=tiny=latest.json").write_text("{}")
    (llama_cpp / "owner_tiny_x.gguf.downloadInProgress").write_bytes(content)
    (folder := lm_studio / "jdoe" / "big").mkdir()
    paths.append(split(mini, folder / "big-Q4_0", 3)[0])
    commit = "c0ffee" + "0" * 34
    blob = hub / "blobs" / catalog.sha256(mini)
    link = hub / "snapshots" / commit / "Q4_0" / "tiny.gguf"
    blob.parent.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    (hub / "refs").mkdir()
    blob.write_bytes(content)
    link.symlink_to(blob)
    (link.parent / "mmproj.gguf").symlink_to(blob)
    (hub / "refs" / "main").write_text(commit)
    home.pulled("registry.ollama.ai/library/tiny/3b", content)
    files = {str(path): path for path in paths}
    return files | {"ollama:tiny:3b": home.ollama, "hf:owner/tiny/Q4_0/tiny.gguf": link}


def test_all_are_listed_by_names_that_can_be_pasted(home: Home, mini: Path) -> None:
    expected = write_everywhere(home, mini)
    models = json.loads(run_lab("models", "--found", "--json")[1])
    assert {model["spec"] for model in models} == expected.keys()
    with Worker() as worker:
        for model in models:
            file = obtain.obtain(catalog.parse(model["spec"]), worker, None)
            assert model["n_bytes"] == file.n_bytes
            assert worker.read_model(file.path, "x", "file").n_layer == 3
    status, out, err = run_lab("models", "--found")
    assert (status, err) == (0, "")
    for spec in expected:
        assert f"  {shlex.quote(spec)}\n" in out
    rows = json.loads(run_lab("models", "--json")[1])
    assert "hf:owner/tiny/Q4_0/tiny.gguf" in [row["spec"] for row in rows if row["on_disk"]]


def test_another_commit_than_mains_is_named(home: Home, mini: Path) -> None:
    write_everywhere(home, mini)
    hub = Path(os.environ["HF_HOME"]) / "hub" / "models--owner--tiny"
    (hub / "refs" / "main").write_text("d" * 40)
    specs = [row["spec"] for row in json.loads(run_lab("models", "--json")[1])]
    (spec,) = [spec for spec in specs if spec.startswith("hf:")]
    assert spec == f"hf:owner/tiny/Q4_0/tiny.gguf@c0ffee{'0' * 34}"
    assert obtain.locate(catalog.parse(spec)) is not None


def test_lm_studios_folder_may_be_chosen(home: Home, mini: Path) -> None:
    folder = home.folder / "andere Platte"
    (folder / "p" / "r").mkdir(parents=True)
    shutil.copy(mini, folder / "p" / "r" / "m.gguf")
    studio = home.folder / "studio"
    studio.mkdir()
    (studio / "settings.json").write_text(json.dumps({"downloadsFolder": str(folder)}))
    (home.folder / ".lmstudio-home-pointer").write_text(f"{studio}\n")
    assert [model.spec for model in stores.found()] == [str(folder / "p" / "r" / "m.gguf")]


def test_llama_cpps_folder_may_be_chosen(
    home: Home, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(mini, home.folder / "o_r_m.gguf")
    monkeypatch.setenv("LLAMA_CACHE", "~")
    assert [model.tool for model in stores.found()] == ["llama.cpp"]


def test_folders_with_loops_and_incomplete_models(home: Home, mini: Path) -> None:
    folder = home.folder / ".lmstudio" / "models" / "p" / "r"
    folder.mkdir(parents=True)
    (folder / "loop").symlink_to(home.folder / ".lmstudio" / "models")
    (folder / "self").symlink_to("self")
    (folder / "nowhere.gguf").symlink_to("nothing")
    parts = split(mini, folder / "x", 3)
    parts[1].unlink()
    models = {model.spec: model for model in stores.found()}
    incomplete = models[str(parts[0])]
    assert "Missing: x-00002-of-00003.gguf" in (incomplete.problem or "")
    assert models[str(folder / "nowhere.gguf")].path is None
    assert run_lab("models", "--found")[0] == 0


@pytest.mark.parametrize("closed", [".ollama/models", ".ollama", ""])
def test_a_folder_that_may_not_be_read(
    closed: str, home: Home, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is simulated."""
    home.pulled("registry.ollama.ai/library/tiny/3b", mini.read_bytes())
    closed_folder = home.folder / closed
    look = Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path == closed_folder or closed_folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    status, _, err = run_lab("models", "--found")
    assert status == 0
    assert err == f"This user may not read {closed_folder}.\n"
    with pytest.raises(LabError) as unknown:
        catalog.parse("ollama:tiny:3b")
    assert f"The folder {closed_folder} may not be read" in unknown.value.hint
