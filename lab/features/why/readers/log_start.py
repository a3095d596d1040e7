"""What a log of llama.cpp says about its model and settings when it starts.

A log of several models or settings says a thing more than once; then it is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lab.formats import llama_bench_rows

FILE = re.compile(
    r"\b(?:loading model|loaded meta data with [^\n]{1,80} from) '?([^'\n]{1,400}?\.gguf)\b"
)
THREADS = re.compile(r"\b(?:threadpool init, |system_info: )n_threads = (\d{1,4})\b")
THREADS_BATCH = re.compile(r"\bsystem_info: [^\n]{0,40}\bn_threads_batch = (\d{1,4})\b")
BATCH = re.compile(r"\bn_batch {1,8}= (\d{1,6})\b")
UBATCH = re.compile(r"\bn_ubatch {1,8}= (\d{1,6})\b")
SLOTS = re.compile(r"\b(?:initializing, n_slots|initializing slots, n_slots) = (\d{1,4})\b")
FILE_TYPE = re.compile(r"\bfile type {1,8}= ([A-Z0-9_]{2,10})\b")
PARAMETERS = re.compile(r"\bmodel params {1,8}= ([\d.]{1,10} [KMBT])\b")


def fields_of(text: str) -> dict[str, Any]:
    """Fields of a Figure that the beginning of a log says, of llama-server or llama-cli."""
    fields: dict[str, Any] = {
        "model": model_name(text),
        "quantization": only(FILE_TYPE, text),
        "n_params": llama_bench_rows.params_of(only(PARAMETERS, text) or ""),
        "settings": settings_of(text),
    }
    if only(SLOTS, text) == "1":
        fields["n_streams"] = 1
    return {name: value for name, value in fields.items() if value}


def model_name(text: str) -> str | None:
    """The name of the model's file, without folders and the ending."""
    path = only(FILE, text)
    if path is None:
        return None
    return re.split(r"[/\\]", path)[-1].removesuffix(".gguf")


def settings_of(text: str) -> Mapping[str, Any]:
    """The settings that the log prints, by their keywords in AskedSettings."""
    patterns = {
        "threads": THREADS,
        "threads_batch": THREADS_BATCH,
        "batch": BATCH,
        "ubatch": UBATCH,
    }
    settings = dict[str, Any]()
    for name, pattern in patterns.items():
        value = only(pattern, text)
        if value is not None:
            settings[name] = int(value)
    return settings


def only(pattern: re.Pattern[str], text: str) -> str | None:
    """What the pattern finds in the text; None if it finds nothing, or different things."""
    matches = {match[1] for match in pattern.finditer(text)}
    return matches.pop() if len(matches) == 1 else None
