"""Names of models as the hub, llama.cpp, Ollama, LM Studio and servers write them."""

from pathlib import Path

import pytest

from lab.errors import LabError
from lab.models import catalog

OF_THE_CATALOG = {
    "llama3.2": ("llama-3.2-3b", None),
    "llama3.2:latest": ("llama-3.2-3b", None),
    "llama3.2:3b": ("llama-3.2-3b", None),
    "Llama3.2:3B": ("llama-3.2-3b", None),
    "llama3.2:1b": ("llama-3.2-1b", None),
    "llama3.2:3b-instruct-q4_K_M": ("llama-3.2-3b", "Q4_K_M"),
    "llama3.2:3b-instruct-fp16": ("llama-3.2-3b", "F16"),
    "llama3.2:1b-instruct-q8_0": ("llama-3.2-1b", "Q8_0"),
    "llama3.1": ("llama-3.1-8b", None),
    "llama3.1:latest": ("llama-3.1-8b", None),
    "llama3.1:8b": ("llama-3.1-8b", None),
    "llama3.1:8b-instruct-q5_K_M": ("llama-3.1-8b", "Q5_K_M"),
    "llama3.3": ("llama-3.3-70b", None),
    "llama3.3:70b": ("llama-3.3-70b", None),
    "llama2:7b": ("llama-2-7b", None),
    "llama2": ("llama-2-7b", None),
    "granite4:3b": ("granite-4.0-micro", None),
    "granite4:7b-a1b-h": ("granite-4.0-h-tiny", None),
    "granite4:32b-a9b-h-q8_0": ("granite-4.0-h-small", "Q8_0"),
    "gpt-oss:20b": ("gpt-oss-20b", None),
    "gpt-oss:120b": ("gpt-oss-120b", None),
    "gpt-oss:latest": ("gpt-oss-20b", None),
    "qwen3": ("qwen3-8b", None),
    "qwen3:latest": ("qwen3-8b", None),
    "qwen3:0.6b": ("qwen3-0.6b", None),
    "qwen3:30b": ("qwen3-30b-a3b", None),
    "qwen3:30b-a3b": ("qwen3-30b-a3b", None),
    "qwen3:30b-a3b-q4_K_M": ("qwen3-30b-a3b", "Q4_K_M"),
    "qwen3:4b-q8_0": ("qwen3-4b", "Q8_0"),
    "qwen2.5:0.5b": ("qwen2.5-0.5b", None),
    "qwen2.5": ("qwen2.5-7b", None),
    "qwen2.5:7b-instruct-q4_0": ("qwen2.5-7b", "Q4_0"),
    "qwen3-next:80b": ("qwen3-next-80b-a3b", None),
    "qwen3.5:9b": ("qwen3.5-9b", None),
    "qwen3.5:latest": ("qwen3.5-9b", None),
    "gemma3": ("gemma-3-4b", None),
    "gemma3:1b": ("gemma-3-1b", None),
    "gemma3:4b": ("gemma-3-4b", None),
    "gemma3:12b-it-q4_K_M": ("gemma-3-12b", "Q4_K_M"),
    "gemma2": ("gemma-2-9b", None),
    "gemma2:2b": ("gemma-2-2b", None),
    "phi3": ("phi-3-mini", None),
    "phi3:mini": ("phi-3-mini", None),
    "phi3:3.8b": ("phi-3-mini", None),
    "phi3:mini-128k": ("phi-3-mini-128k", None),
    "phi3.5": ("phi-3.5-mini", None),
    "phi3.5:3.8b": ("phi-3.5-mini", None),
    "phi4": ("phi-4", None),
    "phi4:14b": ("phi-4", None),
    "phi4-mini:3.8b": ("phi-4-mini", None),
    "mistral": ("mistral-7b", None),
    "mistral:7b-instruct-v0.3-q4_K_M": ("mistral-7b", "Q4_K_M"),
    "mistral-nemo:12b": ("mistral-nemo-12b", None),
    "mistral-small:24b": ("mistral-small-3.2", None),
    "mistral-small3.2:24b": ("mistral-small-3.2", None),
    "ministral-3": ("ministral-3-8b", None),
    "ministral-3:14b": ("ministral-3-14b", None),
    "tinyllama:1.1b": ("tinyllama-1.1b", None),
    "smollm2:135m": ("smollm2-135m", None),
    "granite4": ("granite-4.0-micro", None),
    "granite4:tiny-h": ("granite-4.0-h-tiny", None),
    "granite4:micro-h": ("granite-4.0-h-micro", None),
    "nemotron-3-nano:30b": ("nemotron-3-nano-30b-a3b", None),
    "glm-4.7-flash": ("glm-4.7-flash", None),
    "glm-4.7-flash:q8_0": ("glm-4.7-flash", "Q8_0"),
    "deepseek-r1:8b": ("qwen3-8b", None),
    "deepseek-r1:latest": ("qwen3-8b", None),
    "deepseek-r1:7b": ("qwen2.5-7b", None),
    "deepseek-r1:70b": ("llama-3.3-70b", None),
    "deepseek-r1:8b-llama-distill-q4_K_M": ("llama-3.1-8b", "Q4_K_M"),
    "deepseek-r1:8b-0528-qwen3-q8_0": ("qwen3-8b", "Q8_0"),
    "deepseek-r1:14b-qwen-distill-q4_K_M": ("qwen2.5-14b", "Q4_K_M"),
    "deepseek-r1:671b": ("deepseek-v3", None),
    "deepseek-r1": ("deepseek-v3", None),
    "qwen2.5-coder:7b": ("qwen2.5-7b", None),
    "qwen2.5-coder": ("qwen2.5-7b", None),
    "qwen3-coder:30b": ("qwen3-30b-a3b", None),
    "qwen3-coder:480b": ("qwen3-coder-480b-a35b", None),
    "qwen3:30b-a3b-instruct-2507-q4_K_M": ("qwen3-30b-a3b", "Q4_K_M"),
    "gemma3:4b-it-qat": ("gemma-3-4b", None),
    "gemma3n:e4b": ("gemma-3n-e4b", None),
    "gemma4:26b": ("gemma-4-26b-a4b", None),
    "gpt-oss:20b-cloud": ("gpt-oss-20b", None),
    "llama3:8b": ("llama-3.1-8b", None),
    "llama3:8b-text-q4_0": ("llama-3.1-8b", "Q4_0"),
    "llama4:scout": ("llama-4-scout", None),
    "llama4:16x17b": ("llama-4-scout", None),
    "mixtral:8x7b": ("mixtral-8x7b", None),
    "devstral:24b": ("mistral-small-3.2", None),
    "library/llama3.2:3b": ("llama-3.2-3b", None),
    "ollama.com/library/llama3.2:3b": ("llama-3.2-3b", None),
    "https://ollama.com/library/qwen3:8b": ("qwen3-8b", None),
    "registry.ollama.ai/library/gemma3:4b": ("gemma-3-4b", None),
    "qwen3-8b@q4_k_m": ("qwen3-8b", "Q4_K_M"),
    "qwen3-8b:UD-Q4_K_XL": ("qwen3-8b", "UD-Q4_K_XL"),
    "Qwen3-8B-Q4_K_M": ("qwen3-8b", "Q4_K_M"),
    "Llama-3.2-3B-Instruct-Q8_0": ("llama-3.2-3b", "Q8_0"),
    "Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", None),
    "google_gemma-3-4b-it-Q4_K_M": ("gemma-3-4b", "Q4_K_M"),
    "gpt-oss-20b-mxfp4": ("gpt-oss-20b", "MXFP4_MOE"),
    "gpt-oss:MXFP4": ("gpt-oss-20b", "MXFP4_MOE"),
    "Qwen/Qwen3-8B": ("qwen3-8b", None),
    "qwen/qwen3-8b": ("qwen3-8b", None),
    "qwen/qwen3-8b@q4_k_m": ("qwen3-8b", "Q4_K_M"),
    "openai/gpt-oss-20b": ("gpt-oss-20b", None),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2-3b", None),
    "https://huggingface.co/google/gemma-3-4b-it": ("gemma-3-4b", None),
}


