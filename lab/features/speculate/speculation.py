"""`lab speculate`: draft n tokens, verify them in one step. Does it pay?

A step of n + 1 positions reads the weights once, like a step of one. If n tokens are drafted, the model verifies them
all in one step and keeps those that it would have chosen. The text stays the same; the speed depends on three figures:

- L, tokens per step: how many drafted tokens are accepted
- c, the cost of a drafted token: a step of the draft model over a step of the model (0 for lookup in the text)
- v(n), the cost of verifying: a step of n + 1 positions over a step of one. If memory traffic is the limit, v is about
  1; if arithmetic is, as on most CPUs, v is larger

Speed-up = L / (n c + v(n)). The curve v(n) and c are measured in separate steps, which are forgotten again. Acceptance
comes from the runs with the longest drafts. The speed-up of every other draft length is predicted from these.
Leviathan et al. (2023) assume v = 1.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.app import experiment, experiment_tables
from lab.app.experiment_tables import cell
from lab.app.options import MODEL, TOKENS
from lab.core import guesses, script, stats
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.guesses import LOOKUP, Chain, StepTimes
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, DRAFT, FORGET, OK, PREFILL, VERIFY, Record, Run, Settings
from lab.core.script import SPECULATE, Operation, Part
from lab.errors import LabError
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.roofline.step_prediction import StepPrediction
from lab.runner import prompts
from lab.runner.cases import Case, Draft, Plan, Text
from lab.runner.plan import make_plan, parse_lengths, read_header, with_cases
from lab.runner.progress import ShowStatus
from lab.runner.refusals import Numbers, need_every_position, whole_numbers
from lab.show import canvas
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DEFAULT_TEXTS = "code,table,story,dialogue"
DRAFTS = "Where drafts come from: lookup (what followed the same words before) or a model.  [default: lookup]"
BLOCKS = "Blocks, each with a fresh engine and other prompts.  [default: 6]"
TEXTS = f"Kinds of text, or a text file.  [default: {DEFAULT_TEXTS}]"

N_TIMES = 5
N_IN_A_ROW = 4
"""Measurements of each step of the curve in a run, and steps of one in each: directly after a large step it is slow."""

CASE = ["text", "n_prompt", "n_gen", "draft", "n_draft"]
BLOCK = ["session", "repeat", "engine"]  # compared runs had the same process


@dataclass(frozen=True)
class Speculation:
    """`lab speculate`: tokens were drafted and verified together; or, without a text, only single steps were timed."""

    draft: str | None  # LOOKUP (earlier words of the text), a model's label; None: no drafts
    n_draft: int  # drafted before each verification, at most; 0: plain decoding
    text: (
        str | None
    )  # the prompt's source; None: steps of 1 to n_draft + 1 positions and of the draft, each forgotten

    @property
    def label(self) -> str:
        if self.text is None:
            return f"steps of 1 to {self.n_draft + 1} positions"
        return f"{self.text}, " + (
            f"{self.n_draft} drafted by {self.draft}" if self.n_draft else "no drafts"
        )


def speculation_of(run: Run) -> Speculation | None:
    """The speculation of a run; None for runs of other experiments."""
    return setup_of(Speculation, run.case) if run.experiment == "speculate" else None


def is_curve(run: Run) -> bool:
    """Whether the run timed single steps."""
    speculation = speculation_of(run)
    return speculation is not None and speculation.text is None


def figures(run: Run) -> dict[str, float]:
    """`tpot_ms` of all tokens after the first, with drafting and forgetting.

    Empty for a failed run, and for one of single steps.
    """
    speculation = speculation_of(run)
    steps = run.steps
    if speculation is None or speculation.text is None or run.status != OK or run.n_gen < 2:
        return {}
    if run.n_prompt < 1 or PREFILL not in steps.kind:
        return {}
    last_prefill = max(i for i, kind in enumerate(steps.kind) if kind == PREFILL)
    decode_ns = steps.end_ns[-1] - steps.end_ns[last_prefill]
    return {"tpot_ms": decode_ns / 1e6 / (run.n_gen - 1)} if decode_ns > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Speculation, case),
    label=lambda case: setup_of(Speculation, case).label,
    figures=figures,
)
MOST_PANELS = 8


def plan(
    worker: Worker,
    draft: str | None,
    draft_len: Numbers,
    prompt_len: Numbers,
    gen: int,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    prompt: str | None = None,
    **settings: Any,
) -> Plan:
    """Blocks of all draft lengths and texts. LabError for impossible values."""
    is_random = catalog.parse(model).source == catalog.SYNTHETIC
    if is_random and (draft is not None or prompt not in (None, prompts.RANDOM)):
        what = f"{model} has random weights, so the acceptance of drafts says nothing."
        raise LabError(what, "Leave --draft and --prompt out: then only steps are timed.")
    if prompt == prompts.RANDOM and not is_random:
        raise LabError(
            "Random tokens cannot be predicted.",
            f"Give texts: --prompt {DEFAULT_TEXTS}, or a text file.",
        )
    texts = list(dict.fromkeys(name.strip() for name in (prompt or DEFAULT_TEXTS).split(",")))
    if is_random:
        texts = [prompts.RANDOM]
    elif prompt == prompts.TEXT:
        texts = prompts.own_texts()
    elif prompt and not set(texts) <= set(prompts.own_texts()):
        texts = [prompt]  # a file
    repeat = stats.fewest_for_interval() if repeat is None else repeat
    made = make_plan(worker, prompt_len, gen, repeat, model, prompt=",".join(texts), **settings)
    lengths = whole_numbers("--draft-len", parse_lengths(draft_len, "--draft-len"), 2**20)
    longest = lengths[-1]
    most = min(made.settings.n_ubatch, made.settings.n_batch) - 1
    if longest > most:
        what = f"{longest:,} drafted tokens and the token before them do not fit into one step of {most + 1:,} tokens."
        raise LabError(what, f"Use a --draft-len of at most {most:,}, or a larger --ubatch.")
    if longest > gen - 2:
        what = f"--gen {gen:,} is too short for drafts of {longest:,} tokens."
        raise LabError(
            what, f"Use --gen {longest + 2:,} or more; at least 64 gives useful results."
        )
    need_every_position(made.model)
    label = None if is_random else LOOKUP
    if draft not in (None, LOOKUP):
        file = obtain.obtain(
            catalog.parse(str(draft)), worker, settings.get("watch", obtain.silently)
        )
        drafting = read_header(worker, file)
        need_every_position(drafting)
        label, own = (
            f"{one.name} {one.quantization or ''}".strip() for one in (drafting, made.model)
        )
        differ = worker.vocabularies_differ(made.file.path, file.path)
        if differ or file.source == catalog.SYNTHETIC:
            what = f"The vocabularies of {label} and {own} differ: {differ or 'the draft has random weights'}."
            raise LabError(
                what, "Use a smaller model of the same family, or a smaller quantization."
            )
        made = dataclasses.replace(made, draft=Draft(file, drafting))
    levers = [(Speculation(label, longest, None), texts[0])]
    for text in [] if is_random else texts:
        name = prompts.source(text).name
        levers += [(Speculation(label if n else None, n, name), text) for n in (0, *lengths)]
    cases = [
        Case(
            n_prompt,
            gen,
            experiment="speculate",
            setup=lever,
            sequences=(n_prompt + gen + lever.n_draft + N_IN_A_ROW,),
            text=text,
        )
        for n_prompt in (case.n_prompt for case in made.cases)
        for lever, text in levers
    ]
    return with_cases(made, cases, write)


def speculate(
    draft: str | None = None,
    draft_len: Numbers = "1,2,4,8",
    prompt_len: Numbers = "256",
    gen: int = 128,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    prompt: str | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Generate with and without drafted tokens, in blocks; returns a record per run.

        lab.speculate("lookup", "2,4", gen=64)

    `draft` is "lookup" (the default: what followed the same words earlier in the text) or a model: a smaller one with
    the same vocabulary, or the same one in a smaller quantization. A block is a fresh engine, a text of each kind
    (`prompt`, by default code, table, story and dialogue), and every draft length and no drafts in random order. For a
    model with random weights only the times of steps are measured. LabError for impossible values.
    """
    asked = {
        "draft": draft,
        "draft_len": draft_len,
        "prompt_len": prompt_len,
        "gen": gen,
        "repeat": repeat,
        "model": model,
        "prompt": prompt,
    }
    return EXPERIMENT.measure({**asked, **settings}, out, watch)


