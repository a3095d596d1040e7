"""The models of a repo's listing, as repos of 2023 to 2026 have them, and what tags name."""

import pytest

from lab.models.candidates import (
    Candidate,
    ListedFile,
    candidates,
    helper_kind,
    tag_in,
    tagged,
    usual,
)
from tests.support.loopback_hub import VISION_REPO

TAGS = {
    "Llama-3.2-3B-Instruct-Q4_K_M.gguf": "Q4_K_M",
    "Llama-3.2-3B-Instruct-Q4_K_L.gguf": "Q4_K_L",
    "Llama-3.2-3B-Instruct-Q4_K_M_L.gguf": "Q4_K_M_L",
    "Llama-3.2-3B-Instruct-Q4_0_4_8.gguf": "Q4_0_4_8",
    "Llama-3.2-3B-Instruct-IQ3_XXS.gguf": "IQ3_XXS",
    "Llama-3.2-3B-Instruct-f16.gguf": "F16",
    "llama-2-7b-chat.Q4_K_M.gguf": "Q4_K_M",
    "llama-2-13b.ggmlv3.q4_0.gguf": "Q4_0",
    "tinyllama-1.1b-chat-v1.0.Q8_0.gguf": "Q8_0",
    "Phi-3-mini-4k-instruct-q4.gguf": "Q4",
    "Phi-3-mini-4k-instruct-fp16.gguf": "FP16",
    "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf": "Q4_K_M",
    "qwen2-7b-instruct-q5_0.gguf": "Q5_0",
    "Qwen3-30B-A3B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    "Qwen3-30B-A3B-Q4_1.gguf": "Q4_1",
    "UD-Q4_K_XL/Qwen3-235B-A22B-UD-Q4_K_XL-00001-of-00003.gguf": "UD-Q4_K_XL",
    "UD-Q2_K_XL/x-00002-of-00003.gguf": "UD-Q2_K_XL",
    "BF16/Qwen3-235B-A22B-BF16-00004-of-00010.gguf": "BF16",
    "Q4_K_M/model.gguf": "Q4_K_M",
    "Qwen3-Coder-Next-UD-TQ1_0.gguf": "UD-TQ1_0",
    "gpt-oss-20b-mxfp4.gguf": "MXFP4",
    "gpt-oss-120b-mxfp4-00001-of-00003.gguf": "MXFP4",
    "GLM-4.7-Flash-MXFP4_MOE.gguf": "MXFP4_MOE",
    "Nemotron-3-Nano-NVFP4.gguf": "NVFP4",
    "gemma-3-4b-it-q4_0.gguf": "Q4_0",
    "gemma-3-4b-it-qat-Q4_0.gguf": "Q4_0",
    "google_gemma-3-4b-it-bf16.gguf": "BF16",
    "Model.i1-IQ2_M.gguf": "IQ2_M",
    "Model-v2.1.Q6_K.gguf": "Q6_K",
    "Model-Q4_K_M-imat.gguf": "Q4_K_M",
    "Model.f16.q6_k.gguf": "Q6_K",
    "IQ4_KSS/GLM-4.6-IQ4_KSS-00001-of-00006.gguf": "IQ4_KSS",
    "smol-IQ2_KS/Kimi-K2-smol-IQ2_KS-00001-of-00007.gguf": "IQ2_KS",
    "DeepSeek-R1-Q4_K_R4.gguf": "Q4_K_R4",
    "ggml-model-i2_s.gguf": "I2_S",
    "ggml-model-f32.gguf": "F32",
    "model_q4_k_m.gguf": "Q4_K_M",
    "bitnet-b1.58-TQ2_0.gguf": "TQ2_0",
    "stories15M-q8_0.gguf": "Q8_0",
    "QwQ-32B.gguf": None,
    "model.gguf": None,
    "T5-small.gguf": None,
    "qwen3-q-and-a.gguf": None,
}


@pytest.mark.parametrize("name", TAGS)
def test_the_tag_of_a_files_name(name: str) -> None:
    assert tag_in(name) == TAGS[name]
    assert helper_kind(name) is None
    assert [model.tag for model in candidates([ListedFile(name)])] == [TAGS[name]]


HELPERS = {
    "mmproj-model-f16.gguf": "projector",
    "mmproj-BF16.gguf": "projector",
    "mmproj.gguf": "projector",
    "llava-phi-3-8b-mmproj-f16.gguf": "projector",
    "Qwen2.5-VL-7B-Instruct.mmproj-Q8_0.gguf": "projector",
    "mmproj/model-f16.gguf": "projector",
    "clip-vit-l14-336-f16.gguf": "projector",
    "imatrix-Q4_K_M.gguf": "importance matrix",
    "imatrix_unsloth.gguf": "importance matrix",
    "Model.imatrix.gguf": "importance matrix",
    "mtp-Qwen3.6-27B-Q8_0.gguf": "drafter",
    "MTP/Qwen3.6-27B-Q8_0.gguf": "drafter",
    "eagle3-llama-8b-Q8_0.gguf": "drafter",
    "Qwen2.5-0.5B-draft-Q8_0.gguf": "drafter",
    "draft/model-Q8_0.gguf": "drafter",
    "adapter-F16.gguf": "adapter",
    "my-lora-f16.gguf": "adapter",
    "ggml-adapter-model.gguf": "adapter",
}


