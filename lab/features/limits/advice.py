"""Changes that should make runs faster here, predicted from the same kernels' ceilings.

`levers` replaces one part of a phase by another with a known ceiling (weights of another type, another number of
threads, other attention) and keeps everything else, including overhead, as measured. `experiments` predicts the gains
of batches, cached prompts and speculation. They need steps that the explained runs do not have: one token of each of
several sequences, the rest of a prompt, several positions of one sequence; their times are predicted from the ceilings
and the explained runs (step_prediction.py). An advice is listed only if it is predicted to gain and all its kernels
have a ceiling. Each has the command that tries it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import guesses, memory, shell, shown
from lab.core.lists import plural
from lab.core.record import Ceilings, Model, Record, Settings
from lab.core.shape import ATTENTION, BLOCKS, EXPERTS, FEED_FORWARD, matrices
from lab.errors import LabError
from lab.features.limits import roofline, step_kernels
from lab.features.limits.probing import UNPACKED, used_types
from lab.features.limits.step_prediction import StepPrediction, taught_by
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION as FLASH
from lab.process.wire import MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION
from lab.runner import machine
from lab.runner.as_options import options
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

LEAST_GAIN = 1.05
MOST_LEVERS = 3
IN_LAYERS = (ATTENTION, FEED_FORWARD, EXPERTS)
SMALL_CACHE = "q8_0"

SEQUENCES = (2, 4, 8, 16)
NEW = 64
"""Most tokens of a new message after the cached ones."""
ANSWER = 2
"""Tokens of an answer in the command: the fewest of `lab turns`."""
DRAFT_LENGTHS = range(1, 9)
ACCEPTANCE = 0.8
"""The acceptance for which a speed-up is predicted."""
LEFT_OUT = {"turns": [("--kv-unified", "on")], "speculate": [("--kv-unified", "on"), ("--prompt", "random")]}
"""Options that commands do not get: they have one sequence, and speculation uses the lab's texts, not random tokens."""


class Lever(NamedTuple):
    """A change of settings or of the model, its predicted speed-up of each phase, and the command that tries it."""

    change: str
    prefill_gain: float | None  # at the longest prompt, of prefill_at tokens
    decode_gain: float | None  # after a prompt of decode_at tokens: the shortest, of attention the longest
    prefill_at: int
    decode_at: int
    command: str | None  # None: the lab cannot download or make that model

    @property
    def best(self) -> float:
        return max(self.prefill_gain or 0.0, self.decode_gain or 0.0)

    @property
    def words(self) -> str:
        gains = (
            (f"prefill of {self.prefill_at:,} tokens", self.prefill_gain),
            (f"decode after {self.decode_at:,} tokens", self.decode_gain),
        )
        return f"{self.change}: {', '.join(f'{phase} is {digits(gain)}x as fast' for phase, gain in gains if gain)}"


class Experiment(NamedTuple):
    """An experiment with a predicted gain: its figures by name, in words, and the command that tries it."""

    experiment: str
    words: str
    command: str
    figures: dict[str, float]


class Change(NamedTuple):
    """A change to judge: the model and the settings with it, and its options with their old and new values."""

    words: str
    model: Model
    settings: Settings
    options: Mapping[str, tuple[object, object]]
    at_longest: bool = False  # decode is judged after the longest prompt