OPTIONS = (
    click.option("--draft", metavar="lookup|SPEC", help=DRAFTS),
    click.option(
        "--draft-len",
        "-l",
        default="1,2,4,8",
        show_default=True,
        help="Lengths of the draft in tokens: 1,2,4 or 1-8.",
    ),
    click.option("--prompt-len", "-p", default="256", show_default=True, help="Prompt tokens."),
    click.option(
        "--gen", "-n", default=128, show_default=True, type=TOKENS, help="Tokens to generate."
    ),
    click.option("--repeat", "-r", type=int, help=BLOCKS),
    click.option("--prompt", metavar="TEXT", help=TEXTS),
    MODEL,
)


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: a prompt, then plain decoding, or drafts, or (without a text) the steps of the curve, forgotten."""
    lever = case.setup
    assert isinstance(lever, Speculation)
    is_of_draft = lever.draft not in (None, LOOKUP)
    n_past = case.n_prompt
    if lever.text is None:
        n_past += case.n_gen // 2
    ids = text(0, n_past + (0 if lever.text else max(lever.n_draft + 1, N_IN_A_ROW)))
    read = script.prefill(0, ids[:n_past], settings.n_ubatch, is_last=False) if is_of_draft else []
    operations = [dataclasses.replace(one, kind=DRAFT, of_draft=True) for one in read]
    operations += script.prefill(0, ids[:n_past], settings.n_ubatch, is_last=lever.text is not None)
    if lever.text and lever.n_draft:
        by = "lab.features.speculate.child"
        guess = Operation(
            SPECULATE, times=case.n_gen - 1, n_draft=lever.n_draft, of_draft=is_of_draft, by=by
        )
        return [*operations, guess]
    if lever.text:
        return [*operations, *script.decode([0], case.n_gen - 1)]
    wanted = [
        *((n, False) for n in range(1, lever.n_draft + 2)),
        *([(1, True), (2, True)] if is_of_draft else []),
    ]
    chance = random.Random(f"{settings.seed} {ids[-1]}")
    for n, on_draft in [
        step for _ in range(N_TIMES) for step in chance.sample(wanted, len(wanted))
    ]:
        kind = DRAFT if on_draft else VERIFY if n > 1 else DECODE
        for i in range(N_IN_A_ROW if n == 1 else 1):
            part = Part(0, tuple(ids[n_past + i : n_past + i + n]), 1 if on_draft else n)
            operations.append(Operation(kind, (part,), of_draft=on_draft))
        operations.append(Operation(FORGET, first=n_past, of_draft=on_draft))
    return operations


def of_runs(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run with drafts: CASE, BLOCK, `record`, `tpot_s`, and those of plain decoding in the same block."""
    import pandas as pd

    rows = []
    for one in records:
        run = one.run
        lever = speculation_of(one.run)
        tpot_ms = figures(one.run).get("tpot_ms")
        if lever and lever.text is not None and tpot_ms:
            case = lever.text, run.n_prompt, run.n_gen, lever.draft or "", lever.n_draft
            rows.append((*case, one.session, run.repeat, run.engine, one, tpot_ms / 1e3))
    t = pd.DataFrame(rows, columns=[*CASE, *BLOCK, "record", "tpot_s"])
    pairs = [*CASE[:3], *BLOCK]
    plain = t[t.n_draft == 0].drop_duplicates(pairs, keep="last").drop(columns=CASE[3:])
    t = t[t.n_draft > 0].merge(
        plain.rename(columns={"record": "plain", "tpot_s": "plain_s"}), "left", pairs
    )
    both = [
        [one.run.token_ids if isinstance(one, Record) else () for one in pair]
        for pair in zip(t.record, t.plain, strict=True)
    ]
    return t.assign(parted_at=[experiment_tables.first_difference(*ids) for ids in both])


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each text and draft length of one setup: medians over blocks of the successful timed runs.

    `right` is the share of drafted tokens that were accepted, `length` the tokens per step with a draft. `speed_up` is
    the time of plain decoding over that with drafts, block by block (`n_pairs`), with its 95 % interval (None for fewer
    than 6 blocks). `expected` is the speed-up predicted from the curve and from the runs with the longest draft.
    `bottleneck` is known where the speed-up is below 1. `n_parted` runs chose another token than plain decoding, the
    first of them at `parted_at`.
    """
    import pandas as pd

    made = []
    for case, alike in of_runs(records).groupby(CASE[:4]):
        times = guesses.step_times(
            [
                record.run
                for record in records
                if is_curve(record.run) and _curve_of(record.run) == case[1:]
            ]
        )
        longest = [
            guesses.checked(record.run)
            for record in alike.record[alike.n_draft == alike.n_draft.max()]
        ]
        for n_draft, own in alike.groupby("n_draft"):
            tried = [
                chain for record in own.record for chain in guesses.checked(record.run) if chain[0]
            ]
            pairs = own.dropna(subset="plain_s")
            ratio = (
                stats.paired_ratio(list(pairs.tpot_s), list(pairs.plain_s)) if len(pairs) else None
            )
            gain = (pairs.plain_s / pairs.tpot_s).median()
            bottleneck = None
            steps = [guesses.in_steps_of(chains, n_draft, case[3] == LOOKUP) for chains in longest]
            expected = pd.Series(
                [guesses.speed_up(one, times) for one in steps if times], dtype=float
            )
            if times and gain < 1 and n_draft + 1 in times.target and tried:
                bottleneck = _bottleneck(tried, n_draft, times)
            made.append(
                dict(zip(CASE, (*case, n_draft), strict=True))
                | {
                    "n_runs": len(own),
                    "n_pairs": len(pairs),
                    "right": sum(right for _, right in tried) / sum(n for n, _ in tried)
                    if tried
                    else None,
                    "length": 1 + statistics.fmean(right for _, right in tried) if tried else None,
                    "tpot_s": own.tpot_s.median(),
                    "plain_tpot_s": pairs.plain_s.median(),
                    "speed_up": gain,
                    "low": ratio.low if ratio else None,
                    "high": ratio.high if ratio else None,
                    "expected": expected.median(),
                    "bottleneck": bottleneck,
                    "n_parted": own.parted_at.count(),
                    "parted_at": own.parted_at.min(),
                }
            )
    return experiment_tables.as_rows(pd.DataFrame(made))


def _bottleneck(tried: Sequence[Chain], n_draft: int, times: StepTimes) -> str:
    """The part whose ideal would gain most: verifying (v = 1), drafting (free) or acceptance (all accepted)."""
    n = n_draft + 1
    one_s = times.target[1]
    all_right = guesses.speed_up([(n_draft, n_draft)], times) or 0.0
    verifying = f"verification; a step of {n} positions takes {digits(times.target[n] / one_s)}x a step of one"
    accepting = f"acceptance; with every token accepted the speed-up would be {digits(all_right)}x"
    ideals = {
        verifying: guesses.speed_up(
            tried, StepTimes(dict.fromkeys(times.target, one_s), times.draft)
        ),
        accepting: guesses.speed_up([(n, n) for n, _ in tried], times),
    }
    if times.draft:
        drafting = (
            f"drafting; a drafted token takes {digits(times.draft[1] / one_s)}x a step of the model"
        )
        ideals[drafting] = guesses.speed_up(tried, StepTimes(times.target, {}))
    return max(ideals, key=lambda words: ideals[words] or 0.0)


def curve(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each measured number of positions n: the time of a step, and its ratio v to a step of one.

    `draft`: timed with it (LOOKUP costs nothing, a model, or none). `c` is a step of the draft model over one of the
    model.
    """
    import pandas as pd

    runs = [record.run for record in records if record.run.experiment == "speculate"]
    made = []
    for (n_prompt, n_gen, draft), own in sorted(grouped(runs, _curve_of).items()):
        if not (times := guesses.step_times([run for run in own if is_curve(run)])):
            continue
        n_past = n_prompt + n_gen // 2
        c = times.draft[1] / times.target[1] if times.draft else None
        for n, step_s in times.target.items():
            expected = (
                [prediction.seconds(n_now, n_past, n_now) or math.nan for n_now in (n, 1)]
                if prediction
                else []
            )
            case = {
                "n_prompt": n_prompt,
                "draft": draft or None,
                "n_positions": n,
                "step_s": step_s,
            }
            v = {
                "v": step_s / times.target[1],
                "expected_v": expected[0] / expected[1] if expected else None,
            }
            made.append({**case, **v, "c": c})
    return experiment_tables.as_rows(pd.DataFrame(made))


