"""What a file is that llama.cpp cannot load as a model, and the one thing to do about it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path

from lab.core.files import GET_AGAIN
from lab.errors import LabError

HEAD_BYTES = 512  # of a file that are looked at
NEWEST_GGUF = 3
MOST_VERSIONS = 100  # a larger number is no version
MOST_TYPES = 1_000  # a larger number is no type of a tensor

GET_GGUF = "Get the model as a GGUF file."
DOWNLOAD = "Download the model's file itself: lab models pull hf:OWNER/REPO/FILE.gguf"
CONVERT = f"{GET_GGUF} llama.cpp's convert_hf_to_gguf.py makes one of a folder of such files."
UNPACK = "Unpack it, and give the .gguf file in it."
USE_NEWER = (
    "Use a newer llama.cpp (--lib FOLDER), or a file in a common quantization, such as Q4_K_M."
)

STARTS = (
    (
        rb"version https://(git-lfs|hawser)|# xet version",
        "is a git-lfs pointer, a small text in place of the model{size}",
        "Run git lfs pull in its folder, or download the file itself.",
    ),
    (
        rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|!--|script|meta)",
        "is a saved web page",
        "Download the file itself: on the hub, its address has /resolve/ instead of /blob/.",
    ),
    (rb"(\xef\xbb\xbf)?\s*<", "is an XML text, such as a server's error", DOWNLOAD),
    (
        rb'\s*\{[^{}]*"schemaVersion"',
        "is a manifest, which names the files of a model",
        "For a model of Ollama, give its name: -m ollama:NAME",
    ),
    (
        rb'(\xef\xbb\xbf)?\s*(\{\s*["}]|\[\s*["{\]])',
        "is a JSON text, such as a server's error or a model's configuration",
        DOWNLOAD,
    ),
    (rb".{8}\{", "is a safetensors file", CONVERT),
    (rb"PK\x03\x04", "is a ZIP archive, as PyTorch writes models", CONVERT),
    (rb"\x80[\x02-\x05]", "is a model of PyTorch (a pickle)", CONVERT),
    (rb"\x89HDF", "is an HDF5 file, as Keras writes models", GET_GGUF),
    (rb"\x08[\x03-\x0f]\x12", "is an ONNX model", GET_GGUF),
    (
        rb"\x1f\x8b|BZh\d|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!|.{257}ustar",
        "is compressed, or an archive",
        UNPACK,
    ),
    (
        rb"lmgg|fmgg|tjgg|algg",
        "is in the format that llama.cpp had before GGUF (GGML, 2023)",
        GET_GGUF,
    ),
    (
        rb".{8}(blk\.|output|token_embd)",
        "is an importance matrix, which a quantizer reads",
        "Give the model's own file.",
    ),
    (
        rb"\0{512}",
        "holds zeros where a header should be, as an unfinished download does",
        GET_AGAIN,
    ),
)
"""The beginning of a file, what it is then, and what to do."""

PIECE = re.compile(r"(?i)(split-?[a-z]{1,2}|part[-_.]?(\d+(-?of-?\d+)?|[a-z]{1,2})|\.\d{3})$")
"""The end of the name of a piece of a file that was cut anywhere, not by llama.cpp."""
JOIN = "It looks like a piece of a file: join all pieces first (cat PIECES > MODEL.gguf)."

KINDS = {
    "adapter": ("a LoRA adapter", "the model that it was made for"),
    "mmproj": ("a projector of images or sound", "the model beside it"),
    "clip": ("a projector of images or sound", "the model beside it"),
    "clip-vision": ("a projector of images or sound", "the model beside it"),
    "imatrix": ("an importance matrix, which a quantizer reads", "the model"),
    "controlvector": ("a control vector", "the model that it was made for"),
    "dataset": ("a data set", "a model"),
}
"""What a header's general.type, or architecture, says that is no model; and what to give."""

IMAGE_MODELS = re.compile(
    r"(sd\d|sdxl|flux|aura|hidream|lumina|wan|ltxv|hyvid|cosmos|qwen_image|pixart|chroma)\w*"
)
"""Architectures of models that make images or films."""

REASONS = (
    (
        r"key not found in model: (\S+)",
        "Its header lacks a value that llama.cpp needs, as some old or home-made converters "
        "leave it. Get a file of the model by another maker.",
    ),
    (
        r"un(known|supported) model architecture",
        "This llama.cpp does not know the model. Use a newer one (--lib FOLDER), or a file made "
        "for llama.cpp: other programs make files that only they read.",
    ),
    (
        r"unknown (pre-)?tokenizer|invalid ggml type|this GGUF file is version",
        USE_NEWER,
    ),
    (
        r"missing tensor|wrong number of tensors|has wrong shape|tensor '.*' not found",
        "Its tensors are not those that this llama.cpp expects. Use a newer llama.cpp "
        "(--lib FOLDER), or a file by another maker.",
    ),
    (
        r"(cannot find tokenizer|failed to find tokenizer)",
        "It was converted without its vocabulary. Get a file of the model by another maker.",
    ),
    (r"not within the file bounds|unexpectedly reached end|read error", GET_AGAIN),
    (
        r"allocate|out of memory|cudaMalloc|insufficient memory",
        "The memory is too small: keep layers on the CPU (--n-gpu-layers N), or use a smaller "
        "model.",
    ),
    (r"No such file", "It was deleted meanwhile. Check the path."),
    (r"Permission denied", "Check its permissions."),
)
"""llama.cpp's reasons, and what to do."""

