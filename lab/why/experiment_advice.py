"""What the lab's experiments are predicted to gain on this machine: batch, prefix and speculate, each with its command.

All three rest on steps that the explained runs did not have: one token of each of several sequences, the rest of a
prompt, several positions of one sequence. Their times are predicted from the kernels' ceilings and from the explained
runs themselves (step_prediction.py). What is not predicted to gain is not named, and nothing is where a kernel that it
needs has no ceiling.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import guesses, memory
from lab.core.record import Ceilings, Record
from lab.models import catalog
from lab.runner import machine
from lab.runner.as_options import options
from lab.why.advice import LEAST_GAIN
from lab.why.roofline import Explained
from lab.why.step_prediction import StepPrediction, taught_by

SEQUENCES = (2, 4, 8, 16)
SUFFIX = 64
"""Tokens after the prefix, at most: what `lab prefix` has by default."""

DRAFT_LENGTHS = range(1, 9)
NOT_OF_SPECULATE = (("--kv-unified", "on"), ("--prompt", "random"))
"""It has one sequence only, and random tokens cannot be guessed: it takes the lab's texts instead."""

ACCEPTANCE = 0.8
"""The share of right guesses for which a speed-up is named."""


@dataclass(frozen=True)
class BatchLever:
    """n_seq sequences decoded together: tokens per second in all, and of each, over those of one alone."""

    n_seq: int
    total_gain: float
    user_share: float
    n_prompt: int
    n_gen: int
    command: str
    experiment: str = "batch"


@dataclass(frozen=True)
class PrefixLever:
    """The first n_prefix tokens of a prompt cached: seconds to the first token without that, and how many it saves.

    The saving is the prefix's share of the measured prefill, less what a copy takes at the memory's best rate.
    """

    n_prefix: int
    n_suffix: int
    ttft_s: float
    saved_s: float
    gain: float
    command: str
    experiment: str = "prefix"


@dataclass(frozen=True)
class SpeculationLever:
    """Tokens guessed ahead, and verified in one step; the guessing itself is taken to cost nothing.

    It pays from the share `least_acceptance` of right guesses on, with `n_draft` guessed ahead; there is no draft
    length for which less is enough. With the share `acceptance` the best is `best_n_draft`, and the speed-up `gain`.
    """

    n_draft: int
    least_acceptance: float
    acceptance: float
    best_n_draft: int
    gain: float
    n_prompt: int
    n_gen: int
    command: str
    experiment: str = "speculate"


ExperimentLever = BatchLever | PrefixLever | SpeculationLever


def levers(rows: Sequence[Explained], records: Sequence[Record], ceilings: Ceilings) -> list[ExperimentLever]:
    """Those that are predicted to gain, for one setup's explained rows and the records that they explain."""
    plain = [record for record in records if record.run.lever is None]
    if not plain:
        return []
    prediction = taught_by(plain, plain[0], ceilings)
    tried = [lever(rows, plain[0], prediction) for lever in (_batch, _prefix, _speculation)]
    return [lever for lever in tried if lever]