def _curve_of(run: Run) -> tuple[int, int, str] | None:
    """The curve that a run of single steps belongs to; None for other runs."""
    lever = speculation_of(run)
    return (run.n_prompt, run.n_gen, lever.draft or "") if lever and lever.text is None else None


def sentences(rows: Sequence[Any]) -> list[str]:
    """For one setup: the best draft length of each text, whether the text stayed the same, and prediction errors."""
    words = list[str]()
    predicted = list[tuple[float | None, float | None]]()
    for alike in grouped(rows, lambda row: row[:4]).values():
        if not (known := [row for row in alike if row.speed_up is not None]):
            continue
        predicted += [(row.expected, row.speed_up) for row in alike[:-1]]
        best = max(known, key=lambda row: row.speed_up)
        low = 0.0
        high = math.inf
        interval = "too few blocks for an interval"
        if best.low is not None:
            low = best.low
            high = best.high
            interval = f"95 % interval {digits(low)}-{digits(high)}"
        verdict = "pays" if low > 1 else "does not pay" if high < 1 else "no clear gain"
        right = "" if best.right is None else f", {100 * best.right:.0f} % accepted"
        bottleneck = f" Bottleneck: {best.bottleneck}." if best.bottleneck else ""
        words.append(
            f"{best.text} with {best.draft}: {verdict}, {digits(best.speed_up)}x plain decoding with "
            f"{plural(best.n_draft, 'drafted token')} per step ({interval}){right}.{bottleneck}"
        )
    n_parted, n_pairs = (
        sum(getattr(row, name) for row in rows) for name in ("n_parted", "n_pairs")
    )
    if n_parted:
        at = 1 + int(min(row.parted_at for row in rows if row.n_parted))
        words.append(
            f"In {n_parted} of {n_pairs} runs the text differs from plain decoding, from token {at} at the earliest: "
            "kernels for several positions round differently."
        )
    elif n_pairs:
        words.append(
            f"In {'all ' if n_pairs > 1 else ''}{plural(n_pairs, 'run')} the tokens match plain decoding."
        )
    elif rows:
        words.append("Without a plain run the text cannot be compared with plain decoding.")
    which = " (without the longest draft length, from whose runs they are predicted)"
    return words + experiment_tables.prediction_errors(predicted, "speed-ups", which)


