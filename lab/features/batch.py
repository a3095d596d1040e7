"""`lab batch`: B sequences decoded together, one token of each in every step.

A decode step reads all weights to make one token; with B sequences it reads them once for B tokens. Above some B
arithmetic is the limit (the ridge of the roofline). Attention is never shared: every sequence reads its own cache.
T(B) is the mean time of a decode step, throughput B / T(B) in total, efficiency B x T(1) / T(B): B is ideal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from lab.app import experiment
from lab.app.experiment import REPEAT, Numbers, Option, cell
from lab.roofline import step_kernels
from lab.roofline.step_prediction import StepPrediction
from lab.app.options import TOKENS
from lab.core import cost, memory, phases, script
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.lists import grouped, plural
from lab.core.record import COPY, DECODE, OK, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

N_OWN = 16  # last tokens of a shared prompt that differ between sequences: equal prompts would all get the same answer
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ of llama.cpp, which aborts with more
CASE = ["n_prompt", "n_gen", "is_shared", "n_seq"]


@dataclass(frozen=True)
class Batch:
    """`lab batch`: n_seq sequences were decoded together, after prompts of n_prompt tokens each."""

    n_seq: int
    is_shared: bool  # the prompts differ only in their last tokens, and were prefilled once

    @property
    def label(self) -> str:
        return plural(self.n_seq, "sequence") + (", shared prompt" if self.is_shared else "")


def batch_of(run: Run) -> Batch | None:
    """The batch of a run; None for runs of other experiments."""
    return setup_of(Batch, run.case) if run.experiment == "batch" else None


def step_s(run: Run) -> float:
    """The mean time of a decode step."""
    return statistics.fmean(phases.decode_compute_ns(run)) / 1e9


def figures(run: Run) -> dict[str, float]:
    """`prefill_s` of all prompts; `tpot_ms`, a decode step, which gives each sequence one token.

    Empty for a failed run, and for one whose steps do not fit its case.
    """
    batch = batch_of(run)
    steps = run.steps
    if batch is None or run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    ready_ns = [
        ready for kind, ready in zip(steps.kind, steps.ready_ns, strict=True) if kind == PREFILL
    ]
    sizes = {n for kind, n in zip(steps.kind, steps.n_tokens, strict=True) if kind == DECODE}
    if not ready_ns or sizes != {batch.n_seq}:
        return {}
    times = {"prefill_s": ready_ns[-1] / 1e9, "tpot_ms": 1e3 * step_s(run)}
    return times if min(times.values()) > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Batch, case),
    label=lambda case: setup_of(Batch, case).label,
    figures=figures,
    kv_unified="off",
)


def plan(
    worker: Worker,
    /,
    sequences: Annotated[Numbers, Option("Numbers of sequences: 1,4,16.", "-s")] = "1,2,4,8,16",
    prompt_len: Annotated[Numbers, Option("Prompt tokens of each sequence.", "-p")] = "256",
    gen: Annotated[int, Option("Tokens that each sequence generates.", "-n", type=TOKENS)] = 32,
    repeat: Annotated[int | None, REPEAT] = None,
    model: str = catalog.DEFAULT,
    *,
    shared_prompt: Annotated[
        bool, Option("All share a prompt but its last 16 tokens; it is prefilled once.")
    ] = False,
    **settings: Any,
) -> Plan:
    """Decode several sequences together, after prompts of prompt_len tokens each; returns a record per run.

        lab.batch("1,4,16", gen=32)

    With `shared_prompt` the prompts are equal except for their last 16 tokens, and are prefilled once. LabError for
    impossible numbers.
    """
    wanted = experiment.numbers("--sequences", sequences, MOST_SEQUENCES)
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode together.", "Give at least --gen 2.")
    made = make_plan(worker, prompt_len, gen, repeat, model, **settings)
    if shared_prompt:
        experiment.need_every_position(made.model)
        if min(case.n_prompt for case in made.cases) <= N_OWN:
            what = f"--shared-prompt needs prompts of more than {N_OWN} tokens."
            raise LabError(what, "Give longer prompts: --prompt-len 256")
    if (most := max(wanted)) > made.settings.n_batch:
        what = f"{most} sequences do not fit into a batch of {made.settings.n_batch} tokens."
        raise LabError(what, f"Use --batch {most}, or fewer --sequences.")
    cases = [
        Case(
            own.n_prompt,
            gen,
            experiment="batch",
            setup=one,
            sequences=_lengths(one, own.n_prompt, gen, made.settings),
        )
        for own in made.cases
        for one in [Batch(n, shared_prompt) for n in wanted]
    ]
    return with_cases(made, cases, write)


def _lengths(lever: Batch, n_prompt: int, n_gen: int, settings: Settings) -> tuple[int, ...]:
    """Cache positions of each sequence; a prompt that is shared in one cache counts once."""
    own = N_OWN if lever.is_shared and settings.kv_unified else n_prompt
    return (n_prompt + n_gen, *(own + n_gen,) * (lever.n_seq - 1))


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the prompts (several in a step if they fit), then n_gen - 1 steps with one token of each sequence."""
    batch = case.setup
    assert isinstance(batch, Batch)
    n_seq = batch.n_seq
    n_prompt = case.n_prompt
    operations = list[Operation]()
    n_common = n_prompt - N_OWN if batch.is_shared and n_seq > 1 and n_prompt > N_OWN else 0
    if n_common:
        operations += script.prefill(0, text(0, n_common), settings.n_ubatch, is_last=False)
        operations += [Operation(COPY, sequence=0, target=i) for i in range(1, n_seq)]
    prompts = [text(i, n_prompt)[n_common:] for i in range(n_seq)]
    # together, as llama.cpp cuts n_batch tokens into steps of n_ubatch: with separate caches each step has an equal
    # slice of as many prompts as fit into the batch; with one shared cache, whole prompts follow each other
    n_own = n_prompt - n_common
    n_most = settings.n_ubatch if settings.kv_unified else settings.n_batch
    n_together = max(1, min(n_seq, settings.n_ubatch, n_most // n_own))
    for start in range(0, n_seq, n_together):
        group = range(start, min(start + n_together, n_seq))
        n_slice = settings.n_ubatch // len(group)
        for first in range(0, n_own, n_slice):
            end = min(first + n_slice, n_own)
            parts = tuple(Part(i, tuple(prompts[i][first:end]), int(end == n_own)) for i in group)
            operations.append(Operation(PREFILL, parts))
    return [*operations, *script.decode(range(n_seq), case.n_gen - 1)]


def of_runs(records: Sequence[Record]) -> pd.DataFrame:
    """A row per successful run: CASE, `step_s` (T(B)), `prefill_s`, `kv_bytes` of the caches at the end, `record`."""
    import pandas as pd

    runs = []
    for run, lever, one in ((one.run, batch_of(one.run), one) for one in records):
        if lever and (times := figures(run)):
            n_positions = sum(_lengths(lever, run.n_prompt, run.n_gen, one.settings))
            each = (
                memory.kv_bytes_per_position(one.model, one.settings.type_k, one.settings.type_v)
                or math.nan
            )
            times_of = step_s(run), times["prefill_s"], n_positions * each
            runs.append((run.n_prompt, run.n_gen, lever.is_shared, lever.n_seq, *times_of, one))
    return pd.DataFrame(runs, columns=[*CASE, "step_s", "prefill_s", "kv_bytes", "record"])


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each number of sequences of one setup: medians over the successful timed runs.

    `step_s` has the least and largest of a run beside it. `efficiency` is None where one sequence was not measured,
    `expected_s` (predicted) and `ridge` without ceilings.
    """
    if (runs := of_runs(records)).empty:
        return []
    of_cases = runs.groupby(CASE)
    t = of_cases[["step_s", "prefill_s", "kv_bytes"]].median()
    steps = of_cases.step_s
    t = t.assign(n_runs=steps.size(), step_min_s=steps.min(), step_max_s=steps.max()).reset_index()
    one_s = t.step_s.where(t.n_seq == 1).groupby([t[name] for name in CASE[:3]]).transform("max")
    t = t.assign(
        total_tps=t.n_seq / t.step_s, user_tps=1 / t.step_s, efficiency=t.n_seq * one_s / t.step_s
    )
    t = t.assign(kv_bytes=t.kv_bytes.round().astype("Int64"), expected_s=None, ridge=None)
    if prediction:
        lengths = list(zip(t.n_prompt, t.n_gen, strict=True))
        t["expected_s"] = [
            expected_s(prediction, *own, n) for own, n in zip(lengths, t.n_seq, strict=True)
        ]
        t["ridge"] = [ridge(prediction, *own) for own in lengths]
    return experiment.as_rows(t)


def alike(rows: Sequence[Any]) -> list[list[Any]]:
    """Rows that differ only in the number of sequences, together."""
    return list(grouped(rows, lambda row: row[:3]).values())


def expected_s(prediction: StepPrediction, n_prompt: int, n_gen: int, n_seq: int) -> float | None:
    """T(B) in the middle of the answers."""
    n_past = n_prompt + max(0, n_gen - 2) // 2
    return prediction.seconds(1, n_past, n_seq, [(1, n_past)] * (n_seq - 1))


def ridge(prediction: StepPrediction, n_prompt: int, n_gen: int) -> float | None:
    """The number of sequences at which arithmetic takes as long as memory traffic, from the ceilings.

    The weights are read once for all sequences; each adds FLOPs, and its own cache to the bytes. None if the model's
    cost is unknown, if each sequence adds more traffic than arithmetic, and for one cache of all (`kv_unified`).
    """
    settings = prediction.settings
    n_past = n_prompt + n_gen // 2
    best = step_kernels.roof(prediction.ceilings)
    types = settings.type_k, settings.type_v
    one = cost.step(prediction.model, 1, n_past, 1, *types)
    two = cost.step(prediction.model, 1, n_past, 2, *types, [(1, n_past)])
    if one is None or two is None or settings.kv_unified:
        return None
    arithmetic_s = (two.flops - one.flops) / best.gflops
    more_traffic_s = (two.n_bytes - one.n_bytes) / best.gbps
    weights_s = one.n_bytes / best.gbps - more_traffic_s
    each_s = arithmetic_s - more_traffic_s
    return weights_s / each_s if each_s > 0 else None


def sentences(rows: Sequence[Any]) -> list[str]:
    """What rows of one setup show, in words."""
    words = list[str]()
    for own in alike(rows):
        most = own[-1]
        best = max(own, key=lambda row: row.total_tps)
        if most.efficiency is not None and most.n_seq > 1:
            highest = (
                f" Throughput is highest with {best.n_seq}."
                if best.n_seq not in (1, most.n_seq)
                else ""
            )
            words.append(
                f"{most.n_seq} sequences together: {digits(most.efficiency)}x the tokens/s of one in total, "
                f"{digits(most.user_tps / own[0].user_tps)}x per user.{highest}"
            )
        if most.ridge is not None:
            words.append(
                f"Above about {digits(most.ridge)} sequences arithmetic is the limit, say the ceilings."
            )
        words += experiment.off_by(((row.expected_s, row.step_s) for row in own), "step times")
    return words


def draw(rows: Sequence[Any], records: Sequence[Record], subject: str, figure: Figure) -> None:
    """The total rate (left) and the rate per user (right); grey lines: the rates if sharing a step cost nothing."""
    runs = of_runs(records)
    first = rows[0]
    groups = alike(rows)
    for ax, whose, power in zip(
        figure.subplots(1, 2), ("all sequences", "each sequence"), (1, 0), strict=True
    ):
        for own, style in zip(groups, canvas.styles(len(groups), canvas.OF_DECODE), strict=True):
            measured = runs[(runs[CASE[:3]] == list(own[0][:3])).all(axis=1)]
            experiment.plot_series(
                ax,
                f"{own[0].n_prompt:,} prompt tokens{', shared' if own[0].is_shared else ''}",
                style,
                [
                    (one.n_seq, one.n_seq**power / one.step_s, [one.record])
                    for one in measured.itertuples()
                ],
                [(row.n_seq, row.n_seq**power / row.step_s) for row in own],
                [(row.n_seq, row.n_seq**power / row.expected_s) for row in own if row.expected_s],
            )
        if first.n_seq == 1:
            ideal = [(row.n_seq, first.user_tps * row.n_seq**power) for row in groups[0]]
            label = "if sharing a step cost nothing"
            ax.plot(*zip(*ideal, strict=True), color=canvas.GUIDE, ls=":", lw=1.2, label=label)
        if first.ridge is not None and 1 <= first.ridge <= rows[-1].n_seq:
            label = f"ridge: arithmetic is the limit from {digits(first.ridge)} sequences"
            ax.axvline(first.ridge, color=canvas.GUIDE, ls="-.", lw=1, label=label)
        canvas.over_lengths(ax, [row.n_seq for row in rows])
        ax.set(xlabel="sequences in a step", yscale="log", ylabel=f"tokens per second, {whose}")
    canvas.finish(figure.axes, f"Sequences decoded together\n{subject}")


TABLE = experiment.Table(
    name="batch",
    question="How many sequences at once, and what does it cost each?",
    title="sequences decoded together; medians over runs, their range below",
    caption="Tokens per second in total and per user, over the number of sequences in a step. Points are runs, the "
    "line is the median, dashes are predictions.",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}{' shared' if row.is_shared else ''}"),
        ("sequences", lambda row: f"{row.n_seq:,}"),
        ("runs", lambda row: str(row.n_runs)),
        (
            "step\nms",
            lambda row: experiment.ranged(row.step_s, row.step_min_s, row.step_max_s, row.n_runs),
        ),
        ("predicted\nms", lambda row: cell(row.expected_s, 1e3)),
        ("tokens/s\nin total", lambda row: cell(row.total_tps)),
        ("tokens/s\nper user", lambda row: cell(row.user_tps)),
        ("efficiency", lambda row: "-" if row.efficiency is None else f"{cell(row.efficiency)}x"),
        ("prefill\ns", lambda row: cell(row.prefill_s)),
        ("KV cache\nMB", lambda row: cell(row.kv_bytes, 1e-6)),
    ),
    rows=rows,
    conclude=lambda rows, _: sentences(rows),
    draw=draw,
)

EXPERIMENT = experiment.Experiment(
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
    plan=plan,
    tables=(TABLE,),
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(),)
batch = experiment.public("batch", plan)
