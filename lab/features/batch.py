"""`lab batch`: B sequences decoded together, one token of each in every step.

A decode step reads all weights to make one token. With B sequences in the step it reads them once for B tokens. While
memory traffic is the limit, the step takes hardly longer, and B users are served in the time of one. Above some B
arithmetic is the limit (the ridge of the roofline), and each further sequence adds time. Attention is never shared:
every sequence reads its own cache.

T(B) is the mean time of a decode step. Throughput is B / T(B) tokens per second in total and 1 / T(B) per user.
Efficiency is B x T(1) / T(B): 1 is no gain, B is ideal.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from lab.core import cost, lever_figures, memory, script
from lab.core.levers import Batch
from lab.core.lists import grouped, join_and
from lab.core.record import COPY, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.common import as_lengths, cell, listed, need_every_position, numbers, off_by, ranged, sentence
from lab.features.experiment import REPEAT, Experiment, Keywords, Option, Table, for_plan, public
from lab.features.limits import roofline
from lab.features.limits.step_prediction import StepPrediction
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_OWN = 16
"""Last tokens of a shared prompt that differ between sequences: equal prompts would all get the same answer."""

MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp, which aborts with more."""


@dataclass(frozen=True)
class Row:
    """One number of sequences of one setup: medians over runs, and the least and largest step time of a run.

    `expected_s` is the predicted T(B), None without ceilings; `kv_bytes` the size of the sequences' caches at the end.
    """

    n_prompt: int
    n_gen: int
    n_seq: int
    is_shared: bool
    n_runs: int
    step_s: float
    step_min_s: float
    step_max_s: float
    total_tps: float
    user_tps: float
    efficiency: float | None  # None where one sequence was not measured
    prefill_s: float
    kv_bytes: int | None
    expected_s: float | None


def plan(
    worker: Worker,
    /,
    sequences: str | int | Sequence[int] = "1,2,4,8,16",
    prompt_len: str | int | Sequence[int] = "256",
    gen: int = 32,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    shared_prompt: bool = False,
    **settings: Unpack[Keywords],
) -> Plan:
    """Decode several sequences together, after prompts of prompt_len tokens each; returns a record per run.

        lab.batch("1,4,16", gen=32)

    With `shared_prompt` the prompts are equal except for their last 16 tokens, and are prefilled once. LabError for
    impossible numbers.
    """
    wanted = numbers("--sequences", sequences, MOST_SEQUENCES)
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode together.", "Give at least --gen 2.")
    made = make_plan(worker, as_lengths(prompt_len), gen, repeat, model, **for_plan(settings))
    if shared_prompt:
        need_every_position(made.model)
    if shared_prompt and min(case.n_prompt for case in made.cases) <= N_OWN:
        raise LabError(
            f"--shared-prompt needs prompts of more than {N_OWN} tokens.", "Give longer prompts: --prompt-len 256"
        )
    if max(wanted) > made.settings.n_batch:
        raise LabError(
            f"{max(wanted)} sequences do not fit into a batch of {made.settings.n_batch} tokens.",
            f"Use --batch {max(wanted)}, or fewer --sequences.",
        )
    levers = [Batch(n, shared_prompt) for n in wanted]
    return with_cases(
        made, [_case(own.n_prompt, gen, one, made.settings) for own in made.cases for one in levers], write
    )


def _case(n_prompt: int, gen: int, lever: Batch, settings: Settings) -> Case:
    return Case(n_prompt, gen, lever=lever, sequences=_lengths(lever, n_prompt, gen, settings))