def of_curve(curve: Sequence[Any]) -> list[str]:
    """What verifying costs, and the acceptance at which it pays."""
    several = [row for row in curve if row.n_positions > 1]
    words = []
    for alike in grouped(several, lambda row: (row.n_prompt, row.draft)).values():
        last = alike[-1]
        pays = "no draft length pays, even with every token accepted"
        needed = [
            (guesses.break_even(row.v, row.c or 0.0, row.n_positions - 1), row.n_positions - 1)
            for row in alike
        ]
        if known := [(share, n) for share, n in needed if share is not None]:
            share, n = min(known)
            pays = f"drafts of {plural(n, 'token')} pay above {100 * share:.0f} % acceptance"
        drafting = f", drafting a token {digits(last.c)}x" if last.c is not None else ""
        words.append(
            f"A step of {last.n_positions} positions takes {digits(last.v)}x a step of one{drafting}: {pays}."
        )
    return words + experiment_tables.prediction_errors(
        ((row.expected_v, row.v) for row in several), "v"
    )


def draw(rows: Sequence[Any], records: Sequence[Record], subject: str, figure: Figure) -> None:
    """The speed-up over the draft length, a panel for each text."""
    runs = of_runs(records).dropna(subset="plain_s")
    panels = list(grouped(rows, lambda row: row[:3]).items())[:MOST_PANELS]
    axes = canvas.grid(figure, len(panels), min(len(panels), 4), sharex=True, sharey=True)
    drafts = list(dict.fromkeys(row.draft for row in rows))
    styles = dict(zip(drafts, canvas.styles(len(drafts)), strict=True))
    for ax, (key, in_panel) in zip(axes, panels, strict=True):
        for draft, own in grouped(in_panel, lambda row: row.draft).items():
            blocks = runs[(runs[CASE[:4]] == [*key, draft]).all(axis=1)]
            experiment_tables.plot_series(
                ax,
                f"drafted by {draft}",
                styles[draft],
                [
                    (one.n_draft, one.plain_s / one.tpot_s, [one.record, one.plain])
                    for one in blocks.itertuples()
                ],
                [(row.n_draft, row.speed_up) for row in own if row.speed_up is not None],
                [(row.n_draft, row.expected) for row in own if row.expected is not None],
            )
        ax.axhline(1, color=canvas.GUIDE, ls=":", lw=1.2, label="plain decoding")
        ax.set_xticks(sorted({row.n_draft for row in rows}))
        ax.margins(x=0.1)
        ax.set_title(f"{key[0]}, {key[1]:,} + {key[2]:,} tokens", fontsize=10)
        ax.set_xlabel("drafted tokens per step")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("speed-up over plain decoding")
    canvas.finish(axes, f"Speculative decoding\n{subject}", is_apart=True)


