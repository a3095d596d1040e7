"""What specs mean, random weights, re-quantizing, and the real commands on a loopback hub."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.core import cost, results
from lab.errors import LabError
from lab.models import catalog, obtain, synthetic
from lab.models.catalog import Dimensions
from lab.models.synthetic import quantizations
from lab.process.worker import Worker
from tests.support import loopback_hub
from tests.support.command import run_lab, run_process, start_lab

TINY = Dimensions("llama", 2, 256, 4, 2, 64, 512, 1000, 2048, True, 10000.0)
SHAPES = {
    "llama": TINY,
    "untied": dataclasses.replace(TINY, tied_embeddings=False),
    "phi3": dataclasses.replace(
        TINY,
        arch="phi3",
        n_head_kv=4,
        tied_embeddings=False,
    ),
    "qwen2": dataclasses.replace(TINY, arch="qwen2"),
    "odd rows": dataclasses.replace(
        TINY,
        n_embd=192,
        head_dim=48,
        n_ff=320,
    ),
}


QUICK = ("-n", "3", "-r", "1", "-t", "1", "--no-plot")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))
    loopback_hub.set_home(monkeypatch, tmp_path / "hf")
    return tmp_path / "made"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


@pytest.mark.parametrize(
    ("text", "name", "source", "quantization"),
    [
        ("smollm2-135m", "smollm2-135m", "embedded", None),
        ("SmolLM2", "smollm2-135m", "embedded", None),
        ("phi3", "phi-3-mini", "hub", None),
        ("Llama 3 3B", "llama-3.2-3b", "hub", None),
        ("llama-3.2-3b:q8_0", "llama-3.2-3b", "hub", "Q8_0"),
        ("synthetic:phi-3-mini", "phi-3-mini", "synthetic", "Q4_0"),
        ("synthetic:llama-2-7b:q4_k_m", "llama-2-7b", "synthetic", "Q4_K_M"),
    ],
)
def test_names_and_aliases(
    text: str,
    name: str,
    source: str,
    quantization: str | None,
) -> None:
    spec = catalog.parse(text)
    assert spec.entry is not None
    assert spec.entry.name == name
    assert spec.source == source
    assert spec.quantization == quantization


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("llama-3.2-3", "Did you mean llama-3.2-3b"),
        ("synthetic:phi5-mini", "Did you mean phi-4-mini or phi-4[?]"),
        ("llama-3.1-405b", "has only the shape of llama-3.1-405b"),
        ("deepseek-r1-distill-llama-8b", "has only the shape of deepseek-r1-distill-llama-8b"),
        ("qwen3-8b-thinking-2507", "has only the shape of qwen3-8b-thinking-2507"),
        ("hf:owner", "is not a model on the hub"),
        ("hf:owner/", "is not a model on the hub"),
        ("hf:owner/repo/README.md", "README.md is not a model file"),
        ("./no/such/file.gguf", "no model file"),
        ("models/none.gguf", "no model file"),
        ("models/none", "A model on the hub is written hf:models/none"),
        ("", "The name of the model is empty"),
        ("  ", "The name of the model is empty"),
        (".", ". is a folder"),
        ("..", ".. is a folder"),
        ("llama-3.2-3b:nonsense", "no size or quantization 'nonsense'"),
        ("llama3.2-vision:11b", "llama3.2-vision:11b reads like a name of Ollama's library"),
        ("smollm2:latest", "no model named 'smollm2-1.7b'"),
        ("no-such-model-at-all", "lab models"),
        ("https://example.com/x.gguf", "is not an address of the hub"),
        ("https://huggingface.co/datasets/owner/x", "is not the address of a model"),
    ],
)
def test_specs_that_mean_nothing(text: str, says: str) -> None:
    with pytest.raises(LabError, match=says):
        catalog.parse(text)


def test_the_embedded_shape_is_the_embedded_files(worker: Worker, embedded: Path) -> None:
    model = worker.read_model(embedded, "x", "embedded")
    shape = catalog.find("smollm2-135m").shape
    for field in dataclasses.fields(Dimensions):
        if hasattr(model, field.name):
            assert getattr(model, field.name) == getattr(shape, field.name), field.name


@pytest.mark.parametrize("quantization", synthetic.QUANTIZATIONS)
def test_weights_are_random_scaled_and_deterministic(
    tmp_path: Path, quantization: str
) -> None:
    import gguf
    import numpy as np

    for name, seed in (
        ("a", 1),
        ("b", 1),
        ("c", 2),
    ):
        synthetic.write(TINY, quantization, tmp_path / name, seed)
    contents = (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").read_bytes() == contents
    assert (tmp_path / "c").read_bytes() != contents
    tolerance = 0.45 if quantization == "F16" else 0.15  # F16 weights share one power of two
    for tensor in gguf.GGUFReader(tmp_path / "a").tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        assert (values == 0).mean() < 0.1
        if len(tensor.shape) == 2:
            columns = int(tensor.shape[0])
            assert values.std() * columns**0.5 == pytest.approx(1, rel=tolerance), tensor.name
            assert abs(values.mean()) < 0.1 * values.std()


@pytest.mark.parametrize("name", ["llama", "untied", "phi3", "odd rows"])
def test_the_mix_of_types_is_the_quantizers_own(
    worker: Worker,
    tmp_path: Path,
    name: str,
) -> None:
    import gguf

    def types(path: Path) -> dict[str, str]:
        return {
            tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors
        }

    synthetic.write(SHAPES[name], "F16", tmp_path / "f16.gguf")
    for quantization in ("Q4_0", "Q4_1", "Q8_0"):
        written = tmp_path / "written.gguf"
        quantized = tmp_path / "quantized.gguf"
        synthetic.write(SHAPES[name], quantization, written)
        worker.quantize(tmp_path / "f16.gguf", quantized, quantization, lambda done: None)
        assert types(written) == types(quantized), quantization


def test_synthetic_models_are_made_once_measured_and_marked(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real size takes 20 s.
    entry = dataclasses.replace(catalog.entries()["smollm2-135m"], shape=TINY)
    monkeypatch.setitem(catalog.entries(), entry.name, entry)
    spec = f"synthetic:{entry.name}:Q4_K_M"
    arguments = ("measure", "-m", spec, "-p", "8", *QUICK, "-o", tmp_path / "out")
    status, out, err = run_lab(*arguments)
    assert status == 0, err
    assert "random weights" in out
    assert "quantizing to Q4_K_M" in err
    (path,) = cache_folder.glob("*.gguf")
    written_at = path.stat().st_mtime_ns
    assert run_lab(*arguments[:-1], tmp_path / "again")[0] == 0
    assert path.stat().st_mtime_ns == written_at
    timed = results.read([tmp_path / "out"]).records[-1]
    assert timed.model.source == "synthetic"
    assert timed.model.quantization == "Q4_K_M"
    assert timed.settings.prompt == "random"
    assert "no text" in run_lab(*arguments, "--stream")[2]
    (tmp_path / "prompt.txt").write_text("What is the capital of France?")
    assert "random weights" in run_lab(*arguments, "--prompt", tmp_path / "prompt.txt")[2]
    assert "MB freed" in run_lab("models", "remove", spec)[1]
    assert not files_in(cache_folder)


def test_requantizing_what_is_on_disk(tmp_path: Path, cache_folder: Path) -> None:
    options = ("-p", "8", *QUICK, "-o", tmp_path / "out")
    status, out, err = run_lab("measure", "-m", "smollm2-135m:q8_0", *options)
    assert status == 0, err
    assert "re-quantised" in out
    model = results.read([tmp_path / "out"]).records[-1].model
    assert model.source == "requantized"
    assert model.quantization == "Q8_0"
    rows = json.loads(run_lab("models", "--json")[1])
    is_on_disk = {row["spec"]: row["on_disk"] for row in rows}
    assert is_on_disk["smollm2-135m:Q8_0"]
    assert not is_on_disk["phi-3-mini"]


def test_info_comes_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synthetic.write(SHAPES["untied"], "Q4_0", path)
    status, out, _ = run_lab("models", "info", path)
    assert status == 0
    assert "2 layers" in out
    assert "KV cache" in out
    description = json.loads(run_lab("models", "info", path, "--json")[1])
    table = 1000 * 256 // 32 * 18
    assert (
        description["weight_bytes_per_decode_step"]
        == sum(description["model"]["tensor_bytes"].values()) - table
    )
    assert description["kv_bytes_per_position"] == 2 * 2 * 64 * 4
    assert description["kv_bytes"]["10000"] == 10_240 * 1024  # llama.cpp pads to 256


def test_info_without_the_file_comes_from_the_shape() -> None:
    status, out, err = run_lab("models", "info", "phi-3-mini")
    assert status == 0
    assert err == ""
    assert "32 layers" in out
    assert "393,216 bytes per position" in out
    assert "not on this machine" in out
    assert "lab models pull phi-3-mini (a download of about 2,390 MB)" in out
    assert "lab models make synthetic:phi-3-mini:Q4_K_M" in out
    description = json.loads(run_lab("models", "info", "phi3", "--json")[1])
    shape = catalog.find("phi-3-mini").shape
    assert description["path"] is None
    assert description["model"]["n_head_kv"] == shape.n_head_kv
    assert (
        description["kv_bytes_per_position"]
        == 2 * 2 * shape.n_layer * shape.n_head_kv * shape.head_dim
    )
    assert description["model"]["n_bytes"] == synthetic.n_bytes(shape, "Q4_K_M")


@pytest.mark.skipif(
    os.name == "nt" or sys.platform == "darwin", reason="file names are text there"
)
def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff\x1b[2J.gguf")
    synthetic.write(TINY, "Q4_0", path)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    options = ("-p", "8", *QUICK, "--prompt", "random", "-o", tmp_path / "out")
    for command in (
        ("measure", "-m", path, *options),
        ("models", "info", path),
    ):
        command_line = [sys.executable, "-m", "lab", *command]
        ended = subprocess.run(
            command_line,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert b"Traceback" not in ended.stderr
        assert b"\x1b" not in ended.stdout + ended.stderr
    record = results.read([tmp_path / "out"]).records[-1]
    assert record.model.name == "m??[2J"
    assert record.model.file == "m??[2J.gguf"


def test_two_processes_that_make_the_same_model_both_have_it(
    worker: Worker, cache_folder: Path
) -> None:
    processes = [start_lab("models", "make", "smollm2-135m:Q8_0") for _ in range(2)]
    endings = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], endings
    (path,) = cache_folder.glob("*.gguf")
    for out, _ in endings:
        assert out.split()[-1] == str(path)
    assert files_in(cache_folder) == [path]
    assert worker.read_model(path, "x", "synthetic").n_bytes == path.stat().st_size


def test_make_downloads_nothing(cache_folder: Path) -> None:
    status, _, err = run_lab("models", "make", "phi-3-mini")
    assert status == 1
    assert "phi-3-mini is not made here, it is a download (about 2,390 MB)" in err
    assert "Download it: lab models pull phi-3-mini" in err


def test_a_cache_folder_that_cannot_be_made_is_said(cache_folder: Path) -> None:
    cache_folder.write_text("a file where a folder should be")
    status, _, err = run_lab("models", "make", "synthetic:smollm2-135m:Q4_0")
    assert status == 1
    assert "cannot be used" in err
    assert "MINI_LAB_CACHE" in err


def test_dry_runs_fetch_nothing(cache_folder: Path) -> None:
    status, out, err = run_lab(
        "measure", "-m", "synthetic:qwen2.5-0.5b", "--dry-run", "-p", "100"
    )
    assert status == 0, err
    assert "qwen2.5-0.5b Q4_0" in out
    assert "100 prompt tokens" in out  # planned from its shape
    assert "The time is unknown until the model is made." in err
    status, _, err = run_lab("measure", "-m", "hf:owner/no-such/model.gguf", "--dry-run")
    assert status == 1
    assert "lab models pull" in err
    assert not cache_folder.exists()


def test_a_model_of_the_hub_is_pulled_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny-Q4_0.gguf"
    synthetic.write(TINY, "Q4_0", path)
    with loopback_hub.running() as server:
        server.repos["owner/tiny"] = loopback_hub.Repo({"tiny-Q4_0.gguf": path.read_bytes()})
        loopback_hub.set_endpoint(monkeypatch, server.endpoint)
        for spec in ("hf:owner/tiny/tiny-Q4_0.gguf", "hf:owner/tiny:Q4_0"):
            options = ("-p", "8", *QUICK, "--prompt", "random", "-o", tmp_path / "out")
            status, _, err = run_lab("measure", "-m", spec, *options)
            assert status == 0, err
        assert (
            "has no file with quantization Q6_K"
            in run_process("models", "pull", "hf:owner/tiny:Q6_K")[2]
        )
        model = results.read([tmp_path / "out"]).records[0].model
        assert model.source == "hub"
        assert model.repo == "owner/tiny"
        assert model.sha256 == catalog.sha256(path)
        assert model.revision == server.repos["owner/tiny"].commit
        assert server.n_bytes == path.stat().st_size  # once, although it was measured twice
        assert obtain.locate(catalog.parse("hf:owner/tiny:Q4_0")) is not None
        assert "not on this machine" in run_lab("models", "remove", "hf:owner/tiny:Q8_0")[1]
        assert "freed" in run_lab("models", "remove", "hf:owner/tiny:Q4_0")[1]
        assert obtain.locate(catalog.parse("hf:owner/tiny/tiny-Q4_0.gguf")) is None


def test_an_alias_with_any_quantization_is_a_model_to_predict_for() -> None:
    for text in ("llama-3-8b:Q4_0", "llama-3.1-8b:q3_k_s", "gpt-oss:MXFP4", "phi4:IQ4_NL"):
        spec = catalog.parse(text, or_shape=True)
        assert spec.entry is not None
        model = synthetic.model_of(spec.entry, spec.quantization or "")
        assert model.n_bytes
        assert model.quantization in quantizations("types")
    sizes = {
        ("llama-3.1-8b", "Q3_K_S"): 3.66e9,
        ("llama-3.1-8b", "Q2_K"): 3.18e9,
        ("gpt-oss-120b", "MXFP4"): 63.4e9,
    }
    for (name, kind), n_bytes in sizes.items():  # of files on the hub
        assert synthetic.model_of(catalog.find(name), kind).n_bytes == pytest.approx(
            n_bytes, rel=0.01
        )
    with pytest.raises(LabError, match="makes no quantization UD-Q4_K_XL: Unsloth"):
        synthetic.model_of(catalog.find("phi-4"), "UD-Q4_K_XL")


def test_a_model_that_cannot_be_counted_is_refused_with_the_reason() -> None:
    for name, reason in (
        ("deepseek-v4-flash", "compressed positions"),
        ("glm-5.1", "chooses the positions"),
    ):
        with pytest.raises(LabError, match=reason) as refused:
            catalog.find(name)
        assert "hf:OWNER/REPO:Q4_K_M" in refused.value.hint
    assert catalog.find("qwen3.5-27b").name == "qwen3.6-27b"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("deepseek-r1-distill-qwen-1.5b", "qwen2.5-1.5b"),
        ("deepseek-r1-0528-qwen3-8b", "qwen3-8b"),
        ("gemma-3-4b-it", "gemma-3-4b"),
        ("qwen3-8b-thinking-2507", "qwen3-8b"),
    ],
)
def test_a_distillation_is_found_by_its_base(name: str, base: str) -> None:
    assert catalog.find(name).name == base


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3.9-27b", "qwen3.6-27b"),
        ("gemma-4-12b", "gemma-3-12b"),
        ("llama4", "llama-4-scout or llama-4-maverick"),
        ("llama-5", "llama-4-scout or llama-4-maverick"),
        ("llama3.3", "llama-3.3-70b"),
        ("phi4mini", "phi-4-mini"),
        ("mistral-7", "mistral-7b or"),
    ],
)
def test_a_near_miss_is_answered_with_the_same_size_or_version(
    name: str, nearest: str
) -> None:
    with pytest.raises(LabError) as problem:
        catalog.find(name)
    hint = problem.value.hint
    assert hint.startswith(f"Did you mean {nearest}")
    assert "hf:OWNER/REPO/FILE" in hint


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "Phi3", "phi-3-mini-4k-instruct"])
def test_a_spelling_of_a_name_has_the_file(name: str) -> None:
    assert catalog.parse(name).source == "hub"


def test_the_size_of_a_file_is_that_of_its_shape() -> None:
    """A header takes up to 15 MB, and mixtures of types vary."""
    n_files = 0
    for entry in catalog.entries().values():
        if entry.repo:
            assert entry.file
            assert entry.quantization
            planned = synthetic.model_of(entry, entry.quantization).n_bytes
            assert entry.n_bytes == pytest.approx(planned, rel=0.02, abs=15e6), entry.name
            n_files += 1
    assert n_files > 40


PUBLISHED_SIZES = {
    # Parameters as the makers or llama.cpp print them, in 10^9.
    "deepseek-v3": 671,
    "gemma-4-31b": 30.7,
    "glm-4.5-air": 107,
    "granite-4.0-h-1b": 1.46,
    "granite-4.0-h-tiny": 6.94,
    "kimi-linear-48b-a3b": 49.12,
    "lfm2-8b-a1b": 8.34,
    "llama-4-scout": 107.8,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-super-120b-a12b": 120.7,
    "qwen3-next-80b-a3b": 79.7,
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_a_shape_has_as_many_parameters_as_were_published(name: str) -> None:
    model = synthetic.model_of(catalog.find(name), "Q8_0")
    assert (model.n_params or 0) / 1e9 == pytest.approx(PUBLISHED_SIZES[name], rel=0.01)
    assert cost.step(model, 1, 0, 1) is not None


def test_each_shape_of_the_catalog_has_a_source_and_is_counted() -> None:
    for entry in catalog.entries().values():
        assert entry.shape_source
        assert cost.step(synthetic.model_of(entry, "Q8_0"), 1, 0, 1) is not None, entry.name
