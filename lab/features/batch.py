"""`lab batch`: B sequences decoded together, one token of each in every step.

A decode step reads all weights to make one token. With B sequences in the step it reads them once for B tokens. While
memory traffic is the limit, the step takes hardly longer, and B users are served in the time of one. Above some B
arithmetic is the limit (the ridge of the roofline), and each further sequence adds time. Attention is never shared:
every sequence reads its own cache.

T(B) is the mean time of a decode step. Throughput is B / T(B) tokens per second in total and 1 / T(B) per user.
Efficiency is B x T(1) / T(B): 1 is no gain, B is ideal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from lab.core import cost, memory, phases, script
from lab.core.lists import grouped
from lab.core.payloads import Batch
from lab.core.record import COPY, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.experiment import (
    REPEAT,
    Experiment,
    Keywords,
    Option,
    Table,
    as_lengths,
    as_rows,
    cell,
    for_plan,
    listed,
    need_every_position,
    numbers,
    off_by,
    public,
    ranged,
)
from lab.features.limits import step_kernels
from lab.features.predict.learning import StepPrediction
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_OWN = 16  # last tokens of a shared prompt that differ between sequences: equal prompts would all get the same answer
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ of llama.cpp, which aborts with more
CASE = ["n_prompt", "n_gen", "is_shared", "n_seq"]


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
        if min(case.n_prompt for case in made.cases) <= N_OWN:
            what = f"--shared-prompt needs prompts of more than {N_OWN} tokens."
            raise LabError(what, "Give longer prompts: --prompt-len 256")
    if max(wanted) > made.settings.n_batch:
        raise LabError(
            f"{max(wanted)} sequences do not fit into a batch of {made.settings.n_batch} tokens.",
            f"Use --batch {max(wanted)}, or fewer --sequences.",
        )
    cases = [
        Case(own.n_prompt, gen, lever=one, sequences=_lengths(one, own.n_prompt, gen, made.settings))
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
    assert isinstance(case.lever, Batch)
    n_seq, n_prompt = case.lever.n_seq, case.n_prompt
    n_common = n_prompt - N_OWN if case.lever.is_shared and n_seq > 1 and n_prompt > N_OWN else 0
    operations: list[Operation] = []
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


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each number of sequences of one setup: medians over the successful timed runs.

    `step_s` is T(B), with the least and largest of a run. `kv_bytes` is the size of the caches at the end. `efficiency`
    is None where one sequence was not measured, `expected_s` (predicted) without ceilings.
    """
    import pandas as pd

    known = [(one.run, taken) for one in records if (taken := phases.figures(one.run))]
    runs = [(*_case_of(run), phases.step_s(run), taken["prefill_s"]) for run, taken in known]
    if not runs:
        return []
    of_cases = pd.DataFrame(runs, columns=[*CASE, "step_s", "prefill_s"]).groupby(CASE)
    steps = of_cases.step_s
    t = of_cases.median().assign(n_runs=steps.size(), step_min_s=steps.min(), step_max_s=steps.max()).reset_index()
    one_s = t.step_s.where(t.n_seq == 1).groupby([t[name] for name in CASE[:3]]).transform("max")
    t = t.assign(total_tps=t.n_seq / t.step_s, user_tps=1 / t.step_s, efficiency=t.n_seq * one_s / t.step_s)
    model, settings, cases = records[0].model, records[0].settings, as_rows(t[CASE])
    each = memory.kv_bytes_per_position(model, settings.type_k, settings.type_v)
    lengths = [_lengths(Batch(n_seq, shared), n_prompt, n_gen, settings) for n_prompt, n_gen, shared, n_seq in cases]
    t["kv_bytes"] = pd.array([None if each is None else round(sum(one) * each) for one in lengths], dtype="Int64")
    t["expected_s"] = [expected_s(prediction, one.n_prompt, one.n_gen, one.n_seq) for one in cases]
    return as_rows(t)


def alike(rows: Sequence[Any]) -> list[list[Any]]:
    """Rows that differ only in the number of sequences, together."""
    return list(grouped(rows, lambda row: (row.n_prompt, row.n_gen, row.is_shared)).values())


def expected_s(prediction: StepPrediction | None, n_prompt: int, n_gen: int, n_seq: int) -> float | None:
    """T(B) in the middle of the answers."""
    n_past = n_prompt + max(0, n_gen - 2) // 2
    return prediction.seconds(1, n_past, n_seq, [(1, n_past)] * (n_seq - 1)) if prediction else None