TABLE = experiment.Table(
    name="speculate",
    question="Does it pay to draft tokens, and how many?",
    title="tokens drafted and verified together; medians over blocks, the speed-up's 95 % interval below",
    caption="Speed-up over plain decoding, over the number of drafted tokens per step; a panel for each text. Points "
    "are blocks, the line is the median, dashes are predictions.",
    columns=(
        ("text", lambda row: row.text),
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("draft\nby", lambda row: row.draft),
        ("drafted\na step", lambda row: f"{row.n_draft}"),
        ("accepted\n%", lambda row: "-" if row.right is None else f"{100 * row.right:.0f}"),
        ("tokens\na step", lambda row: cell(row.length)),
        ("TPOT\nms", lambda row: cell(row.tpot_s, 1e3)),
        ("plain\nms", lambda row: cell(row.plain_tpot_s, 1e3)),
        (
            "speed-up",
            lambda row: (
                cell(row.speed_up)
                + ("" if row.low is None else f"\n{digits(row.low)}-{digits(row.high)}")
            ),
        ),
        ("predicted", lambda row: cell(row.expected)),
    ),
    rows=rows,
    conclude=lambda rows, _: sentences(rows),
    draw=draw,
    is_by_ceilings=False,
)

CURVE = experiment.Table(
    name="curve",
    question="What does it cost to verify several tokens at once?",
    title="steps of several positions of one sequence; medians",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("positions\na step", lambda row: f"{row.n_positions}"),
        ("step\nms", lambda row: cell(row.step_s, 1e3)),
        ("v", lambda row: cell(row.v)),
        ("predicted\nv", lambda row: cell(row.expected_v)),
        ("c", lambda row: cell(row.c)),
    ),
    rows=curve,
    conclude=lambda rows, _: of_curve(rows),
)

EXPERIMENT = experiment.Experiment(
    name="speculate",
    chapter="Speculative decoding",
    about="""Measure what speculative decoding costs and gains.

    \b
      lab speculate --draft lookup --draft-len 1-8
      lab speculate --draft smollm2-135m:Q4_0 --prompt code,story

    Generates with and without drafts, in blocks. For each kind of text the command shows how many drafted tokens are
    accepted, what verification costs, the speed-up over plain decoding with its interval, the prediction from the
    times of single steps, and the bottleneck if it does not pay. The tokens match plain decoding except at near-ties,
    which are counted. With random weights only the steps are timed.
    """,
    plan=plan,
    options=OPTIONS,
    main_options=("model", "draft", "draft-len", "prompt-len", "gen", "repeat"),
    tables=(TABLE, CURVE),
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(),)