@pytest.mark.parametrize("text", OF_THE_CATALOG)
def test_names_of_models_that_the_catalog_has(text: str) -> None:
    name, quantization = OF_THE_CATALOG[text]
    spec = catalog.parse(text, or_shape=True)
    assert spec.entry is not None
    assert spec.entry.name == name
    if spec.source == catalog.SYNTHETIC and quantization is None:
        quantization = spec.entry.usual_quantization
    assert spec.quantization == quantization


@pytest.mark.parametrize("text", ["llama3.2:3b", "qwen3:30b-a3b-q4_K_M", "llama-3.2-3b:Q8_0"])
def test_the_same_names_with_random_weights(text: str) -> None:
    spec = catalog.parse(f"synthetic:{text}")
    assert spec.source == catalog.SYNTHETIC
    assert spec.entry == catalog.find(catalog.parse(text).name)


FILE = "Tiny-Q4_0.gguf"
PART = "UD-Q4_K_XL/x-00001-of-00003.gguf"
USUAL = "the usual model"
ON_THE_HUB = {
    # Name: file, tag, revision
    f"hf:org/Repo-GGUF/{FILE}": (FILE, None, "main"),
    f"hf:org/Repo-GGUF/{FILE}@refs/pr/1": (FILE, None, "refs/pr/1"),
    f"hf:org/Repo-GGUF/{PART}": (PART, None, "main"),
    "hf:org/Repo-GGUF": (None, None, "main"),
    "hf:org/Repo-GGUF@abc": (None, None, "abc"),
    "HF:org/Repo-GGUF:q4_0": (None, "Q4_0", "main"),
    "hf:org/Repo-GGUF:Q4_0@v1": (None, "Q4_0", "v1"),
    "hf:org/Repo-GGUF@q4_k_m": (None, "Q4_K_M", "main"),
    "hf:org/Repo-GGUF/UD-Q4_K_XL": (None, "UD-Q4_K_XL", "main"),
    "hf://org/Repo-GGUF:Q4_0": (None, "Q4_0", "main"),
    "org/Repo-GGUF": (None, USUAL, "main"),
    "org/Repo-GGUF:latest": (None, USUAL, "main"),
    "org/Repo-GGUF:Q4_0": (None, "Q4_0", "main"),
    "org/Repo-GGUF:UD-Q4_K_XL": (None, "UD-Q4_K_XL", "main"),
    "org/Repo-GGUF@q4_k_m": (None, "Q4_K_M", "main"),
    f"org/Repo-GGUF/{FILE}": (FILE, None, "main"),
    f"org/Repo-GGUF/{PART}": (PART, None, "main"),
    f"org/Repo-GGUF:{FILE}": (FILE, None, "main"),
    "-hf org/Repo-GGUF": (None, USUAL, "main"),
    "-hf org/Repo-GGUF:Q4_K_M": (None, "Q4_K_M", "main"),
    "-hfr org/Repo-GGUF:Q4_K_M": (None, "Q4_K_M", "main"),
    "--hf-repo org/Repo-GGUF:Q8_0": (None, "Q8_0", "main"),
    "hf.co/org/Repo-GGUF": (None, USUAL, "main"),
    "hf.co/org/Repo-GGUF:latest": (None, USUAL, "main"),
    "hf.co/org/Repo-GGUF:Q4_K_M": (None, "Q4_K_M", "main"),
    f"hf.co/org/Repo-GGUF:{FILE}": (FILE, None, "main"),
    "huggingface.co/org/Repo-GGUF": (None, USUAL, "main"),
    "huggingface.co/org/Repo-GGUF:IQ3_M": (None, "IQ3_M", "main"),
    "https://hf.co/org/Repo-GGUF": (None, USUAL, "main"),
    "https://huggingface.co/org/Repo-GGUF": (None, USUAL, "main"),
    "https://huggingface.co/org/Repo-GGUF/": (None, USUAL, "main"),
    "https://HuggingFace.co/org/Repo-GGUF#files": (None, USUAL, "main"),
    "https://huggingface.co/org/Repo-GGUF?library=gguf": (None, USUAL, "main"),
    "https://www.huggingface.co/org/Repo-GGUF:Q4_0": (None, "Q4_0", "main"),
    "https://huggingface.co/org/Repo-GGUF/tree/main": (None, USUAL, "main"),
    "https://huggingface.co/org/Repo-GGUF/tree/v2": (None, USUAL, "v2"),
    "https://huggingface.co/org/Repo-GGUF/tree/main/UD-Q4_K_XL": (None, "UD-Q4_K_XL", "main"),
    f"https://huggingface.co/org/Repo-GGUF/blob/main/{FILE}": (FILE, None, "main"),
    f"https://huggingface.co/org/Repo-GGUF/blob/main/{PART}": (PART, None, "main"),
    f"https://huggingface.co/org/Repo-GGUF/raw/main/{FILE}": (FILE, None, "main"),
    f"https://huggingface.co/org/Repo-GGUF/resolve/main/{FILE}?download=true": (
        FILE,
        None,
        "main",
    ),
    f"https://huggingface.co/org/Repo-GGUF/blob/refs%2Fpr%2F1/{FILE}": (
        FILE,
        None,
        "refs/pr/1",
    ),
    f"https://huggingface.co/org/Repo-GGUF/resolve/refs/pr/1/{FILE}": (
        FILE,
        None,
        "refs/pr/1",
    ),
    f"https://huggingface.co/org/Repo-GGUF?show_file_info={FILE}": (FILE, None, "main"),
    f"https://hf-mirror.com/org/Repo-GGUF/blob/main/{FILE}": (FILE, None, "main"),
    f"hf:https://huggingface.co/org/Repo-GGUF/blob/main/{FILE}": (FILE, None, "main"),
    f"huggingface.co/org/Repo-GGUF/blob/main/{FILE}": (FILE, None, "main"),
    " org/Repo-GGUF:Q4_0 ": (None, "Q4_0", "main"),
}


