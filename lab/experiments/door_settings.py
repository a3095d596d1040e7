"""The settings of both sides, as far as the server gives its own, and what parts of the way say in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.wording import digits
from lab.core.record import Record
from lab.core.request import NO, UNKNOWN, YES, RequestRecord
from lab.experiments.door_parts import ENGINE, OTHERWISE, TTFT, Phase, Row

HIDDEN = "threads, ubatch, flash attention and cache types"
"""Settings of the engine that no server gives."""

LEAST = 0.001
"""Of the whole: smaller parts are not named in sentences."""


@dataclass(frozen=True)
class Setting:
    """One setting on both sides; None where it is not known. `same`: yes, no or unknown."""

    name: str
    in_process: str | None
    server: str | None
    same: str


def settings(record: Record, request: RequestRecord) -> list[Setting]:
    """What can be held against each other, and what only the side in process gives."""
    own, model = record.settings, record.model
    theirs = request.endpoint.settings
    build = theirs.build if theirs else None
    commit = record.machine.llama_cpp_commit
    same_build = UNKNOWN if not build or not commit else YES if commit[:7] in build else NO
    slots = f"{theirs.n_slots}, each of {theirs.n_ctx:,} tokens" if theirs and theirs.n_slots and theirs.n_ctx else None
    threads = str(own.n_threads) + ("" if own.n_threads == own.n_threads_batch else f", prefill {own.n_threads_batch}")
    flash = own.flash_attn_resolved or own.flash_attn
    return [
        _held("file of the model", model.file.rpartition("/")[2], theirs.model_file if theirs else None),
        _held("quantization", model.quantization, theirs.quantization if theirs else None),
        Setting("llama.cpp", commit, build, same_build),
        Setting("slots", f"1, of {own.n_ctx:,} tokens", slots, UNKNOWN),
        *(
            Setting(name, value, None, UNKNOWN)
            for name, value in (
                ("threads", threads),
                ("ubatch", f"{own.n_ubatch:,}"),
                ("flash attention", flash),
                ("cache types", f"{own.type_k}, {own.type_v}"),
            )
        ),
    ]


def _held(name: str, own: str | None, theirs: str | None) -> Setting:
    same = UNKNOWN if own is None or theirs is None else YES if own.lower() == theirs.lower() else NO
    return Setting(name, own, theirs, same)


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the parts show, in words."""
    words = []
    for row in rows:
        for phase in row.phases:
            words.append(_difference(row, phase))
            words += [sentence for sentence in (_otherwise(phase), _hidden(phase)) if sentence]
    return words


def _difference(row: Row, phase: Phase) -> str:
    more_ms = phase.server_ms - phase.in_process_ms
    way = "slower" if more_ms >= 0 else "faster"
    what = f"to the first token of {row.n_prompt:,} prompt tokens" if phase.name == TTFT else "for each further token"
    named = sorted(
        (part for part in phase.parts if part.name != ENGINE and abs(part.ms) >= LEAST * phase.server_ms),
        key=lambda part: -abs(part.ms),
    )
    parts = [f"{part.name} {_signed(part.ms)}" for part in named] + [f"not explained {_signed(phase.unexplained_ms)}"]
    return (
        f"The server is {abs(more_ms) / phase.in_process_ms:.1%} {way} {what} ({digits(phase.server_ms)} instead of "
        f"{digits(phase.in_process_ms)} ms): in ms, {', '.join(parts)}."
    )


def _signed(ms: float) -> str:
    return f"{'-' if ms < 0 else '+'}{digits(abs(ms))}"


def _otherwise(phase: Phase) -> str | None:
    """Whether the engine in the server differs by more than engines in process do."""
    ms = phase.ms(OTHERWISE)
    if ms is None or abs(ms) < LEAST * phase.server_ms:
        return None
    share = abs(ms) / phase.in_process_ms
    if share <= phase.spread:
        return (
            f"{phase.name}: the engine in the server differs by {share:.1%}; engines in process differed as much from "
            f"block to block ({phase.spread:.1%}), so this may be its process, or the machine."
        )
    return (
        f"{phase.name}: the engine in the server differs by {share:.1%}, engines in process from block to block by "
        f"{phase.spread:.1%}: compare its {HIDDEN}, which it does not say, with those above."
    )


def _hidden(phase: Phase) -> str | None:
    if not phase.hidden:
        return None
    return (
        f"{phase.name}: {', '.join(phase.hidden)} cannot be measured on this server, and lie in what is not explained."
    )
