"""A file that is no model is named for what it is, with the one thing to do; models pass."""

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from lab.engine import refusals
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from tests.support.command import run_lab

VERSION = b"GGUF" + struct.pack("<I", 3)
TABLE = b"token_embd.weight"
PAGE = b'<!doctype html>\n<html class="">\n<head><title>model.gguf</title>'
STARTS = {
    "pointer.gguf": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4108917312\n",
        "git-lfs pointer.*of 4,109 MB",
        "git lfs pull",
    ),
    "old-pointer.gguf": (b"version https://hawser.github.com/spec/v1\noid", "pointer", "lfs"),
    "page.gguf": (PAGE, "saved web page", "/resolve/ instead of /blob/"),
    "page with blanks.gguf": (b"\r\n\r\n  <!DOCTYPE html>", "saved web page", "/resolve/"),
    "page with mark.gguf": (b"\xef\xbb\xbf<html>", "saved web page", "/resolve/"),
    "denied.gguf": (b'<?xml version="1.0"?><Error><Code>AccessDenied', "XML text", "pull"),
    "error.gguf": (b'{"error":"Repository not found"}', "JSON text", "pull"),
    "index.gguf": (b'{\n  "metadata": {\n "total_size": 1', "JSON text", "pull"),
    "entry.gguf": (b"Entry not found", "begins 'Entry not found'", "pull"),
    "login.gguf": (b"Invalid username or password.", "begins 'Invalid username", "pull"),
    "latest": (b'{"schemaVersion":2,"mediaType":"application/vnd', "manifest", "ollama:NAME"),
    "model.safetensors": (
        struct.pack("<Q", 12_345) + b'{"__metadata__":',
        "safetensors",
        "convert_hf_to_gguf",
    ),
    "pytorch_model.bin": (b"PK\x03\x04\x00\x00\x08\x08", "ZIP archive", "convert_hf_to_gguf"),
    "consolidated.00.pth": (b"\x80\x02}q\x00(X\x05", "PyTorch", "convert_hf_to_gguf"),
    "tf_model.h5": (b"\x89HDF\r\n\x1a\n", "HDF5", "GGUF"),
    "model.onnx": (b"\x08\x07\x12\x07pytorch", "ONNX", "GGUF"),
    "old.bin": (b"tjgg\x03\x00\x00\x00", "before GGUF", "GGUF"),
    "older.bin": (b"lmgg\x00\x00\x00\x00", "before GGUF", "GGUF"),
    "model.gguf.gz": (b"\x1f\x8b\x08\x00", "compressed", "Unpack"),
    "model.gguf.zst": (b"\x28\xb5\x2f\xfd\x04", "compressed", "Unpack"),
    "model.tar": (b"model.gguf" + b"\0" * 247 + b"ustar", "archive", "Unpack"),
    "imatrix.dat": (
        struct.pack("<II", 210, 19) + b"blk.0.attn_q.weight",
        "importance matrix",
        "model's own file",
    ),
    "hole.gguf": (b"\0" * 4096, "holds zeros", "again"),
    "empty.gguf": (b"", "is empty", "again"),
    "begun.gguf": (b"GGUF\x03", "truncated", "again"),
    "model.gguf-split-b": (bytes(range(7, 99)), "not a GGUF file", "join all pieces"),
    "model.gguf.part2of3": (bytes(range(7, 99)), "not a GGUF file", "join all pieces"),
    "noise.gguf": (bytes(range(7, 99)), "not a GGUF file", "llama.cpp's format"),
    "big.gguf": (
        b"GGUF" + struct.pack(">IQQ", 3, 290, 24) + bytes(99),
        "big-endian",
        "gguf-convert-endian",
    ),
}


def refusal(worker: Worker, path: Path) -> LabError:
    with pytest.raises(LabError) as refused:
        worker.read_model(path, path.stem, "file")
    return refused.value


@pytest.mark.parametrize("name", STARTS)
def test_a_file_that_does_not_begin_like_a_model(
    name: str, tmp_path: Path, worker: Worker
) -> None:
    content, what, hint = STARTS[name]
    path = tmp_path / name
    path.write_bytes(content)
    problem = refusal(worker, path)
    assert problem.what.startswith(name)
    assert re.search(what, problem.what)
    assert hint in problem.hint


def test_the_commands_say_it_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(PAGE)
    for command in (
        ("models", "info", path),
        ("measure", "-m", path),
        ("predict", "-m", path),
    ):
        status, out, err = run_lab(*command)
        assert status == 1
        assert out == ""
        assert "model.gguf is not a GGUF file: it is a saved web page." in err


