"""What a header says of single layers: their heads, and which look back only through a sliding window.

Most models have one number for all layers; some have a list. Which layers have a window is often not in the file but
in llama.cpp's code for the architecture; so it is here too (llama.cpp 0c1e570, src/models, load_arch_hparams).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DENSE_FIRST = ("cohere2moe", "laguna", "smallthinker")
"""Of each period the first layer sees everything; elsewhere the last one does."""

PERIODS = {
    # Layers in a period; one of them sees everything.
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": 4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gpt-oss": 2,
    "laguna": 4,
    "mellum": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": 4,
}
WINDOWS = {"gemma2": 4096, "exaone-moe": 128, "smallthinker": 4096}
"""The window where the file does not say."""

UNCOUNTED = {"llama4": "it attends in chunks"}

NO_WINDOW = ("phi3",)
"""llama.cpp ignores these files' windows."""

MOST_HEADS = 10_000
"""Far above any model there is."""

SINGLE = {
    # A key that may be in a header: what it means that the lab does not count.
    "attention.key_length_mla": "its keys and values are compressed (MLA)",
    "attention.shared_kv_layers": "some of its layers share a cache",
    "attention.key_length_swa": "its layers with a window have heads of another width",
    "ssm.state_size": "some of its layers are recurrent",
    "wkv.head_size": "its layers are recurrent",
    "shortconv.l_cache": "some of its layers are convolutions",
    "kda.head_dim": "some of its layers are recurrent",
}


@dataclass(frozen=True)
class Layers:
    """Heads and windows; the lists are None where all layers are alike, n_head and n_head_kv where they are not."""

    n_head: int | None
    n_head_kv: int | None
    heads: tuple[int, ...] | None
    heads_kv: tuple[int, ...] | None
    windows: tuple[int, ...] | None
    uncounted: str | None


def read_layers(
    arch: str | None,
    n_layer: int | None,
    number: Callable[[str], int | None],
    numbers: Callable[[str], tuple[int, ...] | None],
) -> Layers:
    """What `number` and `numbers` (a key's value, a key's list) tell of the layers."""

    def alike(key: str) -> tuple[int | None, tuple[int, ...] | None]:
        listed = numbers(key)
        if listed is None:
            return number(key), None
        listed = listed[: n_layer or 0]
        if not listed or not 0 <= min(listed) <= max(listed) <= MOST_HEADS:
            return None, None
        return (listed[0], None) if len(set(listed)) == 1 else (None, listed)

    n_head, heads = alike(f"{arch}.attention.head_count")
    n_head_kv, heads_kv = alike(f"{arch}.attention.head_count_kv")
    if n_head_kv is None and heads_kv is None:
        n_head_kv, heads_kv = n_head, heads
    windows, problem = _windows(arch, n_layer, number, numbers)
    problem = problem or UNCOUNTED.get(arch or "")
    for key, meaning in SINGLE.items():
        problem = problem or (meaning if number(f"{arch}.{key}") else None)
    return Layers(n_head, n_head_kv, heads, heads_kv, windows, problem)


def _windows(
    arch: str | None,
    n_layer: int | None,
    number: Callable[[str], int | None],
    numbers: Callable[[str], tuple[int, ...] | None],
) -> tuple[tuple[int, ...] | None, str | None]:
    """The window of each layer (None: all see everything), and why it cannot be told."""
    window = number(f"{arch}.attention.sliding_window") or WINDOWS.get(arch or "")
    if arch == "exaone4":
        window = 4096 if n_layer == 64 else None
    if not window or not n_layer or arch in NO_WINDOW:
        return None, None
    pattern = numbers(f"{arch}.attention.sliding_window_pattern")
    if pattern is None:
        if arch not in PERIODS:  # llama.cpp reads the window of no other architecture without a list
            return None, None
        period = number(f"{arch}.attention.sliding_window_pattern") or PERIODS[arch]
        full = 0 if arch in DENSE_FIRST else period - 1
        pattern = tuple(int(layer % period != full) for layer in range(n_layer))
    if len(pattern) < n_layer:
        return None, "its list of windows is shorter than its list of layers"
    return tuple(window if windowed else 0 for windowed in pattern[:n_layer]), None
