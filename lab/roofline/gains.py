"""What would make runs faster, predicted from the ceilings: other settings or weights, and further
experiments.

`changes` replaces one part of a phase by another with a known ceiling and keeps everything else as
measured. `batching`, `cached_prompt` and `drafting` predict gains from the times of steps that
the runs do not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lab.core import drafts, matrices, shell, shown
from lab.core.attention import attention_layers
from lab.core.lists import plural
from lab.core.matrices import BLOCKS, EXPERTS, FEED_FORWARD, Matrix, matrices_of
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION
from lab.roofline.explanation import ExplainedRow
from lab.roofline.probes import used_types
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction
from lab.runner.as_options import options

if TYPE_CHECKING:
    import pandas as pd

LEAST_GAIN = 1.05
MOST_CHANGES = 3
IN_LAYERS = (matrices.ATTENTION, FEED_FORWARD, EXPERTS)
SEQUENCES = (2, 4, 8, 16)
DRAFT_LENGTHS = range(1, 9)
ACCEPTANCE = 0.8  # the acceptance for which a speed-up is predicted
SHORTEST_CUT = 8  # tokens of a prompt: shorter ones have no part to cache
MOST_NEW = 64  # tokens of a new message after the cached ones
NEW_SHARE = 4  # a new message is at most a fourth of the prompt
OF_USERS = (catalog.FILE, catalog.OLLAMA)  # models that the lab does not make in another type
ANSWER = 2  # tokens of an answer: the fewest of a turn


# Changes of settings and weights


class Gain(NamedTuple):
    """How many times as fast a phase becomes, and the prompt length at which it gains most."""

    factor: float
    n_prompt: int


class Option(NamedTuple):
    """An option of the command line whose value a change replaces."""

    name: str
    before: object
    after: object


@dataclass(frozen=True)
class Alternative:
    """A model and settings to judge beside those of a run; `option` is None where no command can
    try it.
    """

    label: str
    model: Model
    settings: Settings
    option: Option | None


@dataclass(frozen=True)
class PredictedChange:
    """A change that is predicted to be faster: its gains by phase, and the command that tries it,
    if there is one.
    """

    label: str
    gains: dict[str, Gain]
    command: str | None

    @property
    def best(self) -> float:
        return max(gain.factor for gain in self.gains.values())

    @property
    def figures(self) -> dict[str, object]:
        """Its figures for JSON."""
        figures: dict[str, object] = {"change": self.label}
        for phase in (PREFILL, DECODE):
            gain = self.gains.get(phase)
            figures[f"{phase}_gain"] = None if gain is None else gain.factor
            figures[f"{phase}_at"] = None if gain is None else gain.n_prompt
        figures["command"] = self.command
        return figures


def changes(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> list[PredictedChange]:
    """The three changes with the largest gains, for one setup's explained rows; disturbed rows
    predict nothing.
    """
    rows = rows[rows.doubts.map(shown.may_promise)]
    if rows.empty:
        return []
    predicted = []
    for alternative in _alternatives(record, ceilings):
        try:
            gains = _gains(rows, record, ceilings, alternative)
        except LabError:  # a ceiling is missing
            continue
        command = None
        if alternative.option is not None:
            command = _command(alternative.option, record, gains, rows.n_gen.max())
        change = PredictedChange(alternative.label, gains, command)
        if change.best >= LEAST_GAIN:
            predicted.append(change)
    predicted.sort(key=lambda change: -change.best)
    return predicted[:MOST_CHANGES]


def _gains(
    rows: pd.DataFrame, record: Record, ceilings: Ceilings, alternative: Alternative
) -> dict[str, Gain]:
    """The largest gain of each phase. LabError for a missing ceiling."""
    gains: dict[str, Gain] = {}
    for row in rows.itertuples():
        step = (1, row.n_prompt, 1)
        if row.phase == PREFILL:
            n_tokens = min(alternative.settings.n_ubatch, row.n_prompt)
            step = (n_tokens, (row.n_prompt - n_tokens) // 2, 1)
        before = StepKernels(record.model, record.settings, ceilings).total(*step)
        after = StepKernels(alternative.model, alternative.settings, ceilings).total(*step)
        overhead_s = max(0.0, row.measured_s - row.least_s)
        kernels_s = row.measured_s - overhead_s
        changed_s = overhead_s + kernels_s * after.total_s / before.total_s
        gain = Gain(row.measured_s / changed_s, int(row.n_prompt))
        gains[row.phase] = max(gain, gains.get(row.phase, gain))
    return gains


def _command(option: Option, record: Record, gains: dict[str, Gain], n_gen: int) -> str:
    """The command that compares both values of an option at the lengths that gain most."""
    replaced = {option.name}
    if option.name == "--threads":
        replaced.add("--threads-batch")
    shared: list[str] = []
    for arguments in options(record):
        if arguments[0] not in replaced:
            shared += arguments
    lengths = sorted({gain.n_prompt for gain in gains.values()})
    return shell.lab(
        "ab",
        [option.name, option.before],
        [option.name, option.after],
        "--prompt-len",
        ",".join(map(str, lengths)),
        "--gen",
        str(n_gen),
        *shared,
    )


def _alternatives(record: Record, ceilings: Ceilings) -> Iterator[Alternative]:
    """Weights of other types, other threads, and flash attention on or off: whatever was probed."""
    matrices = matrices_of(record.model)
    if matrices is None:
        return
    yield from _other_types(record, ceilings, matrices)
    model = record.model
    settings = record.settings
    if not ceilings.on_gpu:
        n_probed = {rate.n_threads for rate in ceilings.rates}
        for n in sorted(n_probed - {settings.n_threads}):
            yield Alternative(
                f"{plural(n, 'thread')} instead of {settings.n_threads}",
                model,
                dataclasses.replace(settings, n_threads=n, n_threads_batch=n),
                Option("--threads", settings.n_threads, n),
            )
    is_probed = {ATTENTION, PLAIN_ATTENTION} <= _probed_attention(record, ceilings)
    if is_probed and settings.stated_flash is not None:
        before = "on" if settings.uses_flash else "off"
        after = "off" if settings.uses_flash else "on"
        yield Alternative(
            f"flash attention {after} instead of {before}",
            model,
            dataclasses.replace(settings, flash_attn=after, flash_attn_resolved=after),
            Option("--flash-attn", before, after),
        )


def _probed_attention(record: Record, ceilings: Ceilings) -> set[str]:
    """The kinds of attention that were probed with the model's own width of heads and cache, and
    can be used."""
    settings = record.settings
    if not settings.can_be_plain:
        return {ATTENTION}
    widths = {heads.head_dim for heads in attention_layers(record.model) or ()}
    cache_type = settings.cache_types[0].upper()
    of_cache = [rate for rate in ceilings.rates if rate.type == cache_type]
    return {rate.op for rate in of_cache if rate.columns in widths}


def _other_types(
    record: Record, ceilings: Ceilings, matrices: Sequence[Matrix]
) -> Iterator[Alternative]:
    """The model with the weights of its layers in each other type that was probed in one of its
    shapes.
    """
    model = record.model
    main_type = used_types(model)[0]
    ops = set()
    sizes = set()
    for matrix in matrices:
        if matrix.type == main_type:
            ops.add(MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT)
        if matrix.part in IN_LAYERS:
            sizes.add((matrix.rows, matrix.columns))
    types = set()
    for rate in ceilings.rates:
        has_threads = ceilings.on_gpu or rate.n_threads == record.settings.n_threads
        if rate.op in ops and (rate.rows, rate.columns) in sizes and has_threads:
            types.add(rate.type)
    for kind in sorted((types - {main_type}) & BLOCKS.keys()):
        option = None
        if kind in synthetic.QUANTIZATIONS and model.source not in OF_USERS:
            option = Option("--model", catalog.spec_of(model), catalog.spec_of(model, kind))
        packed = _packed_as(kind, main_type, model, matrices)
        label = f"{kind} instead of {main_type}"
        yield Alternative(label, packed, record.settings, option)


def _packed_as(kind: str, main_type: str, model: Model, matrices: Sequence[Matrix]) -> Model:
    """A model with the matrices of its layers in another type; embedding and output matrix stay."""
    block_weights, _ = BLOCKS[kind]
    packed = []
    for matrix in matrices:
        is_main = matrix.type == main_type and matrix.part in IN_LAYERS
        if is_main and matrix.columns % block_weights == 0:
            matrix = dataclasses.replace(matrix, type=kind)
        packed.append(matrix)
    return dataclasses.replace(model, matrices=tuple(packed))


# Experiments


@dataclass(frozen=True)
class Batching:
    """Sequences decoded together: the gain in tokens/s of all of them, and the share of its speed
    that each keeps.
    """

    n_seq: int
    total_gain: float
    user_share: float
    n_prompt: int
    n_gen: int


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt with a part that an earlier turn left in the cache: the gain in TTFT."""

    n_cached: int
    n_new: int
    ttft_s: float
    saved_s: float
    gain: float

    @property
    def n_prompt(self) -> int:
        return self.n_cached + self.n_new


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding: the share of draft tokens that must be accepted, and the gain if
    ACCEPTANCE of them are.
    """

    n_draft: int
    least_acceptance: float
    gain: float
    n_prompt: int
    n_gen: int


def batching(decode: ExplainedRow, prediction: StepPrediction) -> Batching | None:
    """The number of sequences with the largest gain that is worth their number; None without a
    gain.

    `decode` is the explained row of a decode.
    """
    n_past = mean_position(decode)
    single_s = prediction.seconds(1, n_past, 1)
    if not single_s:
        return None
    best = 1.0
    n_best = 1
    for n in SEQUENCES:
        if n > prediction.settings.n_batch:
            break
        step_s = prediction.seconds(1, n_past, n, [(1, n_past)] * (n - 1))
        if step_s and n * single_s / step_s >= LEAST_GAIN * best:
            best = n * single_s / step_s
            n_best = n
    if n_best == 1:
        return None
    return Batching(n_best, best, best / n_best, decode.n_prompt, decode.n_gen)


def cached_prompt(prefill: ExplainedRow, prediction: StepPrediction) -> CachedPrompt | None:
    """The gain of the second turn of a conversation; None without a gain. `prefill` is the
    explained row.
    """
    if not can_cut(prediction.model):
        return None
    n_new = min(MOST_NEW, prefill.n_prompt // NEW_SHARE)
    n_cached = prefill.n_prompt - n_new
    cached_s = prediction.prefill(n_cached, 0, 0)
    new_s = prediction.prefill(n_new, n_cached)
    if cached_s is None or new_s is None or (cached_s + new_s) / new_s < LEAST_GAIN:
        return None
    ttft_s = prefill.measured_s
    saved_s = ttft_s * cached_s / (cached_s + new_s)
    return CachedPrompt(n_cached, n_new, ttft_s, saved_s, gain=ttft_s / (ttft_s - saved_s))


def drafting(decode: ExplainedRow, prediction: StepPrediction) -> Drafting | None:
    """The draft length with the largest gain; None without a gain. `decode` is the explained row of
    a decode.
    """
    model = prediction.model
    # The text of random weights is noise
    if not can_cut(model) or model.source == catalog.SYNTHETIC:
        return None
    n_past = mean_position(decode)
    single_s = prediction.seconds(1, n_past, 1)
    if not single_s:
        return None
    best = None
    for n_draft in DRAFT_LENGTHS:
        if n_draft >= prediction.settings.n_ubatch or n_draft > decode.n_gen - 2:
            break
        step_s = prediction.seconds(n_draft + 1, n_past, n_draft + 1)
        if not step_s:
            continue
        cost = step_s / single_s
        gain = drafts.textbook_length(ACCEPTANCE, n_draft) / cost
        if best is None or gain > best.gain:
            least = drafts.break_even(cost, 0.0, n_draft) or 0.0
            best = Drafting(n_draft, least, gain, decode.n_prompt, decode.n_gen)
    if best is None or best.gain < LEAST_GAIN:
        return None
    return best


def can_cut(model: Model) -> bool:
    """Whether a cache can be copied and cut: one of the last positions only cannot."""
    return not any(model.windows or ())


def mean_position(decode: ExplainedRow) -> int:
    """The position in the middle of an explained decode."""
    return int(decode.n_prompt) + max(0, int(decode.n_gen) - 2) // 2


def shortest_decode(rows: pd.DataFrame) -> ExplainedRow | None:
    """The explained row of the longest answer after the shortest prompt."""
    decodes = rows[rows.phase == DECODE]
    if decodes.empty:
        return None
    ordered = decodes.sort_values(
        ["n_prompt", "n_gen"], ascending=[True, False], kind="stable"
    )
    row: ExplainedRow = next(ordered.itertuples())
    return row


def longest_prefill(rows: pd.DataFrame, model: Model) -> ExplainedRow | None:
    """The explained row of the longest prompt that leaves room for an answer in the trained
    context.
    """
    trained = model.n_ctx_train or math.inf
    has_room = rows.n_prompt + ANSWER <= trained
    prefills = rows[(rows.phase == PREFILL) & has_room & (rows.n_prompt >= SHORTEST_CUT)]
    if prefills.empty:
        return None
    row: ExplainedRow = next(prefills.nlargest(1, "n_prompt").itertuples())
    return row