def with_type(good: bytes, number: int) -> bytes:
    """The file with another type of its first tensor."""
    start = good.index(TABLE) + len(TABLE) + 4 + 16
    return good[:start] + struct.pack("<I", number) + good[start + 4 :]


@pytest.mark.parametrize(
    ("number", "what", "hint"),
    [
        (45, "type 45, which this llama.cpp does not have", "newer llama.cpp"),
        (137, "type 137", "common quantization"),  # of ik_llama.cpp
        (339, "type 339", "common quantization"),
        (31, "TYPE_Q4_0_4_4, which llama.cpp no longer reads", "Q4_0"),
        (4, "no longer reads", "newer file"),
        (2**31 - 1, "broken", "again"),
    ],
)
def test_types_of_tensors_that_this_build_lacks(
    number: int, what: str, hint: str, mini: Path, tmp_path: Path, worker: Worker
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_type(mini.read_bytes(), number))
    problem = refusal(worker, path)
    assert what in problem.what
    assert hint in problem.hint


@pytest.mark.parametrize(("version", "what"), [(1, "no longer reads"), (4, "up to version 3")])
def test_other_versions_of_gguf(
    version: int, what: str, mini: Path, tmp_path: Path, worker: Worker
) -> None:
    path = tmp_path / "m.gguf"
    content = mini.read_bytes().replace(VERSION, b"GGUF" + struct.pack("<I", version), 1)
    path.write_bytes(content)
    assert what in refusal(worker, path).what


@pytest.mark.parametrize(
    ("arch", "kind", "tensor", "what"),
    [
        ("clip", "mmproj", "v.blk.0.attn_k.weight", "projector"),
        ("clip", None, "v.blk.0.attn_k.weight", "projector"),
        ("llama", "adapter", "blk.0.attn_k.weight.lora_a", "LoRA adapter"),
        ("llama", None, "blk.0.attn_k.weight.lora_a", "LoRA adapter"),
        ("imatrix", "imatrix", "blk.0.attn_k.weight.in_sum2", "importance matrix"),
        ("controlvector", None, "direction.1", "control vector"),
        ("flux", "model", "double_blocks.0.img_attn.qkv.weight", "makes images"),
        ("sd1", None, "time_embed.0.weight", "makes images"),
        ("llama", "model", "token_embd.weight", "lacks llama.block_count"),
        ("", None, "token_embd.weight", "lacks general.architecture"),
    ],
)
def test_a_gguf_file_of_something_else(
    arch: str, kind: str | None, tensor: str, what: str, tmp_path: Path, worker: Worker
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, arch)
    if kind:
        writer.add_type(kind)
    writer.add_tensor(tensor, np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    problem = refusal(worker, path)
    assert what in problem.what
    assert "again" not in problem.hint


def test_models_of_all_architectures_pass(tmp_path: Path) -> None:
    names = set(gguf.MODEL_ARCH_NAMES.values()) - {"clip", "mmproj"}
    assert len(names) > 100
    for arch in names:
        for kind in (None, "model", "base", ""):
            assert refusals.of_kind(tmp_path, kind, arch, ["token_embd.weight"]) is None, arch


@pytest.mark.parametrize(
    ("old", "new", "what", "hint"),
    [
        (
            b"llama",
            b"lloma",
            "unknown model architecture: 'lloma'",
            "newer one (--lib FOLDER)",
        ),
        (b".context_length", b".context_lengtx", "not found in model", "lacks a value"),
        (b"head_count", b"head_cownt", "wrong shape", "expects"),
        (b"output_norm.w", b"output_norx.w", "'output_norm.weight' not found", "expects"),
    ],
)
def test_a_complete_file_that_llama_cpp_does_not_load(
    old: bytes, new: bytes, what: str, hint: str, mini: Path, tmp_path: Path, worker: Worker
) -> None:
    settings = make_plan(worker, "8", 2, 1, str(mini), prompt="random", threads=1).settings
    path = tmp_path / "m.gguf"
    path.write_bytes(mini.read_bytes().replace(old, new))
    with pytest.raises(LabError) as refused:
        worker.load(path, settings)
    assert what in refused.value.what
    assert "failed to load model" not in refused.value.what
    assert hint in refused.value.hint
    assert "again" not in refused.value.hint
    path.unlink()
    with pytest.raises(LabError, match="No such file") as refused:
        worker.load(path, settings)
    assert "deleted meanwhile" in refused.value.hint
    assert "is not there" in refusal(worker, path).what
