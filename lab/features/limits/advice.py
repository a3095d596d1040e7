"""Changes that should make runs faster here, predicted from the same kernels' ceilings.

A lever replaces one part of a phase by another with a known ceiling (weights of another type, another number of
threads, other attention) and keeps everything else, including overhead, as measured. Its gain is a prediction, and each
lever has the command that tries it.

`experiments` predicts the gains of batches, cached prompts and speculation on this machine. They need steps that the
explained runs do not have: one token of each of several sequences, the rest of a prompt, several positions of one
sequence. The times of such steps are predicted from the kernels' ceilings and the explained runs (step_prediction.py).
An experiment is listed only if it is predicted to gain and all its kernels have a ceiling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import guesses, memory, shell, shown
from lab.core.lists import plural
from lab.core.record import Ceilings, Model, Record, Settings
from lab.core.shape import ATTENTION, BLOCKS, EXPERTS, FEED_FORWARD, Matrix, matrices
from lab.errors import LabError
from lab.features.limits import roofline, step_kernels
from lab.features.limits.probe_plan import UNPACKED, used_types
from lab.features.limits.roofline import Explained
from lab.features.limits.step_prediction import StepPrediction, taught_by
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION as FLASH
from lab.process.wire import MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION
from lab.runner import machine
from lab.runner.as_options import options

LEAST_GAIN = 1.05
MOST_LEVERS = 3
IN_LAYERS = (ATTENTION, FEED_FORWARD, EXPERTS)
SMALL_CACHE = "q8_0"


@dataclass(frozen=True)
class Lever:
    """A change, its predicted speed-up of each phase, and the command that tries it."""

    change: str
    prefill_gain: float | None  # at the longest prompt, of prefill_at tokens
    decode_gain: float | None  # after a prompt of decode_at tokens: the shortest, of attention the longest
    prefill_at: int
    decode_at: int
    command: str | None  # None: the lab cannot download or make that model

    @property
    def best(self) -> float:
        return max(self.prefill_gain or 0.0, self.decode_gain or 0.0)


def levers(rows: Sequence[Explained], record: Record, ceilings: Ceilings) -> list[Lever]:
    """The three levers with the largest gains, for one setup's explained rows; disturbed rows predict nothing.

    If attention is a limit, flash attention comes first, then a smaller KV cache. The commands measure the predicted
    case: the same lengths, tokens and settings, except for the change.
    """
    model, settings = record.model, record.settings
    known, rows = matrices(model), [row for row in rows if shown.may_promise(row.doubts)]
    if known is None or not rows:
        return []
    tried = []
    main = used_types(model)[0]
    for kind in _other_types(model, settings, known, ceilings, main):
        command = None
        if kind in synthetic.QUANTIZATIONS and model.source != "file":
            command = _command(rows, record, {"--model": (catalog.spec_of(model), catalog.spec_of(model, kind))})
        other = _with_type(model, known, main, kind)
        tried.append(_lever(f"{kind} instead of {main}", rows, record, ceilings, other, settings, command))
    fewer_threads = set() if ceilings.on_gpu else {rate.n_threads for rate in ceilings.rates}
    for n in sorted(fewer_threads - {settings.n_threads}):
        fewer = dataclasses.replace(settings, n_threads=n, n_threads_batch=n)
        change = f"{plural(n, 'thread')} instead of {settings.n_threads}"
        command = _command(rows, record, {"--threads": (settings.n_threads, n)})
        tried.append(_lever(change, rows, record, ceilings, model, fewer, command))
    of_others = sorted((lever for lever in tried if lever and lever.best >= LEAST_GAIN), key=lambda lever: -lever.best)
    of_attention = [lever for lever in (_flash_attention(rows, record, ceilings),) if lever]
    if any(row.limit == roofline.ATTENTION for row in rows):
        of_attention += [lever for lever in (_small_cache(rows, record, ceilings),) if lever]
        return [*of_attention, *of_others][:MOST_LEVERS]
    return sorted([*of_others, *of_attention], key=lambda lever: -lever.best)[:MOST_LEVERS]


def _flash_attention(rows: Sequence[Explained], record: Record, ceilings: Ceilings) -> Lever | None:
    """Flash attention switched on or off, if both were probed and the change gains."""
    settings = record.settings
    probed = {rate.op for rate in ceilings.rates if rate.type == settings.type_k.upper()}
    if not {FLASH, PLAIN_ATTENTION} <= probed:
        return None
    now, new = ("off", "on") if settings.flash_attn_resolved == "off" else ("on", "off")
    changed = dataclasses.replace(settings, flash_attn=new, flash_attn_resolved=new)
    command = _command(rows, record, {"--flash-attn": (now, new)})
    words = f"flash attention {new} instead of {now}"
    lever = _lever(words, rows, record, ceilings, record.model, changed, command, at_longest=True)
    return lever if lever and lever.best >= LEAST_GAIN else None


def _small_cache(rows: Sequence[Explained], record: Record, ceilings: Ceilings) -> Lever | None:
    """A KV cache in SMALL_CACHE if attention limits decode, its own was probed, and it gains: unpacking costs time.

    llama.cpp packs values only with flash attention, and only heads whose size is a multiple of a block.
    """
    model, settings = record.model, record.settings
    is_limited = any(row.limit == roofline.ATTENTION and row.phase == "decode" for row in rows)
    is_packed = not {settings.type_k.upper(), settings.type_v.upper()} <= set(UNPACKED)
    is_possible = model.head_dim and not model.head_dim % BLOCKS[SMALL_CACHE.upper()][0]
    if not is_limited or is_packed or not is_possible or settings.flash_attn_resolved == "off":
        return None
    options = {"--cache-type-k": (settings.type_k, SMALL_CACHE), "--cache-type-v": (settings.type_v, SMALL_CACHE)}
    words = f"{SMALL_CACHE} KV cache instead of {' and '.join(dict.fromkeys((settings.type_k, settings.type_v)))}"
    changed = dataclasses.replace(settings, type_k=SMALL_CACHE, type_v=SMALL_CACHE)
    command = _command(rows, record, options)
    lever = _lever(words, rows, record, ceilings, model, changed, command, at_longest=True)
    return lever if lever and lever.best >= LEAST_GAIN else None


def _other_types(model: Model, settings: Settings, known: Sequence[Matrix], ceilings: Ceilings, main: str) -> list[str]:
    """Types whose kernels were probed in a shape of the model's layers."""
    ops = {MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT for matrix in known if matrix.type == main}
    shapes = {(matrix.rows, matrix.columns) for matrix in known if matrix.part in IN_LAYERS}
    kinds = {
        rate.type
        for rate in ceilings.rates
        if rate.op in ops
        and (ceilings.on_gpu or rate.n_threads == settings.n_threads)
        and (rate.rows, rate.columns) in shapes
    }
    return sorted((kinds - {main}) & BLOCKS.keys())