@pytest.mark.parametrize("text", ON_THE_HUB)
def test_names_of_files_and_repos_of_the_hub(text: str) -> None:
    file, tag, revision = ON_THE_HUB[text]
    spec = catalog.parse(text)
    assert spec.source == catalog.HUB
    assert spec.repo == "org/Repo-GGUF"
    assert spec.file == file
    assert spec.revision == revision
    assert spec.takes_usual == (tag == USUAL)
    assert spec.quantization == (None if tag == USUAL else tag)


REPOS = """
unsloth/Qwen3-30B-A3B-GGUF
bartowski/Llama-3.2-3B-Instruct-GGUF
lmstudio-community/gemma-3-27b-it-GGUF
TheBloke/Llama-2-7B-Chat-GGUF
ggml-org/gpt-oss-20b-GGUF
Qwen/Qwen2.5-7B-Instruct-GGUF
mradermacher/Model-v1.0-i1-GGUF
microsoft/bitnet-b1.58-2B-4T-gguf
ibm-granite/granite-4.0-h-tiny-GGUF
LiquidAI/LFM2-1.2B-GGUF
HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF
nvidia/Nemotron-3-Nano-GGUF
01-ai/Yi-34B_GGUF
a/b
"""


@pytest.mark.parametrize("repo", REPOS.split())
def test_repos_have_all_their_letters(repo: str) -> None:
    for text in (f"hf:{repo}:Q4_K_M", repo, f"hf.co/{repo}", f"https://huggingface.co/{repo}"):
        spec = catalog.parse(text)
        assert spec.repo == repo
        assert spec.name == repo.rpartition("/")[2]


