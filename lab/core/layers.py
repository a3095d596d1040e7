"""What the header of a model's file, and llama.cpp's code, tell about the model's layers.

Most models have one number of heads for all layers; some have a list. What is not in the file is
in `layers` of models/architectures.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from lab.core.files import data_file
from lab.core.record import Model

DELTA_FLOPS = 7
"""FLOPs of a gated delta net for each value of its state and each token.

Decay 1, reading for the key 2, update 2, reading for the query 2 (Yang et al., "Gated delta
networks", 2024, equation 10).
"""

SCAN_FLOPS = 5
"""FLOPs of a state-space layer for each value of its state and each token.

Decay 1, adding the input 2, reading the output 2 (Dao and Gu, "Transformers are SSMs", 2024).
"""

RECURRENT = "some of its layers are recurrent"
SPARSE_KEYS = {
    # A key that may be in a header, and what it means that the lab does not count.
    "attention.indexer.head_count": (
        "it chooses the positions that it attends to (sparse attention)"
    ),
}
RECURRENT_KEYS = {"wkv.head_size": "its layers are recurrent"}
STATE_KEYS = {
    # A key of a layer with a state of fixed size, where the architecture is not known.
    "ssm.state_size": RECURRENT,
    "kda.head_dim": RECURRENT,
    "shortconv.l_cache": "some of its layers are convolutions",
}
MOST_HEADS = 10_000  # far above any model there is


class Header(Protocol):
    """The values of a header; None for a key that it lacks or that has another type."""

    def number(self, key: str) -> int | None: ...

    def numbers(self, key: str) -> tuple[int, ...] | None: ...


@cache
def architectures() -> dict[str, Any]:
    """The table of architectures."""
    return tomllib.loads(data_file("architectures.toml").read_text(encoding="utf-8"))


def code_of(arch: str | None) -> Mapping[str, Any]:
    """What llama.cpp's code adds to the headers of an architecture."""
    facts: dict[str, dict[str, Any]] = architectures()["layers"]
    return facts.get(arch or "", {})


def has_delta_nets(arch: str | None) -> bool:
    """Whether the recurrent layers of an architecture are gated delta nets."""
    return code_of(arch).get("recurrent") == "delta nets"


def reasons_without_cache() -> set[str]:
    """`Model.uncounted` of models that do not keep a key and a value of every position."""
    of_architectures = [facts.get("uncounted") for facts in architectures()["layers"].values()]
    return {*filter(None, of_architectures), *STATE_KEYS.values(), *RECURRENT_KEYS.values()}


def n_layers_run(header: Header, arch: str | None) -> int | None:
    """The layers that a step runs: without those that only draft (multi-token prediction)."""
    n_layer = header.number(f"{arch}.block_count")
    if n_layer is None:
        return None
    return max(0, n_layer - (header.number(f"{arch}.nextn_predict_layers") or 0))


def with_layers(model: Model, header: Header) -> Model:
    """A model with architecture and number of layers, and what its header tells about them."""
    reader = _LayerReader(header, model)
    reader.read_heads()
    reader.model = replace(reader.model, uncounted=reader.uncounted())
    if model.n_layer and model.arch:
        reader.read_windows()
        reader.read_caches()
        reader.read_states()
    return reader.model


@dataclass(frozen=True)
class _State:
    """The state of a recurrent layer: its F32 values, and the FLOPs of a token on it."""

    n_values: int
    flops: int


class _LayerReader:
    """Reads a header into the fields of a model, step by step."""

    def __init__(self, header: Header, model: Model) -> None:
        self.header = header
        self.model = model
        self.n_layer = model.n_layer or 0
        self.code = code_of(model.arch)

    def number(self, key: str) -> int | None:
        return self.header.number(f"{self.model.arch}.{key}")

    def numbers(self, key: str) -> tuple[int, ...] | None:
        return self.header.numbers(f"{self.model.arch}.{key}")

    def read_heads(self) -> None:
        n_head, heads = self.by_layer("attention.head_count")
        n_head_kv, heads_kv = self.by_layer("attention.head_count_kv")
        if n_head_kv is None and heads_kv is None:
            n_head_kv = n_head
            heads_kv = heads
        self.model = replace(
            self.model, n_head=n_head, heads=heads, n_head_kv=n_head_kv, heads_kv=heads_kv
        )

    def by_layer(self, key: str) -> tuple[int | None, tuple[int, ...] | None]:
        """The number of all layers, or if they differ the list."""
        listed = self.numbers(key)
        if listed is None:
            return self.number(key), None
        listed = listed[: self.n_layer]
        if not listed or min(listed) < 0 or max(listed) > MOST_HEADS:
            return None, None
        if len(set(listed)) == 1:
            return listed[0], None
        return None, listed

    def uncounted(self) -> str | None:
        """The first property of the model that the lab does not count, if any."""
        if "uncounted" in self.code:
            return str(self.code["uncounted"])
        for key, meaning in (SPARSE_KEYS | RECURRENT_KEYS).items():
            if self.number(key) or self.numbers(key):
                return meaning
        if self.numbers("expert_used_count"):
            return "its layers use different numbers of experts"
        return None

    def cannot_count(self, reason: str) -> None:
        self.model = replace(self.model, uncounted=self.model.uncounted or reason)

    def read_windows(self) -> None:
        """Windows, and where the layers with one have heads of another width, the widths."""
        window = self.window()
        pattern = self.window_pattern()
        if not window or pattern is None:
            return
        if len(pattern) < self.n_layer:
            self.cannot_count("its list of windows is shorter than its list of layers")
            return
        windows = tuple(window if has_window else 0 for has_window in pattern[: self.n_layer])
        is_chunked = self.code.get("is_chunked")
        self.model = replace(self.model, windows=windows, is_chunked=is_chunked)
        width = self.number("attention.key_length")
        windowed_width = self.number("attention.key_length_swa")
        if width and windowed_width and width != windowed_width:
            head_dims = tuple(windowed_width if window else width for window in windows)
            self.model = replace(self.model, head_dims=head_dims)

    def window(self) -> int | None:
        """The window of the layers that have one; None if no layer has one."""
        window: int | None = self.code.get("window")
        if "n_layer_with_windows" in self.code:  # then the file's window does not count
            return window if self.n_layer == self.code["n_layer_with_windows"] else None
        return self.number("attention.sliding_window") or window

    def window_pattern(self) -> tuple[int, ...] | None:
        """For each layer whether it has a window: by the file's list, or the architecture's period.

        None: llama.cpp reads the window of no other architecture.
        """
        pattern = self.numbers("attention.sliding_window_pattern")
        if pattern is not None or "period" not in self.code:
            return pattern
        period = self.number("attention.sliding_window_pattern") or self.code["period"]
        without_window = period - 1
        if self.code.get("first_sees_all"):
            without_window = 0
        return tuple(int(layer % period != without_window) for layer in range(self.n_layer))

    def read_caches(self) -> None:
        """Which layers have a cache, and whether keys hold the values (MLA)."""
        n_shared = self.number("attention.shared_kv_layers") or 0
        n_layer_kv = self.code.get("n_layer_kv", self.n_layer - n_shared)
        if n_layer_kv < self.n_layer:
            self.model = replace(self.model, n_layer_kv=max(0, n_layer_kv))
        has_latents = bool(self.number("attention.key_length_mla"))
        self.model = replace(self.model, values_in_keys=has_latents or None)

    def read_states(self) -> None:
        """The states of recurrent layers and convolutions."""
        if has_delta_nets(self.model.arch):
            self.read_hybrid_heads()
        state = self.state_of_layer()
        if state is None:
            for key, reason in STATE_KEYS.items():
                if self.number(key):
                    self.cannot_count(reason)
                    return
            return
        has_state = self.layers_with_state()
        if has_state is None:
            self.cannot_count(RECURRENT)
            return
        if not any(has_state):
            return
        states = tuple(state.n_values if is_recurrent else 0 for is_recurrent in has_state)
        flops = sum(has_state) * state.flops
        self.model = replace(self.model, n_state=sum(states), states=states, state_flops=flops)

    def read_hybrid_heads(self) -> None:
        """The heads of a hybrid with gated delta nets: layers without attention have none."""
        n_head = self.model.n_head
        n_head_kv = self.model.n_head_kv
        if not n_head or not n_head_kv or not self.number("ssm.time_step_rank"):
            return
        period = self.number("full_attention_interval") or 4
        attends = [layer % period == 0 for layer in range(1, self.n_layer + 1)]
        self.model = replace(
            self.model,
            n_head=None,
            n_head_kv=None,
            heads=tuple(n_head if has_heads else 0 for has_heads in attends),
            heads_kv=tuple(n_head_kv if has_heads else 0 for has_heads in attends),
        )

    def state_of_layer(self) -> _State | None:
        """The state of each recurrent layer (n_embd_r and n_embd_s of llama-hparams.cpp).

        None for a model without, and for one that the lab does not count. The products of a
        convolution are those of its weights, and counted with them.
        """
        n_kept = self.number("shortconv.l_cache")
        n_embd = self.number("embedding_length")
        if n_kept and n_embd:
            return _State((n_kept - 1) * n_embd, 0)
        n_conv = self.number("ssm.conv_kernel")
        width = self.number("kda.head_dim")
        if width and n_conv:
            n_head = self.model.n_head or max(self.model.heads or (0,))
            n_values = width * width * n_head
            return _State(3 * (n_conv - 1) * width * n_head + n_values, DELTA_FLOPS * n_values)
        size = self.number("ssm.state_size")
        kind = self.code.get("recurrent")
        if not size or not n_conv or kind is None:
            return None
        n_group = self.number("ssm.group_count") or 0
        if kind == "delta nets":
            inner = size * (self.number("ssm.time_step_rank") or 0) if n_group else 0
            flops = DELTA_FLOPS * size * inner
        else:
            inner = self.number("ssm.inner_size") or 0
            flops = SCAN_FLOPS * size * inner
        if not inner:
            return None
        return _State((n_conv - 1) * (inner + 2 * n_group * size) + size * inner, flops)

    def layers_with_state(self) -> list[bool] | None:
        """By layer whether it has a state; None where the header does not tell.

        In hybrids these are the layers without heads for keys and values (and, in some, without
        a feed-forward).
        """
        if self.code.get("recurrent") == "all layers":
            return [True] * self.n_layer
        heads_kv = self.model.heads_kv or (self.model.n_head_kv,) * self.n_layer
        if len(heads_kv) != self.n_layer or None in heads_kv:
            return None
        has_state = [n_head_kv == 0 for n_head_kv in heads_kv]
        _, widths = self.by_layer("feed_forward_length")
        if widths and self.code.get("feeds_forward_alone"):
            pairs = zip(has_state, widths, strict=True)
            has_state = [has_no_heads and not width for has_no_heads, width in pairs]
        return has_state