def _command(rows: Sequence[Explained], record: Record, changed: Mapping[str, tuple[object, object]]) -> str:
    """The `lab ab` command for options with an old and a new value, at the lengths of the predicted gains."""
    lengths = ",".join(str(n) for n in sorted({min(row.n_prompt for row in rows), max(row.n_prompt for row in rows)}))
    replaced = {*changed, *(["--threads-batch"] if "--threads" in changed else [])}
    shared = [word for option in options(record) if option[0] not in replaced for word in option]
    sizes = ["--prompt-len", lengths, "--gen", str(max(row.n_gen for row in rows))]
    old, new = ([word for option, values in changed.items() for word in (option, values[i])] for i in (0, 1))
    return shell.lab("ab", old, new, *sizes, *shared)


def _lever(
    change: str,
    rows: Sequence[Explained],
    record: Record,
    ceilings: Ceilings,
    model: Model,
    settings: Settings,
    command: str | None,
    at_longest: bool = False,
) -> Lever | None:
    """The gains of another model or other settings; None if a ceiling is missing.

    The gain of decode is that after the shortest prompt, or the longest.
    """
    gains: dict[str, float] = {}
    ordered = sorted(rows, key=lambda row: row.n_prompt)
    try:
        for phase, chosen in (("prefill", ordered[::-1]), ("decode", ordered[::-1] if at_longest else ordered)):
            row = next((candidate for candidate in chosen if candidate.phase == phase), None)
            if row is None:
                continue
            step = _typical_step(row, settings)
            old = step_kernels.total(record.model, record.settings, ceilings, *step)
            new = step_kernels.total(model, settings, ceilings, *step)
            rest = max(0.0, row.measured_s - row.least_s)
            gains[phase] = row.measured_s / (rest + (row.measured_s - rest) * new.total_s / old.total_s)
    except LabError:
        return None
    ends = ordered[-1].n_prompt, ordered[-1 if at_longest else 0].n_prompt
    return Lever(change, gains.get("prefill"), gains.get("decode"), *ends, command)


def _typical_step(row: Explained, settings: Settings) -> tuple[int, int, int]:
    """(n_tokens, n_past, n_outputs) of a step in the middle of the phase."""
    if row.phase == "decode":
        return 1, row.n_prompt, 1
    n_tokens = min(settings.n_ubatch, row.n_prompt)
    return n_tokens, (row.n_prompt - n_tokens) // 2, 1


def _with_type(model: Model, known: Sequence[Matrix], old: str, new: str) -> Model:
    """The model with its layers' matrices of one type in another, if their rows can be packed in it.

    Embedding and output matrix keep their type.
    """
    sizes = {kind: float(n_bytes) for kind, n_bytes in model.tensor_bytes.items()}
    changed = []
    for matrix in known:
        if matrix.type == old and matrix.part in IN_LAYERS and matrix.columns % BLOCKS[new][0] == 0:
            sizes[old] -= matrix.n_bytes
            matrix = dataclasses.replace(matrix, type=new)
            sizes[new] = sizes.get(new, 0.0) + matrix.n_bytes
        changed.append(matrix)
    by_type = {kind: round(n_bytes) for kind, n_bytes in sizes.items() if round(n_bytes)}
    return dataclasses.replace(model, tensor_bytes=by_type, matrices=tuple(changed))