def test_a_hub_of_ones_own_has_addresses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example:8080")
    spec = catalog.parse(f"http://hub.example:8080/org/repo/blob/main/{FILE}")
    assert (spec.repo, spec.file) == ("org/repo", FILE)


def test_what_lies_in_this_folder_goes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "org" / "repo" / FILE).write_bytes(b"GGUF")
    assert catalog.parse(f"org/repo/{FILE}").source == catalog.FILE
    assert catalog.parse("org/repo").source == catalog.FILE
    with pytest.raises(LabError, match="hf:org/other"):
        catalog.parse("org/other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match="empty is a folder"):
        catalog.parse("empty")
    (tmp_path / "llama-3.2-3b").mkdir()
    assert catalog.parse("llama-3.2-3b").entry == catalog.find("llama-3.2-3b")


def test_a_file_that_is_not_there_names_what_can_be_predicted(tmp_path: Path) -> None:
    """What is printed as a command is quoted, as a path with blanks must be."""
    for name, words in (
        ("Llama-3.2-3B-Instruct-Q4_K_M", "--model Llama-3.2-3B-Instruct-Q4_K_M"),
        ("Llama 3.2 3B Q4_K_M", "--model 'Llama 3.2 3B Q4_K_M'"),
        ("nobody-knows-it", "Check the path"),
    ):
        with pytest.raises(LabError, match="There is no model file") as problem:
            catalog.parse(str(tmp_path / f"{name}.gguf"))
        assert words in problem.value.hint