def _batch(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> BatchLever | None:
    """The largest of SEQUENCES that pays: in all LEAST_GAIN times as many tokens per second as any smaller number."""
    row = _shortest_decode(rows)
    if row is None:
        return None
    n_past = _middle(row)
    one_s, n_best, best = prediction.seconds(1, n_past, 1), 1, 1.0
    for n in (n for n in SEQUENCES if n <= record.settings.n_batch and _fits(record, n, row.n_prompt + row.n_gen)):
        step_s = prediction.seconds(1, n_past, n, [(1, n_past)] * (n - 1))
        if one_s is not None and step_s is not None and n * one_s / step_s >= LEAST_GAIN * best:
            n_best, best = n, n * one_s / step_s
    if n_best == 1:
        return None
    sizes = {"--sequences": f"1,{n_best}", "--prompt-len": row.n_prompt, "--gen": row.n_gen}
    return BatchLever(n_best, best, best / n_best, row.n_prompt, row.n_gen, _command("batch", sizes, record))


def _prefix(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> PrefixLever | None:
    """Of the longest prompt within what the model was trained for: that much `lab prefix` takes."""
    trained = record.model.n_ctx_train
    known = [row for row in rows if row.phase == "prefill" and (trained is None or row.n_prompt < trained)]
    row = max(known, key=lambda row: row.n_prompt, default=None)
    if row is None or row.n_prompt < 2 or _forgets(record):
        return None
    n_suffix = max(1, min(SUFFIX, row.n_prompt // 4))
    n_prefix = row.n_prompt - n_suffix
    prefix_s, suffix_s = prediction.prefill(n_prefix, 0, 0), prediction.prefill(n_suffix, n_prefix)
    moved_s = prediction.move(n_prefix)
    if prefix_s is None or suffix_s is None or moved_s is None:
        return None
    saved_s = row.measured_s * prefix_s / (prefix_s + suffix_s) - moved_s
    gain = row.measured_s / (row.measured_s - saved_s)
    if gain < LEAST_GAIN:
        return None
    sizes = {"--prefix-len": n_prefix, "--suffix-len": n_suffix}
    return PrefixLever(n_prefix, n_suffix, row.measured_s, saved_s, gain, _command("prefix", sizes, record))


def _speculation(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> SpeculationLever | None:
    """Also None where guesses that are all right would not pay, and for random weights: what they write is noise."""
    row = _shortest_decode(rows)
    if row is None or record.model.source == catalog.SYNTHETIC or _forgets(record):
        return None
    n_past = _middle(row)
    one_s = prediction.seconds(1, n_past, 1)
    lengths = [n for n in DRAFT_LENGTHS if n < record.settings.n_ubatch and n <= row.n_gen - 2]
    steps = {n: prediction.seconds(n + 1, n_past, n + 1) for n in lengths}
    costs = {n: step_s / one_s for n, step_s in steps.items() if step_s is not None and one_s}
    paying = {n: v for n, v in costs.items() if n + 1 >= LEAST_GAIN * v}
    if not paying:
        return None
    shares = {n: guesses.break_even(v, 0.0, n) for n, v in paying.items()}
    least = {n: share for n, share in shares.items() if share is not None}
    gains = {n: guesses.textbook_length(ACCEPTANCE, n) / v for n, v in paying.items()}
    n_draft, n_best = min(least, key=least.__getitem__), max(gains, key=gains.__getitem__)
    asked = ",".join(str(n) for n in sorted({n_draft, n_best}))
    sizes = {"--draft": "lookup", "--draft-len": asked, "--prompt-len": row.n_prompt, "--gen": row.n_gen}
    command = _command("speculate", sizes, record, but=NOT_OF_SPECULATE)
    return SpeculationLever(
        n_draft, least[n_draft], ACCEPTANCE, n_best, gains[n_best], row.n_prompt, row.n_gen, command
    )


def _shortest_decode(rows: Sequence[Explained]) -> Explained | None:
    """Decode after the shortest prompt; of these the longest answer."""
    decode = [row for row in rows if row.phase == "decode"]
    return min(decode, key=lambda row: (row.n_prompt, -row.n_gen), default=None)


def _middle(row: Explained) -> int:
    """The position in the middle of an answer."""
    return row.n_prompt + max(0, row.n_gen - 2) // 2


def _forgets(record: Record) -> bool:
    """Whether layers keep only the last positions: such a cache can neither be copied nor cut."""
    return any(record.model.windows or ())


def _fits(record: Record, n_seq: int, n_tokens: int) -> bool:
    """Whether so many sequences fit into the machine's memory, as far as that is known."""
    n_ctx = n_seq * memory.padded(n_tokens)
    need = memory.of_context(record.model, dataclasses.replace(record.settings, n_ctx=n_ctx, n_seq_max=n_seq))
    sizes = [record.machine.ram_bytes]
    if record.settings.n_gpu_layers:
        sizes = [device.memory_bytes for device in machine.accelerators(record.machine.devices)]
    return not sizes or None in sizes or need.total_bytes <= sum(size for size in sizes if size is not None)


def _command(name: str, sizes: Mapping[str, object], record: Record, but: Sequence[tuple[str, str]] = ()) -> str:
    """The experiment at the lengths of the explained runs, on their model and settings, but for these."""
    shared = [option for option in options(record) if option not in but]
    words = [str(word) for option in [*sizes.items(), *shared] for word in option]
    return f"lab {name} {shlex.join(words)}"