SEQUENCES = (2, 4, 8, 16)
NEW = 64
"""Most tokens of a new message after the cached ones."""
ANSWER = 2
"""Tokens of an answer in the command: the fewest of `lab turns`."""

DRAFT_LENGTHS = range(1, 9)
NOT_OF_TURNS = (("--kv-unified", "on"),)
"""Options that `lab turns` does not get: it has one sequence."""
NOT_OF_SPECULATE = (("--kv-unified", "on"), ("--prompt", "random"))
"""Options that `lab speculate` does not get: it has one sequence, and uses the lab's texts instead of random tokens."""

ACCEPTANCE = 0.8
"""The acceptance for which a speed-up is predicted."""


@dataclass(frozen=True)
class BatchLever:
    """n_seq sequences decoded together: tokens per second in total and per user, over those of one sequence."""

    n_seq: int
    total_gain: float
    user_share: float
    n_prompt: int
    n_gen: int
    command: str
    experiment: str = "batch"


@dataclass(frozen=True)
class CacheLever:
    """The first n_cached tokens of a prompt cached: TTFT in seconds without the cache, and the seconds saved.

    The saving is the share that these tokens have of the measured prefill.
    """

    n_cached: int
    n_new: int
    ttft_s: float
    saved_s: float
    gain: float
    command: str
    experiment: str = "turns"


@dataclass(frozen=True)
class SpeculationLever:
    """Tokens drafted and verified in one step; drafting is assumed to cost nothing.

    Drafts of `n_draft` tokens pay from an acceptance of `least_acceptance`; every other draft length needs more. At
    `acceptance` the best draft length is `best_n_draft`, and the speed-up is `gain`.
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


ExperimentLever = BatchLever | CacheLever | SpeculationLever


def experiments(rows: Sequence[Explained], records: Sequence[Record], ceilings: Ceilings) -> list[ExperimentLever]:
    """The experiments with a predicted gain, for one setup's explained rows and their records."""
    plain = [record for record in records if record.run.lever is None]
    rows = [row for row in rows if shown.may_promise(row.doubts)]
    if not plain or not rows:
        return []
    prediction = taught_by(plain, plain[0], ceilings)
    tried = [lever(rows, plain[0], prediction) for lever in (_batch, _cache, _speculation)]
    return [lever for lever in tried if lever]


def _batch(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> BatchLever | None:
    """The largest of SEQUENCES that pays: in total LEAST_GAIN times the tokens per second of any smaller number."""
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
    return BatchLever(n_best, best, best / n_best, row.n_prompt, row.n_gen, _experiment_command("batch", sizes, record))


def _cache(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> CacheLever | None:
    """The gain for the longest prompt that is the second turn of a conversation within the trained context."""
    trained = record.model.n_ctx_train
    known = [row for row in rows if row.phase == "prefill" and (trained is None or row.n_prompt + ANSWER <= trained)]
    row = max(known, key=lambda row: row.n_prompt, default=None)
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
    sizes = {"--system": n_cached - n_new - ANSWER, "--turn": f"{n_new}+{ANSWER}", "--turns": 2}
    command = _experiment_command("turns", sizes, record, but=NOT_OF_TURNS)
    return CacheLever(n_cached, n_new, row.measured_s, saved_s, gain, command)


def _speculation(rows: Sequence[Explained], record: Record, prediction: StepPrediction) -> SpeculationLever | None:
    """None if even full acceptance would not pay, and for random weights, whose text is noise."""
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
    command = _experiment_command("speculate", sizes, record, but=NOT_OF_SPECULATE)
    return SpeculationLever(
        n_draft, least[n_draft], ACCEPTANCE, n_best, gains[n_best], row.n_prompt, row.n_gen, command
    )


def _shortest_decode(rows: Sequence[Explained]) -> Explained | None:
    """Decode after the shortest prompt, with the longest answer."""
    decode = [row for row in rows if row.phase == "decode"]
    return min(decode, key=lambda row: (row.n_prompt, -row.n_gen), default=None)


def _middle(row: Explained) -> int:
    """The position in the middle of an answer."""
    return row.n_prompt + max(0, row.n_gen - 2) // 2


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


def _experiment_command(
    name: str, sizes: Mapping[str, object], record: Record, but: Sequence[tuple[str, str]] = ()
) -> str:
    """The command of an experiment with the lengths, model and settings of the explained runs, without `but`."""
    shared = [option for option in options(record) if option not in but]
    return shell.lab(name, *(word for option in [*sizes.items(), *shared] for word in option))