UNINFORMATIVE = re.compile(r"failed to load model$|dummy tokens$")
PREFIX = re.compile(
    r"^(llama_model_load: )?(error loading model: )?(error loading \w+ \w+: )?"
)

ANOTHER = "Try another file of the model, or a newer llama.cpp (--lib FOLDER)."


def of_start(path: Path, head: bytes) -> LabError:
    """Why a file that does not begin with GGUF is no model."""
    if not head:
        return LabError(f"{path.name} is empty.", GET_AGAIN)
    for pattern, what, hint in STARTS:
        if re.match(pattern, head, re.IGNORECASE | re.DOTALL):
            size = re.search(rb"^size (\d+)", head, re.MULTILINE)
            of_size = f" of {int(size[1]) / 1e6:,.0f} MB" if size else ""
            found = what.format(size=of_size)
            return LabError(f"{path.name} is not a GGUF file: it {found}.", hint)
    hint = "Give a model in llama.cpp's format, GGUF."
    if PIECE.search(path.name):
        hint = JOIN
    line = head[:60].split(b"\n")[0]
    if line.isascii() and line.decode().strip().isprintable() and len(line) > 4:
        start = line.decode().strip()
        what = f"{path.name} is not a GGUF file: it is a text that begins {start!r}."
        return LabError(what, DOWNLOAD)
    what = f"{path.name} is not a GGUF file (it begins with {head[:4]!r})."
    return LabError(what, hint)


def of_header(path: Path, head: bytes, reason: str) -> LabError:
    """Why ggml does not read a file that begins with GGUF."""
    if len(head) < 24:
        return LabError(f"{path.name} is truncated: it has {len(head)} bytes.", GET_AGAIN)
    (version,) = struct.unpack_from("<I", head, 4)
    (swapped,) = struct.unpack_from(">I", head, 4)
    if 0 < swapped <= NEWEST_GGUF:
        what = f"{path.name} is a big-endian GGUF file, for machines such as IBM Z."
        return LabError(
            what, "Get the usual file, or convert it: gguf-convert-endian FILE little"
        )
    if version == 1:
        what = f"{path.name} is in GGUF version 1 (2023), which llama.cpp no longer reads."
        return LabError(what, "Get a newer file of the model.")
    if NEWEST_GGUF < version < MOST_VERSIONS:
        what = (
            f"{path.name} is in GGUF version {version}. This llama.cpp reads up to version 3."
        )
        return LabError(what, "Use a newer llama.cpp (--lib FOLDER).")
    unknown = re.search(r"tensor '(.*?)' has invalid ggml type (\d+)", reason)
    if unknown and int(unknown[2]) < MOST_TYPES:
        what = (
            f"{path.name} has tensors of type {unknown[2]}, which this llama.cpp does not have."
            " A newer llama.cpp, or another program (such as ik_llama.cpp), made it."
        )
        return LabError(what, USE_NEWER)
    removed = re.search(r"tensor '.*?' of type \d+ \((\S+) ", reason)
    if removed and "block size (0)" in reason:
        what = (
            f"{path.name} has tensors of type {removed[1]}, which llama.cpp no longer reads."
        )
        return LabError(what, "Get a newer file of the model, such as one in Q4_0.")
    return LabError(f"{path.name} is a broken GGUF file: {reason}", GET_AGAIN)


def of_kind(
    path: Path, kind: str | None, arch: str | None, tensors: Iterable[str]
) -> LabError | None:
    """Why a GGUF file holds something else than a model that writes text; None if it may be one."""
    if any(name.endswith(".lora_a") for name in tensors):
        kind = "adapter"
    found = KINDS.get(kind or "") or KINDS.get(arch or "")
    if found:
        what, wanted = found
        return LabError(f"{path.name} is {what}, not a model.", f"Give the file of {wanted}.")
    if arch is not None and IMAGE_MODELS.fullmatch(arch):
        what = (
            f"{path.name} is a model that makes images ({arch}), which llama.cpp does not run."
        )
        return LabError(what, "Use a model that generates text: lab models")
    return None


def of_reason(path: Path, reason: str) -> LabError:
    """Why llama.cpp does not load a file whose header was read."""
    hint = ANOTHER
    for pattern, what_to_do in REASONS:
        if re.search(pattern, reason, re.IGNORECASE):
            hint = what_to_do
            break
    lines = [line for line in reason.split("; ") if not UNINFORMATIVE.search(line)]
    cause = "; ".join(PREFIX.sub("", line) for line in lines) or reason
    return LabError(f"llama.cpp cannot load {path.name}: {cause}.", hint)