def levers(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> list[Lever]:
    """The three levers with the largest gains, for one setup's explained rows; disturbed rows predict nothing.

    If attention is a limit, flash attention comes first, then a smaller KV cache. The commands measure the predicted
    case: the same lengths, tokens and settings, except for the change.
    """
    rows = rows[rows.doubts.map(shown.may_promise)]
    judged = [(one, _judged(one, rows, record, ceilings)) for one in _changes(rows, record, ceilings)]
    good = [(one, lever) for one, lever in judged if lever and lever.best >= LEAST_GAIN]
    if (rows.limit == roofline.ATTENTION).any():  # flash attention first, then the cache
        good.sort(key=lambda pair: (not pair[0].at_longest, 0.0 if pair[0].at_longest else -pair[1].best))
    else:
        good.sort(key=lambda pair: -pair[1].best)
    return [lever for _, lever in good][:MOST_LEVERS]


def _changes(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> Iterator[Change]:
    """Weights of other types, other threads, flash attention on or off, and a packed KV cache: whatever was probed."""
    model, settings = record.model, record.settings
    known = matrices(model)
    if known is None or rows.empty:
        return
    main = used_types(model)[0]
    ops = {MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT for matrix in known if matrix.type == main}
    shapes = {(matrix.rows, matrix.columns) for matrix in known if matrix.part in IN_LAYERS}
    kinds = {
        rate.type
        for rate in ceilings.rates
        if rate.op in ops
        and (ceilings.on_gpu or rate.n_threads == settings.n_threads)
        and (rate.rows, rate.columns) in shapes
    }
    for kind in sorted((kinds - {main}) & BLOCKS.keys()):
        sizes, changed = {one: float(n_bytes) for one, n_bytes in model.tensor_bytes.items()}, []
        for matrix in known:  # embedding and output matrix keep their type
            if matrix.type == main and matrix.part in IN_LAYERS and matrix.columns % BLOCKS[kind][0] == 0:
                sizes[main] -= matrix.n_bytes
                matrix = dataclasses.replace(matrix, type=kind)
                sizes[kind] = sizes.get(kind, 0.0) + matrix.n_bytes
            changed.append(matrix)
        by_type = {one: round(n_bytes) for one, n_bytes in sizes.items() if round(n_bytes)}
        other = dataclasses.replace(model, tensor_bytes=by_type, matrices=tuple(changed))
        can_make = kind in synthetic.QUANTIZATIONS and model.source != "file"
        specs = {"--model": (catalog.spec_of(model), catalog.spec_of(model, kind))} if can_make else {}
        yield Change(f"{kind} instead of {main}", other, settings, specs)
    for n in sorted({rate.n_threads for rate in ceilings.rates if not ceilings.on_gpu} - {settings.n_threads}):
        fewer = dataclasses.replace(settings, n_threads=n, n_threads_batch=n)
        words = f"{plural(n, 'thread')} instead of {settings.n_threads}"
        yield Change(words, model, fewer, {"--threads": (settings.n_threads, n)})
    is_off = settings.flash_attn_resolved == "off"
    if {FLASH, PLAIN_ATTENTION} <= {rate.op for rate in ceilings.rates if rate.type == settings.type_k.upper()}:
        now, new = ("off", "on") if is_off else ("on", "off")
        other_attention = dataclasses.replace(settings, flash_attn=new, flash_attn_resolved=new)
        words = f"flash attention {new} instead of {now}"
        yield Change(words, model, other_attention, {"--flash-attn": (now, new)}, True)
    # llama.cpp packs values only with flash attention, and only heads whose size is a multiple of a block
    types = settings.type_k, settings.type_v
    is_limited = bool(((rows.limit == roofline.ATTENTION) & (rows.phase == "decode")).any())
    is_unpacked = {kind.upper() for kind in types} <= set(UNPACKED)
    fits = model.head_dim and not model.head_dim % BLOCKS[SMALL_CACHE.upper()][0]
    if is_limited and is_unpacked and fits and not is_off:
        packed = dataclasses.replace(settings, type_k=SMALL_CACHE, type_v=SMALL_CACHE)
        words = f"{SMALL_CACHE} KV cache instead of {' and '.join(dict.fromkeys(types))}"
        both = {f"--cache-type-{name}": (kind, SMALL_CACHE) for name, kind in zip("kv", types, strict=True)}
        yield Change(words, model, packed, both, True)


def _judged(change: Change, rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> Lever | None:
    """The gains of a change: prefill of the longest prompt, decode after the shortest; None if a ceiling is missing."""
    gains: dict[str, float] = {}
    at = {"prefill": rows.n_prompt.max(), "decode": rows.n_prompt.max() if change.at_longest else rows.n_prompt.min()}
    for phase, own in rows.groupby("phase"):
        ordered = own.sort_values("n_prompt", kind="stable")
        is_longest = phase == "prefill" or change.at_longest
        row: Any = next(ordered.iloc[[-1 if is_longest else 0]].itertuples())
        step = 1, row.n_prompt, 1
        if phase == "prefill":  # a step in the middle
            n_tokens = min(change.settings.n_ubatch, row.n_prompt)
            step = n_tokens, (row.n_prompt - n_tokens) // 2, 1
        try:
            old_s = step_kernels.total(record.model, record.settings, ceilings, *step).total_s
            new_s = step_kernels.total(change.model, change.settings, ceilings, *step).total_s
        except LabError:
            return None
        rest = max(0.0, row.measured_s - row.least_s)
        gains[str(phase)] = row.measured_s / (rest + (row.measured_s - rest) * new_s / old_s)
    command = None
    if change.options:
        replaced = {*change.options, *(["--threads-batch"] if "--threads" in change.options else [])}
        shared = [word for option in options(record) if option[0] not in replaced for word in option]
        old, new = ([word for name, both in change.options.items() for word in (name, both[i])] for i in (0, 1))
        lengths = ",".join(str(n) for n in sorted({rows.n_prompt.min(), rows.n_prompt.max()}))
        command = shell.lab("ab", old, new, "--prompt-len", lengths, "--gen", str(rows.n_gen.max()), *shared)
    gained = gains.get("prefill"), gains.get("decode")
    return Lever(change.words, *gained, int(at["prefill"]), int(at["decode"]), command)


def experiments(rows: pd.DataFrame, records: Sequence[Record], ceilings: Ceilings) -> list[Experiment]:
    """The experiments with a predicted gain, for one setup's explained rows and their records."""
    plain = [record for record in records if record.run.lever is None]
    rows = rows[rows.doubts.map(shown.may_promise)]
    if not plain or rows.empty:
        return []
    prediction = taught_by(plain, plain[0], ceilings)
    tried = [of(rows, plain[0], prediction) for of in (_batch, _cache, _speculation)]
    return [one for one in tried if one]


def _batch(rows: pd.DataFrame, record: Record, prediction: StepPrediction) -> Experiment | None:
    """The largest of SEQUENCES that pays: in total LEAST_GAIN times the tokens per second of any smaller number."""
    row, n_past = _shortest_decode(rows)
    if row is None:
        return None
    one_s, n_best, best = prediction.seconds(1, n_past, 1), 1, 1.0
    for n in SEQUENCES:
        if n > record.settings.n_batch or not _fits(record, n, row.n_prompt + row.n_gen):
            continue
        step_s = prediction.seconds(1, n_past, n, [(1, n_past)] * (n - 1))
        if one_s is not None and step_s is not None and n * one_s / step_s >= LEAST_GAIN * best:
            n_best, best = n, n * one_s / step_s
    if n_best == 1:
        return None
    words = (
        f"{n_best} sequences decoded together: {digits(best)}x the tokens/s in total, {digits(best / n_best)}x per "
        f"user, after prompts of {row.n_prompt:,} tokens"
    )
    sizes = {"--sequences": f"1,{n_best}", "--prompt-len": row.n_prompt, "--gen": row.n_gen}
    figures = {"n_seq": n_best, "total_gain": best, "user_share": best / n_best}
    return _experiment("batch", words, record, sizes, figures | {"n_prompt": row.n_prompt, "n_gen": row.n_gen})


def _cache(rows: pd.DataFrame, record: Record, prediction: StepPrediction) -> Experiment | None:
    """The gain for the longest prompt that is the second turn of a conversation within the trained context.

    The saving is the share that the cached tokens have of the measured prefill.
    """
    trained = record.model.n_ctx_train
    known = rows[rows.phase == "prefill"]
    known = known if trained is None else known[known.n_prompt + ANSWER <= trained]
    row: Any = max(known.itertuples(), key=lambda row: row.n_prompt, default=None)
    if row is None or row.n_prompt < 8 or _forgets(record):
        return None
    n_new = min(NEW, row.n_prompt // 4)
    n_cached = row.n_prompt - n_new
    cached_s, new_s = prediction.prefill(n_cached, 0, 0), prediction.prefill(n_new, n_cached)
    if cached_s is None or new_s is None:
        return None
    saved_s = row.measured_s * cached_s / (cached_s + new_s)
    gain = row.measured_s / (row.measured_s - saved_s)
    if gain < LEAST_GAIN:
        return None
    n_system = n_cached - n_new - ANSWER
    words = (
        f"{n_cached:,} of {row.n_prompt:,} prompt tokens cached (a system prompt of {n_system:,} tokens and one turn): "
        f"first token {digits(gain)}x as fast (saves {seconds(saved_s)} of {seconds(row.measured_s)})"
    )
    sizes = {"--system": n_system, "--turn": f"{n_new}+{ANSWER}", "--turns": 2}
    figures = {"n_cached": n_cached, "n_new": n_new, "ttft_s": row.measured_s, "saved_s": saved_s, "gain": gain}
    return _experiment("turns", words, record, sizes, figures)


def _speculation(rows: pd.DataFrame, record: Record, prediction: StepPrediction) -> Experiment | None:
    """None if even full acceptance would not pay, and for random weights, whose text is noise."""
    row, n_past = _shortest_decode(rows)
    if row is None or record.model.source == catalog.SYNTHETIC or _forgets(record):
        return None
    one_s = prediction.seconds(1, n_past, 1)
    lengths = [n for n in DRAFT_LENGTHS if n < record.settings.n_ubatch and n <= row.n_gen - 2]
    steps = {n: prediction.seconds(n + 1, n_past, n + 1) for n in lengths}
    costs = {n: step_s / one_s for n, step_s in steps.items() if step_s is not None and one_s}
    paying = {n: v for n, v in costs.items() if n + 1 >= LEAST_GAIN * v}
    if not paying:
        return None
    least = {n: share for n, v in paying.items() if (share := guesses.break_even(v, 0.0, n)) is not None}
    gains = {n: guesses.textbook_length(ACCEPTANCE, n) / v for n, v in paying.items()}
    n_draft, n_best = min(least, key=least.__getitem__), max(gains, key=gains.__getitem__)
    best = "" if n_best == n_draft else f"drafts of {n_best} are "
    words = (
        f"speculative decoding with drafts of {plural(n_draft, 'token')}: faster if more than "
        f"{100 * least[n_draft]:.0f} % are accepted; at {100 * ACCEPTANCE:.0f} %, "
        f"{best}{digits(gains[n_best])}x as fast (without the time to draft)"
    )
    asked = ",".join(str(n) for n in sorted({n_draft, n_best}))
    sizes = {"--draft": "lookup", "--draft-len": asked, "--prompt-len": row.n_prompt, "--gen": row.n_gen}
    figures = {"n_draft": n_draft, "least_acceptance": least[n_draft], "acceptance": ACCEPTANCE}
    figures |= {"best_n_draft": n_best, "gain": gains[n_best], "n_prompt": row.n_prompt, "n_gen": row.n_gen}
    return _experiment("speculate", words, record, sizes, figures)


def _experiment(name: str, words: str, record: Record, sizes: dict[str, Any], figures: dict[str, float]) -> Experiment:
    """An experiment; its command has the lengths, model and settings of the explained runs."""
    shared = [option for option in options(record) if option not in LEFT_OUT.get(name, ())]
    command = shell.lab(name, *(word for option in [*sizes.items(), *shared] for word in option))
    return Experiment(name, words, command, figures)


def _shortest_decode(rows: pd.DataFrame) -> tuple[Any, int]:
    """Decode after the shortest prompt with the longest answer (None without any), and the position in its middle."""
    decode = rows[rows.phase == "decode"]
    row: Any = min(decode.itertuples(), key=lambda row: (row.n_prompt, -row.n_gen), default=None)
    return row, 0 if row is None else row.n_prompt + max(0, row.n_gen - 2) // 2


def _forgets(record: Record) -> bool:
    """Whether layers keep only the last positions; such a cache cannot be copied and cut."""
    return any(record.model.windows or ())


def _fits(record: Record, n_seq: int, n_tokens: int) -> bool:
    """Whether n_seq sequences fit into the machine's memory; true if its size is unknown."""
    n_ctx = n_seq * memory.padded(n_tokens)
    need = memory.of_context(record.model, dataclasses.replace(record.settings, n_ctx=n_ctx, n_seq_max=n_seq))
    sizes = [record.machine.ram_bytes]
    if record.settings.n_gpu_layers:
        sizes = [device.memory_bytes for device in machine.accelerators(record.machine.devices)]
    return not sizes or None in sizes or need.total_bytes <= sum(size for size in sizes if size is not None)