@pytest.mark.parametrize("name", HELPERS)
def test_what_is_no_model_of_its_own(name: str) -> None:
    assert helper_kind(name) == HELPERS[name]
    listing = [ListedFile("model-Q4_K_S.gguf"), ListedFile(name)]
    assert [model.name for model in candidates(listing)] == ["model-Q4_K_S.gguf"]


MODELS_WITH_SUCH_NAMES = [
    "Qwen3.6-27B-MTP-Q4_K_M.gguf",
    "explorative-7b-Q4_K_M.gguf",
    "llama-lora-merged-Q4_K_M.gguf",
    "Clipper-8B-Q4_K_M.gguf",
    "draftsman-7b-Q4_K_M.gguf",
    "imatrix/Model-Q4_K_M.gguf",
    "FLORA-7B-Q4_K_M.gguf",
    "Eagle-7B.Q4_K_M.gguf",
    "prompt-mtpx-Q4_K_M.gguf",
]


@pytest.mark.parametrize("name", MODELS_WITH_SUCH_NAMES)
def test_models_whose_names_look_like_helpers(name: str) -> None:
    assert [model.name for model in candidates([ListedFile(name)])] == [name]


def named(tag: str) -> list[str]:
    return [model.name for model in tagged(candidates(VISION_REPO), tag)]


def test_a_tag_names_the_model_of_a_realistic_listing() -> None:
    stem = "Pixie-VL-30B-A3B"
    assert named("Q4_K_M") == [f"{stem}-Q4_K_M.gguf"]
    assert named("q4_k_m") == [f"{stem}-Q4_K_M.gguf"]
    assert named("Q4_K") == [f"{stem}-Q4_K_M.gguf"]
    assert named("Q4_K_L") == [f"{stem}-Q4_K_L.gguf"]
    assert named("UD-Q4_K_M") == [f"{stem}-UD-Q4_K_M.gguf"]
    assert named("Q8_0") == [f"{stem}-Q8_0.gguf"]
    assert named("F16") == []
    assert named("Q4_0") == []
    assert named("Q5_K_M") == []
    assert named("UD-Q4_K_XL") == ["UD-Q4_K_XL/x-00001-of-00003.gguf"]
    (in_parts,) = tagged(candidates(VISION_REPO), "BF16")
    assert in_parts.name == f"BF16/{stem}-BF16-00001-of-00002.gguf"
    assert in_parts.n_parts == 2
    assert in_parts.n_bytes == 2_000_000
    assert in_parts.missing == ()
    assert [model.name for model in usual(candidates(VISION_REPO))] == [f"{stem}-Q4_K_M.gguf"]


def test_a_part_that_a_repo_lacks_is_named() -> None:
    (model,) = candidates([ListedFile("a-00001-of-00003.gguf", 5), ListedFile("README.md", 5)])
    assert model.missing == ("a-00002-of-00003.gguf", "a-00003-of-00003.gguf")
    assert model.n_bytes is None
    (later,) = candidates([ListedFile("a-00002-of-00003.gguf", 5)])
    assert later.name == "a-00001-of-00003.gguf"
    assert later.missing[0] == later.name


def usual_of(*names: str) -> list[str]:
    return [model.name for model in usual(candidates(ListedFile(name) for name in names))]


def test_a_repo_without_a_tag_means_what_it_means_to_llama_cpp() -> None:
    assert usual_of("a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf") == ["a-Q4_K_M.gguf"]
    assert usual_of("a-F16.gguf", "a-Q8_0.gguf", "mmproj-Q4_K_M.gguf") == ["a-Q8_0.gguf"]
    assert usual_of("a-Q5_0.gguf", "a-F16.gguf") == ["a-F16.gguf"]
    assert usual_of("README.md") == []


def test_two_models_of_a_tag_are_both_named() -> None:
    models = candidates([ListedFile("a-Q4_0.gguf", 1), ListedFile("b-Q4_0.gguf", 2)])
    assert tagged(models, "Q4_0") == [
        Candidate((ListedFile("a-Q4_0.gguf", 1),)),
        Candidate((ListedFile("b-Q4_0.gguf", 2),)),
    ]
    assert [model.name for model in tagged(models, "b")] == ["b-Q4_0.gguf"]
