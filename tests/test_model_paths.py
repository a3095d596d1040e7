"""A hundred ordinary paths of model files, each of which is measured and none refused."""

import os
import shutil
from pathlib import Path

import pytest

from lab.core import split_files
from lab.models import catalog, obtain
from lab.process.worker import Worker

NAMES = (
    *("w.gguf", "a", "ab.c", "weights.GGUF", "llama-2-7b.gguf", "phi3", "phi-3-mini.gguf"),
    *("model.gguf", "Model.GGUF", "model.Gguf", "m.gguf", "1.gguf", "0", "model", "model.bin"),
    *("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct.Q8_0.gguf", "phi-4-Q4_0.gguf"),
    *(
        "DeepSeek-R1-0528-Qwen3-8B-UD-Q4_K_XL.gguf",
        "gpt-oss-20b-mxfp4.gguf",
        "ggml-model-f16.gguf",
    ),
    *(
        "gemma-3-4b-it-qat-q4_0.gguf",
        "mistral-7b-v0.3.IQ4_XS.gguf",
        "tinyllama.i1-Q4_K_S.gguf",
    ),
    *("smollm2:135m.gguf", "llama3.2:3b", "qwen3:latest", "mein Modell.gguf", " leading.gguf"),
    *("trailing .gguf", "zwei  Leerzeichen.gguf", "Größe.gguf", "modèle.gguf", "модель.gguf"),
    *("模型.gguf", "モデル.gguf", "نموذج.gguf", "🦙.gguf", "a'b.gguf", 'a"b.gguf', "a`b.gguf"),
    *(
        "a$HOME.gguf",
        "a&b.gguf",
        "a;b.gguf",
        "a(1).gguf",
        "Copy of model (2).gguf",
        "a[1].gguf",
    ),
    *("a{b}.gguf", "a*b.gguf", "a?b.gguf", "a#b.gguf", "a%20b.gguf", "a+b.gguf", "a=b.gguf"),
    *(
        "a,b.gguf",
        "a@b.gguf",
        "model@main.gguf",
        "a!b.gguf",
        "a|b.gguf",
        "a<b>.gguf",
        "a\\b.gguf",
    ),
    *(
        "C:\\Users\\me\\model.gguf",
        "D:model.gguf",
        "~model.gguf",
        "-model.gguf",
        "--model.gguf",
    ),
    *(".hidden.gguf", "...gguf", "a..b.gguf", "a.gguf.gguf", "model.gguf.bak", "model.gguf.1"),
    *("model-00001-of-00001.gguf", "x-00001-of-00002.safetensors", "x-0001-of-0002.gguf"),
    *("part1.gguf", "best-of-3.gguf", "3-of-3.gguf", "v1.0.gguf", "2024-01-31.gguf"),
    *("sha256-" + "a" * 64, "sha256:" + "b" * 64, "c" * 64, "d" * 200, "e" * 240 + ".gguf"),
    *(
        "hf:x.gguf",
        "hf",
        "ollama",
        "synthetic.gguf",
        "latest",
        "Q4_K_M",
        "Q4_K_M.gguf",
        "F16.gguf",
    ),
    *(
        "mmproj-less.gguf",
        "owner_repo_file-Q4_K_M.gguf",
        "model_q4_k_m",
        "README",
        "tab\there.gguf",
    ),
    *("model.gguf ", "UPPER-CASE-NAME.GGUF", "MiXeD-Case.gguF", "a_b-c.d.gguf", "üöä ß.GGUF"),
)
FOLDERS = (
    "plain",
    "with blank",
    "ümläut",
    ".hidden",
    "models--owner--repo/snapshots/abc",
    "a/b/c/d/e/f/g",
    "x.gguf",
    "hf:owner",
    "UD-Q4_K_XL",
    "[brackets] & more",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))
    return tmp_path


def located(text: str) -> Path:
    file = obtain.locate(catalog.parse(text))
    assert file is not None
    return file.path


@pytest.mark.skipif(os.name == "nt", reason="Windows has fewer names")
def test_ordinary_names_of_files(folder: Path) -> None:
    assert len(set(NAMES)) >= 100
    for name in NAMES:
        path = folder / name
        path.write_bytes(b"GGUF")
        assert located(str(path)) == path, name
        assert split_files.stem(name)
        path.unlink()


@pytest.mark.parametrize("name", FOLDERS)
def test_ordinary_folders(name: str, folder: Path, mini: Path) -> None:
    path = folder / name / "my model.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy(mini, path)
    assert located(str(path)) == path
    assert located(str(path.parent)) == path
    assert located(f"~/{name}/my model.gguf") == path


def test_links_and_relative_paths(
    folder: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link keeps its name, by which parts are found beside it."""
    monkeypatch.chdir(folder)
    shutil.copy(mini, "model.gguf")
    Path("sub").mkdir()
    Path("sub/link.gguf").symlink_to("../model.gguf")
    Path("chain").symlink_to("sub")
    texts = (
        "model.gguf",
        "./model.gguf",
        "sub/link.gguf",
        "chain/link.gguf",
        "sub/../model.gguf",
    )
    with Worker() as worker:
        for text in texts:
            path = located(text)
            assert path == Path(text)
            assert worker.read_model(path, "x", "file").n_layer == 3