def _lengths(lever: Batch, n_prompt: int, n_gen: int, settings: Settings) -> tuple[int, ...]:
    """Cache positions of each sequence; a prompt that is shared in one cache counts once."""
    own = N_OWN if lever.is_shared and settings.kv_unified else n_prompt
    return (n_prompt + n_gen, *(own + n_gen,) * (lever.n_seq - 1))


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the prompts (several in a step if they fit), then n_gen - 1 steps with one token of each sequence."""
    assert isinstance(case.lever, Batch)
    n_seq, n_prompt = case.lever.n_seq, case.n_prompt
    n_common = n_prompt - N_OWN if case.lever.is_shared and n_seq > 1 and n_prompt > N_OWN else 0
    operations: list[Operation] = []
    if n_common:
        operations += script.prefill(0, text(0, n_common), settings.n_ubatch, is_last=False)
        operations += [Operation(COPY, sequence=0, target=i) for i in range(1, n_seq)]
    prompts = {i: text(i, n_prompt)[n_common:] for i in range(n_seq)}
    return [*operations, *_prefill(prompts, settings), *script.decode(range(n_seq), case.n_gen - 1)]


def _prefill(prompts: Mapping[int, Sequence[int]], settings: Settings) -> list[Operation]:
    """Prompts of equal length (by sequence) together, as llama.cpp cuts n_batch tokens into steps of n_ubatch.

    With separate caches, each step has an equal slice of as many prompts as fit into the batch. With one shared cache,
    whole prompts follow each other.
    """
    sequences, n_prompt = list(prompts), len(next(iter(prompts.values())))
    n_most = settings.n_ubatch if settings.kv_unified else settings.n_batch
    n_together = max(1, min(len(prompts), settings.n_ubatch, n_most // n_prompt))
    operations = []
    for start in range(0, len(prompts), n_together):
        group = sequences[start : start + n_together]
        n_slice = settings.n_ubatch // len(group)
        for first in range(0, n_prompt, n_slice):
            end = min(first + n_slice, n_prompt)
            parts = tuple(Part(i, tuple(prompts[i][first:end]), int(end == n_prompt)) for i in group)
            operations.append(Operation(PREFILL, parts))
    return operations


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of sequences, from the successful timed runs of one setup."""
    good = [record for record in records if record.run.batch and lever_figures.figures(record.run)]
    by_case = grouped(good, lambda record: (record.run.n_prompt, record.run.n_gen, record.run.batch))
    step_s = {
        case: statistics.median(lever_figures.step_s(record.run) for record in own) for case, own in by_case.items()
    }
    made = []
    for (n_prompt, n_gen, lever), own in by_case.items():
        assert lever is not None
        first, times = own[0], [lever_figures.step_s(record.run) for record in own]
        n, step = lever.n_seq, statistics.median(times)
        one = step_s.get((n_prompt, n_gen, Batch(1, lever.is_shared)))
        per_position = memory.kv_bytes_per_position(first.model, first.settings.type_k, first.settings.type_v)
        n_positions = sum(_lengths(lever, n_prompt, n_gen, first.settings))
        made.append(
            Row(
                n_prompt=n_prompt,
                n_gen=n_gen,
                n_seq=n,
                is_shared=lever.is_shared,
                n_runs=len(times),
                step_s=step,
                step_min_s=min(times),
                step_max_s=max(times),
                total_tps=n / step,
                user_tps=1 / step,
                efficiency=None if one is None else n * one / step,
                prefill_s=statistics.median(lever_figures.batch(record.run)["prefill_s"] for record in own),
                kv_bytes=None if per_position is None else round(n_positions * per_position),
                expected_s=expected_s(prediction, n_prompt, n_gen, n) if prediction else None,
            )
        )
    return sorted(made, key=lambda row: (row.n_prompt, row.n_gen, row.is_shared, row.n_seq))


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ only in the number of sequences, together."""
    return list(grouped(rows, lambda row: (row.n_prompt, row.n_gen, row.is_shared)).values())


def expected_s(prediction: StepPrediction, n_prompt: int, n_gen: int, n_seq: int) -> float | None:
    """T(B) in the middle of the answers."""
    n_past = n_prompt + max(0, n_gen - 2) // 2
    return prediction.seconds(1, n_past, n_seq, [(1, n_past)] * (n_seq - 1))


def knee(measured: Sequence[Row]) -> float | None:
    """The number of sequences at which a step takes twice as long as with one (interpolated); None if not reached."""
    times = [(row.n_seq, row.step_s) for row in measured]
    if not times or times[0][0] != 1:
        return None
    limit = 2 * times[0][1]
    for (n, seconds), (n_next, seconds_next) in itertools.pairwise(times):
        if seconds <= limit < seconds_next:
            share = (limit - seconds) / (seconds_next - seconds)
            return math.exp((1 - share) * math.log(n) + share * math.log(n_next))
    return None


def ridge(prediction: StepPrediction, n_prompt: int, n_gen: int) -> float | None:
    """The number of sequences at which arithmetic takes as long as memory traffic, from the ceilings.

    The weights are read once for all sequences; each adds FLOPs, and its own cache to the bytes. In one cache for all
    (`kv_unified`) attention computes every pair of sequences. None if the model's cost is unknown, or if each sequence
    adds more traffic than arithmetic.
    """
    settings, n_past = prediction.settings, n_prompt + n_gen // 2
    types = settings.type_k, settings.type_v
    one = cost.step(prediction.model, 1, n_past, 1, *types)
    two, unified = (
        cost.step(prediction.model, 1, n_past, 2, *types, [(1, n_past)], shared) for shared in (False, True)
    )
    if one is None or two is None or unified is None:
        return None
    best = roofline.roof(prediction.ceilings)
    arithmetic_s, more_traffic_s = (two.flops - one.flops) / best.gflops, (two.n_bytes - one.n_bytes) / best.gbps
    weights_s, each_s = one.n_bytes / best.gbps - more_traffic_s, arithmetic_s - more_traffic_s
    if not settings.kv_unified:
        return weights_s / each_s if each_s > 0 else None
    pair_s = (unified.flops - two.flops) / 2 / best.gflops  # a token with another sequence's positions
    each_s -= pair_s
    return (math.sqrt(each_s**2 + 4 * pair_s * weights_s) - each_s) / (2 * pair_s)  # n each_s + n^2 pair_s = weights_s


def sentences(measured: Sequence[Row], prediction: StepPrediction | None) -> list[str]:
    """What rows of one setup and prompt length show, in words."""
    if not measured:
        return []
    words, most, best = [], measured[-1], max(measured, key=lambda row: row.total_tps)
    if most.efficiency is not None and most.n_seq > 1:
        share = most.user_tps / measured[0].user_tps
        highest = f" Throughput is highest with {best.n_seq}." if best.n_seq not in (1, most.n_seq) else ""
        words.append(
            f"{most.n_seq} sequences together: {digits(most.efficiency)}x the tokens/s of one in total, "
            f"{digits(share)}x per user.{highest}"
        )
        worse = [str(row.n_seq) for row in measured[1:] if row.efficiency is not None and row.efficiency < 1]
        if worse:
            words.append(
                f"With {join_and(worse)} sequences the total is lower than with one: a step with a single token uses "
                "a different kernel."
            )
    doubled = knee(measured)
    at_ridge = ridge(prediction, measured[0].n_prompt, measured[0].n_gen) if prediction else None
    limits = list[str]()
    if doubled is not None:
        limits.append(f"with about {digits(doubled)} sequences a step takes twice as long as with one")
    elif len(measured) > 1 and measured[0].n_seq == 1:
        limits.append(f"with up to {most.n_seq} sequences a step takes less than twice as long as with one")
    if at_ridge is not None:
        limits.append(f"above about {digits(at_ridge)} arithmetic is the limit, according to the ceilings")
    if limits:
        words.append(sentence("; ".join(limits)))
    return words + off_by(((row.expected_s, row.step_s) for row in measured), "step times")


def draw(
    rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """The total rate (left) and the rate per user (right), from rows and runs of one setup.

    The grey lines show the rates if sharing a step cost nothing.
    """
    at_ridge = ridge(prediction, rows[0].n_prompt, rows[0].n_gen) if prediction else None
    parts = canvas.in_parts(alike(rows))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    axes = figure.subplots(len(parts), 2, squeeze=False, sharex=True)
    for part, pair in zip(parts, axes, strict=True):
        for ax, whose, scale in zip(pair, ("all sequences", "each sequence"), (1, 0), strict=True):
            for group, style in zip(part, canvas.styles(len(part)), strict=True):
                _rates(ax, group, records, scale, style)
            first = part[0][0]
            if first.n_seq == 1:
                numbers = [row.n_seq for row in part[0]]
                rates = [first.user_tps * (n if scale else 1) for n in numbers]
                ax.plot(numbers, rates, color=canvas.GUIDE, ls=":", lw=1.2, label="if sharing a step cost nothing")
            if at_ridge is not None and 1 <= at_ridge <= rows[-1].n_seq:
                label = f"ridge: arithmetic is the limit from {digits(at_ridge)} sequences"
                ax.axvline(at_ridge, color=canvas.GUIDE, ls="-.", lw=1, label=label)
            canvas.over_lengths(ax, [row.n_seq for row in rows])
            ax.set_xlabel("sequences in a step")
            ax.set_yscale("log")
            ax.set_ylabel(f"tokens per second, {whose}")
    canvas.finish(list(axes.flat), f"Sequences decoded together\n{subject}")


def _rates(ax: Axes, rows: Sequence[Row], records: Sequence[Record], scale: int, style: dict[str, Any]) -> None:
    """The rates of one prompt length; `scale` 1: of all sequences together, 0: of each."""
    first, colour = rows[0], style["color"]
    name = f"{first.n_prompt:,} prompt tokens{', shared' if first.is_shared else ''}"
    medians = [row.n_seq**scale / row.step_s for row in rows]
    ax.plot([row.n_seq for row in rows], medians, color=colour, lw=2, label=f"{name}: median")
    of_runs = [
        (record.run.batch.n_seq, record.run.batch.n_seq**scale / lever_figures.step_s(record.run), record)
        for record in records
        if record.run.batch is not None
        and (record.run.n_prompt, record.run.n_gen, record.run.batch.is_shared)
        == (first.n_prompt, first.n_gen, first.is_shared)
        and lever_figures.figures(record.run)
    ]
    canvas.runs(ax, of_runs, **style, label=f"{name}: runs")
    expected = [(row.n_seq, row.n_seq**scale / row.expected_s) for row in rows if row.expected_s]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label=f"{name}: predicted")


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.batch for run in runs if run.batch]
    return {
        "sequences": listed(lever.n_seq for lever in levers),
        "prompt_len": listed(run.n_prompt for run in runs),
        "gen": runs[0].n_gen,
        "shared_prompt": levers[0].is_shared or None,
    }


TABLE = Table(
    name="batch",
    question="How many sequences at once, and what does it cost each?",
    title="sequences decoded together; medians over runs, their range below",
    caption="Tokens per second in total and per user, over the number of sequences in a step. Points are runs, the "
    "line is the median, dashes are predictions.",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}{' shared' if row.is_shared else ''}"),
        ("sequences", lambda row: f"{row.n_seq:,}"),
        ("runs", lambda row: str(row.n_runs)),
        ("step\nms", lambda row: ranged((row.step_s, row.step_min_s, row.step_max_s), row.n_runs)),
        ("predicted\nms", lambda row: cell(row.expected_s, 1e3)),
        ("tokens/s\nin total", lambda row: cell(row.total_tps)),
        ("tokens/s\nper user", lambda row: cell(row.user_tps)),
        ("efficiency", lambda row: "-" if row.efficiency is None else f"{cell(row.efficiency)}x"),
        ("prefill\ns", lambda row: cell(row.prefill_s)),
        ("KV cache\nMB", lambda row: cell(row.kv_bytes, 1e-6)),
    ),
    rows=rows,
    conclude=lambda rows, records, prediction: (
        [words for group in alike(rows) for words in sentences(group, prediction)],
        {},
    ),
    draw=draw,
)

EXPERIMENT = Experiment(
    name="batch",
    chapter="Batches",
    about="""Measure what decoding several answers together gains.

    \b
      lab batch --sequences 1,4,16 --prompt-len 256
      lab batch --sequences 1,8 --kv-unified on --shared-prompt

    A step with B sequences reads the weights once for B tokens. For each B the command shows the time of a step, the
    tokens per second in total and per user, and the prediction from the ceilings. It also shows from which B on
    arithmetic is the limit.
    """,
    lever=Batch,
    plan=plan,
    options=(
        Option("sequences", "Numbers of sequences: 1,4,16.", "s"),
        Option("prompt_len", "Prompt tokens of each sequence.", "p"),
        Option("gen", "Tokens that each sequence generates.", "n"),
        Option("shared_prompt", "All sequences share one prompt except for its last 16 tokens; it is prefilled once."),
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
)

batch = public("batch", plan)