def ridge(prediction: StepPrediction, n_prompt: int, n_gen: int) -> float | None:
    """The number of sequences at which arithmetic takes as long as memory traffic, from the ceilings.

    The weights are read once for all sequences; each adds FLOPs, and its own cache to the bytes. None if the model's
    cost is unknown, if each sequence adds more traffic than arithmetic, and for one cache of all (`kv_unified`).
    """
    settings, n_past = prediction.settings, n_prompt + n_gen // 2
    types = settings.type_k, settings.type_v
    one = cost.step(prediction.model, 1, n_past, 1, *types)
    two = cost.step(prediction.model, 1, n_past, 2, *types, [(1, n_past)])
    if one is None or two is None or settings.kv_unified:
        return None
    best = step_kernels.roof(prediction.ceilings)
    arithmetic_s, more_traffic_s = (two.flops - one.flops) / best.gflops, (two.n_bytes - one.n_bytes) / best.gbps
    weights_s, each_s = one.n_bytes / best.gbps - more_traffic_s, arithmetic_s - more_traffic_s
    return weights_s / each_s if each_s > 0 else None


def sentences(measured: Sequence[Any], prediction: StepPrediction | None) -> list[str]:
    """What rows of one setup and prompt length show, in words."""
    if not measured:
        return []
    words, most = list[str](), measured[-1]
    best = max(measured, key=lambda row: row.total_tps)
    if most.efficiency is not None and most.n_seq > 1:
        share = most.user_tps / measured[0].user_tps
        highest = f" Throughput is highest with {best.n_seq}." if best.n_seq not in (1, most.n_seq) else ""
        words.append(
            f"{most.n_seq} sequences together: {digits(most.efficiency)}x the tokens/s of one in total, "
            f"{digits(share)}x per user.{highest}"
        )
    at_ridge = ridge(prediction, measured[0].n_prompt, measured[0].n_gen) if prediction else None
    if at_ridge is not None:
        words.append(f"Above about {digits(at_ridge)} sequences arithmetic is the limit, according to the ceilings.")
    return words + off_by(((row.expected_s, row.step_s) for row in measured), "step times")


def draw(
    rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """The total rate (left) and the rate per user (right), from rows and runs of one setup.

    The grey lines show the rates if sharing a step cost nothing.
    """
    at_ridge = ridge(prediction, rows[0].n_prompt, rows[0].n_gen) if prediction else None
    runs = grouped((one for one in records if phases.figures(one.run)), lambda one: _case_of(one.run)[:3])
    parts = canvas.in_parts(alike(rows))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    axes = figure.subplots(len(parts), 2, squeeze=False, sharex=True)
    for part, pair in zip(parts, axes, strict=True):
        for ax, whose, power in zip(pair, ("all sequences", "each sequence"), (1, 0), strict=True):
            for group, style in zip(part, canvas.styles(len(part), canvas.OF_DECODE), strict=True):
                first, colour = group[0], style["color"]
                name = f"{first.n_prompt:,} prompt tokens{', shared' if first.is_shared else ''}"
                medians = [row.n_seq**power / row.step_s for row in group]
                ax.plot([row.n_seq for row in group], medians, color=colour, lw=2, label=f"{name}: median")
                own = [(_case_of(one.run)[3], one) for one in runs[first.n_prompt, first.n_gen, first.is_shared]]
                points = [(n, n**power / phases.step_s(one.run), one) for n, one in own]
                canvas.runs(ax, points, **style, label=f"{name}: runs")
                if expected := [(row.n_seq, row.n_seq**power / row.expected_s) for row in group if row.expected_s]:
                    label = f"{name}: predicted"
                    ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label=label)
            first = part[0][0]
            if first.n_seq == 1:
                ideal = [(row.n_seq, first.user_tps * row.n_seq**power) for row in part[0]]
                label = "if sharing a step cost nothing"
                ax.plot(*zip(*ideal, strict=True), color=canvas.GUIDE, ls=":", lw=1.2, label=label)
            if at_ridge is not None and 1 <= at_ridge <= rows[-1].n_seq:
                label = f"ridge: arithmetic is the limit from {digits(at_ridge)} sequences"
                ax.axvline(at_ridge, color=canvas.GUIDE, ls="-.", lw=1, label=label)
            canvas.over_lengths(ax, [row.n_seq for row in rows])
            ax.set(xlabel="sequences in a step", yscale="log", ylabel=f"tokens per second, {whose}")
    canvas.finish(list(axes.flat), f"Sequences decoded together\n{subject}")


def _case_of(run: Run) -> tuple[int, int, bool, int]:
    """What tells the runs of a batch apart, in the order of CASE."""
    assert run.batch is not None
    return run.n_prompt, run.n_gen, run.batch.is_shared, run.batch.n_seq


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
    conclude=lambda rows, _, prediction: [one for group in alike(rows) for one in sentences(group, prediction)],
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

command, KINDS = EXPERIMENT.as_command(), (EXPERIMENT.as_kind(),)
batch = public("batch", plan)
