"""What the notebooks use besides `lab`: tables as the commands print them, figures, a server, and
the guesses and exercises of exercises.py, the sessions of faults.py, and the sheet of sheet.py."""

from __future__ import annotations

import contextlib
import html
import itertools
import socket
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lab.app import kinds
from lab.core import cost, growth, memory, stats
from lab.core.cost import StepCost
from lab.core.matrices import BLOCKS
from lab.core.record import DECODE, PREFILL, SCHEMA, Ceilings, Model, Record, Settings
from lab.core.request import RequestRecord
from lab.core.results import Contents
from lab.errors import LabError
from lab.features.doctor import beside
from lab.features.doctor.beside import Rates
from lab.features.explain import advice
from lab.features.explain.section import explained
from lab.features.lessons import agreement, statements
from lab.features.lessons.agreement import context_in_batch
from lab.features.lessons.exercises import ask, ask_again, check, guess
from lab.features.lessons.faults import grade, observe
from lab.features.lessons.limits import limit_by_rates, users_together
from lab.features.lessons.sheet import (
    guesses_and_errors,
    lawful,
    note,
    noted,
    sessions_vary,
)
from lab.features.lessons.statements import (
    Judgement,
    by_length,
    explains,
    is_settled,
    law_holds,
    middle,
    overhead,
    ratio,
    shared_heads,
    smaller_cache,
    textbook,
)
from lab.features.measure import measure
from lab.features.predict import tables
from lab.features.report import page
from lab.features.rpc_server import RpcServer
from lab.features.speculate import curve as speculation_curve
from lab.models import catalog, devices, synthetic
from lab.process.wire import MUL_MAT
from lab.process.worker import Worker
from lab.remote import own_server
from lab.remote.own_server import OwnServer
from lab.roofline import choosing, explanation, kernel_rates, probing, step_kernels
from lab.roofline.prediction import Prediction
from lab.roofline.step_kernels import StepKernels
from lab.runner import machine
from lab.runner.plan import make_plan
from lab.show import (
    comparison,
    console,
    summaries,
    sweep_laws,
    table,
    text_comparison,
    text_doubts,
    text_growth,
    text_requests,
    text_setup,
)
from lab.show.section import Context, Picture, print_sections
from lab.show.sweep_laws import Law
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

    from lab.features.trace.lines import AttentionLine

__all__ = [
    "ask",
    "ask_again",
    "by_length",
    "check",
    "context_in_batch",
    "explains",
    "grade",
    "guess",
    "guesses_and_errors",
    "is_settled",
    "law_holds",
    "lawful",
    "limit_by_rates",
    "middle",
    "note",
    "noted",
    "observe",
    "overhead",
    "ratio",
    "sessions_vary",
    "shared_heads",
    "smaller_cache",
    "textbook",
    "users_together",
]

PICTURE_SIZE = (10, 4.6)
REFUTED = (
    1.1  # times the best rate of reading: a step that reads faster shows that it is wrong
)
N_LAYERS = 6  # whose attention is drawn
N_EARLY = 16  # tokens of an answer that are its beginning, and as many its end
FIGURES = [
    "model",
    "n_threads",
    "n_ubatch",
    "n_prompt",
    "n_gen",
    "prefill_s",
    "tpot_ms",
    "e2e_s",
    "prefill_share",
]

_running: list[OwnServer] = []

block = BLOCKS.__getitem__  # how a quantization packs weights: (weights, bytes) of a block
device = devices.find_device
roof = kernel_rates.roof
sessions = comparison.by_session
threads = machine.default_threads


def begin() -> None:
    """Print the versions of the lab and of its records, the machine and the time.

    Sets up tables, and warnings that are sentences without the place in the code.
    """
    import pandas as pd

    warnings.showwarning = _print_warning
    pd.set_option("display.max_colwidth", None)  # cells hold sentences
    here = machine.describe()
    now = datetime.now(UTC)
    print(f"mini-lab {metadata.version('mini-lab')}, results files in format {SCHEMA}")
    print(f"{machine.label(here)}, {here.os}; begun {now:%Y-%m-%d %H:%M} UTC")


def _print_warning(message: Warning | str, *_place: object, **_more: object) -> None:
    print(f"Note: {message}")


# What the commands print and draw


def show(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Print what `lab show` prints; `ceilings` and plain `runs` add the predictions of an
    experiment."""
    sections = kinds.sections(records, Context([ceilings] if ceilings else [], runs))
    kinds.print_results(records, console.console(), sections)


def rows(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> tuple[Any, ...]:
    """The rows of an experiment's table, as in `lab show --json`; `ceilings` and plain `runs` add
    what is predicted. LabError for other runs."""
    parts = kinds.experiments_of(_timed(records), [ceilings] if ceilings else [], runs)
    if not parts:
        raise LabError(
            "These runs belong to no experiment.",
            "Run one: lab.batch(), lab.turns() or lab.stall()",
        )
    return tuple(parts[0].rows)


def steps_s(records: Sequence[Record], n_seq: int) -> list[float]:
    """The seconds of a step with so many sequences in each timed run of `lab.batch`."""
    rows_of_runs = [rows([record])[0] for record in _timed(records)]
    return [row.step_s for row in rows_of_runs if row.n_seq == n_seq]


def draw(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Draw an experiment as its command does."""
    for part in kinds.experiments_of(_timed(records), [ceilings] if ceilings else [], runs):
        for picture in part.pictures:
            _draw(picture, PICTURE_SIZE)


def draw_attention(line: AttentionLine) -> None:
    """Draw what `lab.attention` returns as `lab trace --attention` does: a matrix for each of
    N_LAYERS layers, from the first to the last."""
    from lab.features.trace import attention_section

    n_layers = len(line.looks.decode)
    n_shown = min(N_LAYERS, n_layers)
    last = max(1, n_shown - 1)
    layers = [round(number * (n_layers - 1) / last) for number in range(n_shown)]
    picture = attention_section.picture(line, layers)
    _draw(picture, picture.size)


def compare(records: Sequence[Record]) -> None:
    """Print a comparison of the setups in `records` as `lab compare` does."""
    groups = comparison.groups(_timed(records))
    comparisons = comparison.compare_groups(groups)
    text_comparison.print_comparisons(
        groups, comparisons, comparison.AT_LEAST, console.console()
    )


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """Print what limited runs of one setup as `lab explain` does, without advice.

    Returns the rows for the plots.
    """
    timed = _timed(records)
    label = text_setup.model_label(timed[0])
    print_sections([explained(label, timed, ceilings, has_advice=False)], console.console())
    return explanation.explain(timed, ceilings)


def gains(records: Sequence[Record], ceilings: Ceilings) -> None:
    """Print the gains that the ceilings predict for other settings, as `lab explain` does."""
    timed = _timed(records)
    for change in advice.changes(explanation.explain(timed, ceilings), timed[0], ceilings):
        print(advice.sentence(change))


def experiments(records: Sequence[Record], ceilings: Ceilings) -> None:
    """The same for the lab's experiments."""
    for experiment in _experiments(records, ceilings):
        print(advice.sentence(experiment))


def _experiments(records: Sequence[Record], ceilings: Ceilings) -> list[advice.Advice]:
    timed = _timed(records)
    return advice.experiments(explanation.explain(timed, ceilings), timed, ceilings)


def show_ranking(predictions: Sequence[Prediction]) -> None:
    """Print the table of `lab.predict` on several devices, all of them, as the command does."""
    shown = tables.Display(is_ranking=True, shows_all=True)
    print_sections([tables.ranking(predictions, shown)], console.console())


def abilities(records: Sequence[RequestRecord]) -> None:
    """Print what the server of these requests can do, as `lab measure --url` does."""
    text_requests.print_endpoint(records[0].endpoint, records[0].model, (), console.console())


class VerdictsShown(Protocol):
    """What `lab.claims` returns, as far as it is shown."""

    @property
    def rows(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, repr=False)
class LessonShown:
    """A page that Jupyter shows below a cell."""

    path: str

    def __repr__(self) -> str:
        return f"The page is {self.path}"

    def _repr_html_(self) -> str:
        return f'<iframe src="{html.escape(self.path)}" width="100%" height="900"></iframe>'


def explore(
    records: Sequence[Record], ceilings: Ceilings, path: str = "explore.html"
) -> LessonShown:
    """Write plain runs as `lab report` does, a page with sliders, and return it for display below
    the cell."""
    written = page.report(path, _timed(records), [ceilings])
    print(f"The page is also in the file {written}. You can open it in a browser.")
    return LessonShown(path)


# Figures


def say(conclusion: str | Judgement) -> None:
    """Print a sentence with measured figures, in lines that a page can hold.

    No text cell has a measured figure: the cell that measured it says it.
    """
    sentence = conclusion.sentence if isinstance(conclusion, Judgement) else conclusion
    print(textwrap.fill(sentence, 100))


def repeats(n_figures: int = 1) -> int:
    """The fewest runs (of a trial: blocks) with which an interval can be told for each of so many
    figures that are compared together."""
    return stats.fewest_for_interval(1 - (1 - stats.CONFIDENCE) / n_figures)


def times_of(records: Sequence[Record], figure: str) -> dict[int, list[float]]:
    """A figure of `lab.runs` in each timed run, by prompt length; without disturbed runs where
    enough of the others are left."""
    of_lengths: dict[int, list[float]] = {}
    for n_prompt, of_length in table.runs(_timed(records)).groupby("n_prompt"):
        quiet = of_length[~of_length.disturbed]
        usable = quiet if len(quiet) >= statements.FEWEST_RUNS else of_length
        of_lengths[int(n_prompt)] = list(usable[figure])
    return of_lengths


def ratios(
    base: Sequence[Record], candidate: Sequence[Record], figure: str
) -> dict[int, stats.Ratio | None]:
    """Candidate over base in a figure at each prompt length that both have."""
    bases = times_of(base, figure)
    candidates = times_of(candidate, figure)
    return {n: statements.ratio(bases[n], candidates[n]) for n in bases if n in candidates}


def compared(
    records: Sequence[Record], figure: str, n_prompt: int
) -> list[comparison.ComparedFigure]:
    """What `compare` prints of a figure, of each further setup against the first."""
    comparisons = comparison.compare_groups(comparison.groups(_timed(records)))
    of_figure: list[comparison.ComparedFigure] = []
    for pair in comparisons:
        for row in pair.rows:
            if (row.figure, row.n_prompt) == (figure, n_prompt):
                of_figure.append(row)
    return of_figure


def along_answers(records: Sequence[Record]) -> None:
    """Say for each prompt length whether the tokens of an answer become dearer."""
    answers = table.steps(_timed(records)).query("generated > 1")
    for n_prompt, of_length in answers.groupby("n_prompt"):
        n_end = min(N_EARLY, int(of_length.generated.max()) // 2)
        is_early = of_length.generated <= 1 + n_end
        is_late = of_length.generated > of_length.generated.max() - n_end
        early_ms = of_length[is_early].groupby("row").itl_ms.median()
        late_ms = of_length[is_late].groupby("row").itl_ms.median()
        say(statements.along_answer(int(n_prompt), list(early_ms), list(late_ms)))


def longer_prompt(records: Sequence[Record]) -> Judgement:
    """What the longest prompt of these runs does to prefill and decode, against the shortest."""
    prefills = times_of(records, "prefill_s")
    tokens = times_of(records, "tpot_ms")
    short = min(prefills)
    long = max(prefills)
    prefill = statements.ratio(prefills[short], prefills[long])
    return statements.longer_prompt(
        (short, long), prefill, statements.ratio(tokens[short], tokens[long])
    )


def attention(records: Sequence[Record], phase: str = DECODE) -> Judgement:
    """Whether attention in runs of one setup is as slow as its work, or has a slow kernel."""
    steady = text_growth.steady(records)
    law = growth.growth(steady, phase) if steady else None
    return statements.slow_attention(law, phase)


def decode_law(sweep: Sequence[Record]) -> Law:
    """Print and return t(p) of a sweep of one setup, with a sentence where the curve has a cliff:
    then the line is none of the machine."""
    decode = sweep_laws.decode_law(summaries.summary(table.runs(_timed(sweep))))
    if decode is None:
        raise LabError("The formula needs at least three lengths.", "Take smaller steps.")
    print(decode)
    steady = text_growth.steady(sweep)
    if steady and growth.cliff(steady, DECODE) is not None:
        say(" ".join(text_growth.sentences(steady)))
    return decode


def same_weights(law: Law, other: Law) -> None:
    """Say whether two fitted laws agree on w, for models whose weights are about the same."""
    say(statements.same_weights(law, other))


def limits(rows: pd.DataFrame) -> None:
    """Say what limits each phase of explained rows, and whether attention has a slow kernel."""
    for row in rows.itertuples():
        name = f"{row.phase} at {row.n_prompt:,} prompt tokens"
        say(statements.limit(row, name))
        say(statements.attention_of_row(row))


def cheaper_prompt_token(
    records: Sequence[Record], rows: pd.DataFrame, reading_ms: float
) -> None:
    """Say why a prompt token is cheaper than a generated one."""
    measured = figures(records).iloc[0]
    generated_ms = _parts_ms(rows[rows.phase == DECODE].iloc[0])
    prompt_ms = _parts_ms(rows[rows.phase == PREFILL].iloc[0])
    saved_ms = {
        name: part_ms - prompt_ms.get(name, 0.0) / measured.n_prompt
        for name, part_ms in generated_ms.items()
    }
    prompt_token_ms = 1e3 * measured.prefill_s / measured.n_prompt
    limit = rows[rows.phase == DECODE].iloc[0].limit
    say(
        statements.cheaper_prompt_token(
            measured.tpot_ms, prompt_token_ms, reading_ms, saved_ms, limit
        )
    )


def _parts_ms(row: Any) -> dict[str, float]:
    """The least milliseconds of an explained phase by part, as `explain` limits it by parts, and
    what it took beyond them."""
    parts_ms = {statements.WEIGHTS: 0.0}
    for name, part_s in row.parts.items():
        is_of_weights = name.endswith((explanation.LAYERS, explanation.OUTPUT))
        part = statements.WEIGHTS if is_of_weights else name
        parts_ms[part] = parts_ms.get(part, 0.0) + 1e3 * part_s
    parts_ms[statements.WORK_OUTSIDE] = 1e3 * max(0.0, row.measured_s - row.least_s)
    return parts_ms


def repacked(records: Sequence[Record]) -> None:
    """Say of each quantization in these records whether llama.cpp repacked its weights."""
    quantizations: list[str] = []
    for record in _timed(records):
        kind = record.model.quantization or "?"
        if kind not in quantizations:
            quantizations.append(kind)
            say(statements.repacked(kind, record.run.placement))


def batched(records: Sequence[Record], is_whole: bool = True) -> None:
    """Say whether a token is cheaper in the steps of a batch than alone; without `is_whole` only of
    the largest step."""
    per_token_ms: dict[int, list[float]] = {}
    timed = _timed(records)
    for record in timed:
        (row,) = rows([record])
        per_token_ms.setdefault(row.n_seq, []).append(1e3 * row.step_s / row.n_seq)
    alone_ms = per_token_ms.pop(min(per_token_ms))
    kind = timed[0].model.quantization or "?"
    for n_seq in sorted(per_token_ms):
        if is_whole or n_seq == max(per_token_ms):
            say(statements.batched(kind, n_seq, alone_ms, per_token_ms[n_seq]))


def threads_gain(records: Sequence[Record], n_prompt: int, n_threads: int) -> None:
    """Say what all threads gain over one in a trial of both."""
    (prefill,) = compared(records, "prefill_s", n_prompt)
    (decode,) = compared(records, "tpot_ms", n_prompt)
    by_block = _decode_over_prefill(records, n_prompt)
    say(statements.threads_gain(prefill.ratio, decode.ratio, n_threads, by_block))


def _decode_over_prefill(records: Sequence[Record], n_prompt: int) -> stats.Ratio | None:
    """What a trial's B changes in decode over what it changes in prefill, block by block: what
    makes a whole block slow cancels."""
    runs = table.runs(_timed(records)).query("n_prompt == @n_prompt")
    phases = runs.tpot_ms / runs.prefill_s
    means = phases.groupby([runs.session, runs.block, runs.variant]).mean()
    blocks = means.unstack().dropna()  # of two columns, A before B
    one_thread, all_threads = (list(blocks[variant]) for variant in sorted(blocks))
    return stats.paired_ratio(one_thread, all_threads)


def chunks_cost(records: Sequence[Record], chunk: int) -> Judgement:
    """What `lab.stall` with chunks of this size costs the new request, against all at once."""
    waits_s: dict[int | None, list[float]] = {}
    for record in _timed(records):
        (row,) = rows([record])
        waits_s.setdefault(row.chunk, []).append(row.newcomer_s)
    return statements.chunks_cost(chunk, waits_s[None], waits_s[chunk])


def disturbed(before: stats.Ratio | None, now: stats.Ratio | None) -> bool:
    """Whether the gain of all threads lies outside an earlier one, with a sentence if it does."""
    sentence = agreement.disturbed(before, now)
    if sentence:
        say(sentence)
    return sentence is not None


def same_request(before: Sequence[RequestRecord], now: Sequence[RequestRecord]) -> None:
    """Say it if a server's speed changed between two measurements of one request."""
    before_ms, now_ms = (
        list(table.runs(requests).query("not warmup").tpot_ms) for requests in (before, now)
    )
    sentence = agreement.same_request(before_ms, now_ms)
    if sentence:
        say(sentence)


def limit_of_step(
    name: str,
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    measured_s: float,
    n_past: int,
) -> None:
    """Say what limits a decode step of one sequence, by the rule of `explain`.

    A step that reads much faster than the best rate refutes that rate: then nothing is concluded.
    """
    cost_of_step = step_cost(model, 1, n_past)
    best = roof(ceilings)
    gbps = cost_of_step.n_bytes / measured_s / 1e9
    if gbps > REFUTED * best.gbps:
        say(
            f"What limits {name} cannot be told: it reads {digits(gbps)} GB/s, and the best rate "
            f"that was measured alone is {digits(best.gbps)}. That rate is too low: measure it "
            "again."
        )
        return
    try:
        kernels = StepKernels(model, settings, ceilings).total(1, n_past, 1)
    except LabError as error:
        say(f"What limits {name} cannot be told: {error.what}")
        return
    row = {
        "measured_s": measured_s,
        "least_s": kernels.total_s,
        "traffic_s": cost_of_step.n_bytes / best.gbps / 1e9,
        "arithmetic_s": cost_of_step.flops / best.gflops / 1e9,
        "attention_s": kernels.attention_s,
        "attention_traffic_s": cost_of_step.kv_read_bytes / best.gbps / 1e9,
        "attention_arithmetic_s": cost_of_step.attention_flops / best.gflops / 1e9,
        "attention_flops": cost_of_step.attention_flops,
        "attention_bytes": cost_of_step.kv_read_bytes,
        "flops": cost_of_step.flops,
        "n_bytes": cost_of_step.n_bytes,
        "phase": DECODE,
        "parts": {
            explanation.LAYERS: kernels.layers_s,
            explanation.ATTENTION: kernels.attention_s,
        },
    }
    say(statements.limit(SimpleNamespace(**row), name))


def added(
    turns: Sequence[tuple[Sequence[Record], Sequence[RequestRecord]]], figure: str
) -> list[float]:
    """What the server's side of each turn adds to a figure of `lab.runs`; NaN where one failed."""
    differences: list[float] = []
    for direct, by_server in turns:
        alone = table.runs(direct).query("not warmup")[figure].median()
        served = table.runs(by_server).query("not warmup")[figure].median()
        differences.append(float(served - alone))
    return differences


def drafts(row: Any) -> None:
    """Say whether drafts pay, from a row of `lab.speculate`."""
    if row.length is None or row.speed_up is None:
        return
    interval = None if row.low is None else (row.low, row.high)
    say(statements.drafts(row.text, row.length, row.speed_up, interval))


def drafts_to_gain(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Say which number of drafts gains most by the measured times of steps of `lab.speculate`.

    `ceilings` and plain `runs` set it against what `experiments` predicts, for the same number.
    """
    steps = {row.n_positions - 1: row.v for row in speculation_curve.rows(_timed(records))}
    predicted = None
    for experiment in _experiments(runs, ceilings) if ceilings else ():
        if experiment.figures["experiment"] == "speculate":
            predicted = (experiment.figures["n_draft"], experiment.figures["gain"])
    if any(steps):
        say(agreement.drafts_to_gain(steps, predicted))


def figures(records: Sequence[Record]) -> pd.DataFrame:
    """The most used columns of the summary, one row per setup and length. Times are medians."""
    return summaries.summary(table.runs(_timed(records)))[FIGURES]


def split(records: Sequence[Record]) -> None:
    """Print each generation as the sum of its two phases (medians)."""
    for row in figures(records).itertuples():
        token_s = row.tpot_ms / 1e3
        n_more = row.n_gen - 1
        prefill = seconds(row.prefill_s)
        decode = seconds(n_more * token_s)
        share = 100 * row.prefill_s / row.e2e_s
        print(
            f"{row.n_prompt:,} prompt tokens, {row.n_gen:,} generated: "
            f"prefill {prefill} + decode {n_more:,} x {seconds(token_s)} = {prefill} + {decode}; "
            f"measured total {seconds(row.e2e_s)}; prefill takes {share:.0f} % "
            "(medians of each, so the parts need not add up)"
        )


def both_laws(sweep: Sequence[Record], short: Sequence[Record] = ()) -> tuple[Law, Law]:
    """Print and return the laws of a sweep of one setup: T(P) of the prompt length, t(p) of the
    position.

    `short`: further runs for t(p), after prompts that are shorter than those of the sweep.
    """
    import pandas as pd

    lengths = summaries.summary(table.runs(_timed(sweep)))
    prefill = sweep_laws.prefill_law(lengths)
    if short:
        lengths = pd.concat([summaries.summary(table.runs(_timed(short))), lengths])
    decode = sweep_laws.decode_law(lengths)
    if prefill is None or decode is None:
        raise LabError(
            "The two formulas need at least four lengths.",
            "Take smaller steps: every=256, ubatch=256",
        )
    print(prefill)
    print(decode)
    return prefill, decode


def requests(
    prefill: Law, decode: Law, lengths: Sequence[int], answers: Sequence[int]
) -> pd.DataFrame:
    """The time of requests by the two laws, one row for each prompt length and answer length."""
    import pandas as pd

    rows_of_requests = []
    for n_prompt, n_gen in itertools.product(lengths, answers):
        prefill_s, decode_s = sweep_laws.request(prefill, decode, n_prompt, n_gen)
        total_s = prefill_s + decode_s
        row = {
            "prompt": f"{n_prompt:,}",
            "answer": f"{n_gen:,}",
            "prefill": seconds(prefill_s),
            "decode": seconds(decode_s),
            "total": seconds(total_s),
            "prefill, %": round(100 * prefill_s / total_s),
        }
        rows_of_requests.append(row)
    return pd.DataFrame(rows_of_requests)


def choosing_shares(records: Sequence[Record]) -> dict[int, float]:
    """The part of a step that choosing takes with llama-server's default chain, in %, by the number
    of sequences."""
    from lab.features.choose.figures import figures as choosing_figures

    measured = choosing_figures(_timed(records), [])
    if measured is None:
        raise LabError("No run chose a token.", "Measure again: lab.choose()")
    shares: dict[int, float] = {}
    for row in measured.rows():
        if row.name == choosing.DEFAULT:
            shares[row.n_seq] = 100 * row.share
    return shares


def verdicts(session: VerdictsShown, guesses: Mapping[int, Any]) -> pd.DataFrame:
    """The verdicts of `lab.claims` beside the guesses, by the numbers of the claims."""
    import pandas as pd

    rows_of_claims = []
    n_guessed = 0
    n_right = 0
    for row in session.rows:
        guessed = guesses.get(row["number"], ...)
        shown_guess = "no guess"
        if guessed is not ...:
            n_guessed += 1
            shown_guess = str(guessed)
            if str(guessed).strip().lower() == row["verdict"]:
                n_right += 1
        cells = {"claim": row["claim"], "your guess": shown_guess, "verdict": row["verdict"]}
        rows_of_claims.append(cells)
    print(
        f"Right guesses: {n_right} of {n_guessed}." if n_guessed else "You entered no guess."
    )
    return pd.DataFrame(rows_of_claims)


def reasons(session: VerdictsShown) -> None:
    """Print why each claim got its verdict: its figures, and what they must be."""
    for row in session.rows:
        print(f"{row['number']}. {row['claim']}: {row['verdict']}")
        say(row["words"])


def terms(*rows: tuple[str, str, float, str]) -> pd.DataFrame:
    """A table of a formula's terms: (term, meaning, number, unit)."""
    import pandas as pd

    cells = []
    for term, meaning, number, unit in rows:
        text = f"{number:,}" if isinstance(number, int) else digits(number)
        cells.append((term, meaning, f"{text} {unit}"))
    return pd.DataFrame(cells, columns=["term", "meaning", "here"]).set_index("term")


def rows_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """A table of figures that a notebook computed: a row for each dict, headed by its first
    value."""
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        if pd.api.types.is_float_dtype(frame[name]):
            frame[name] = frame[name].map(digits)
    return frame.set_index(frame.columns[0])


def kernels(
    ceilings: Ceilings, model: Model, n_threads: int, types: Sequence[str]
) -> pd.DataFrame:
    """Kernel rates at a model's feed-forward shape: one row per quantization and number of
    tokens."""
    import pandas as pd

    measured = []
    for rate in ceilings.rates:
        has_shape = (rate.op, rate.rows, rate.columns) == (MUL_MAT, model.n_ff, model.n_embd)
        if has_shape and rate.n_threads == n_threads and rate.type in types:
            row = {
                "type": rate.type,
                "tokens at once": rate.n_tokens,
                "GB/s": round(probing.gbps(rate), 2),
                "GFLOP/s": round(probing.gflops(rate), 1),
            }
            measured.append(row)
    if not measured:
        raise LabError(
            f"The kernels of {', '.join(types)} with {n_threads} threads are not measured at this "
            "model's shape.",
            "Measure them: lab.ceilings(types=[...], threads=...)",
        )
    return pd.DataFrame(measured).sort_values(["type", "tokens at once"], ignore_index=True)


def step_ms(
    ceilings: Ceilings, model: Model, settings: Settings, n_tokens: int, n_past: int
) -> float:
    """The milliseconds of one step if each kernel runs at its ceiling.

    LabError for a kernel without a ceiling.
    """
    return 1e3 * StepKernels(model, settings, ceilings).total(n_tokens, n_past, 1).total_s


def step_cost(model: Model, n_tokens: int, n_past: int = 0) -> StepCost:
    """FLOPs and bytes of one step of `n_tokens` after `n_past`, with logits for the last token."""
    return step_kernels.known(cost.step(model, n_tokens, n_past, 1), model)


def shape(name: str, quantization: str) -> Model:
    """A model of `lab models` in a quantization, made from its shape; needs no file."""
    return synthetic.model_of(catalog.find(name), quantization)


def kv_bytes(model: Model, kind: str = "f16") -> float:
    """Bytes of one token in a KV cache of type `kind`. LabError if the model's header does not
    tell."""
    n_bytes = memory.kv_bytes_per_position(model, kind, kind)
    if not n_bytes:
        raise step_kernels.not_known(model)
    return n_bytes


def memory_bytes(record: Record) -> float:
    """The memory of the device that computed a run: of a GPU its own, of a CPU the machine's.

    LabError for several devices, and for one whose memory is unknown.
    """
    n_bytes = probing.memory_bytes(record)
    if n_bytes is None:
        raise LabError(
            f"The memory of {machine_name(record)} is unknown.",
            "Enter the bytes of its memory instead, such as 24e9.",
        )
    return n_bytes


def caches(models: Sequence[Model]) -> pd.DataFrame:
    """KV cache sizes (F16): bytes per token, at 8,192 tokens, and the length at which the cache
    equals the weights."""
    import pandas as pd

    sizes = []
    for model in models:
        if not model.n_bytes:
            continue
        token_bytes = kv_bytes(model)
        row = {
            "model": f"{model.name} {model.quantization}",
            "queries per kv head": (model.n_head or 0) // (model.n_head_kv or 1),
            "bytes per token": f"{token_bytes:,.0f}",
            "cache at 8,192 tokens, GB": round(8192 * token_bytes / 1e9, 2),
            "weights, GB": round(model.n_bytes / 1e9, 2),
            "tokens until the cache weighs as much": f"{model.n_bytes / token_bytes:,.0f}",
        }
        sizes.append(row)
    return pd.DataFrame(sizes)


def ceilings_of(contents: Contents) -> Ceilings:
    """The ceilings in a results file for the machine of its first record. LabError without any."""
    place = probing.place_of_record(contents.records[0])
    return probing.need(contents.ceilings, place, "this file")


def machine_name(record: Record) -> str:
    """The machine that made a record, as the plots name it."""
    return machine.label(record.machine, record.settings)


def serve(n_threads: int | None = None) -> OwnServer:
    """Start a server with the embedded model on a free port, in the place of an earlier one; it
    ends with `end()`."""
    while _running:
        _running.pop().end()
    server = own_server.start_own(catalog.embedded_path(), catalog.DEFAULT, n_threads)
    _running.append(server)
    return server


def beside_a_program(seconds: float = beside.MOST_S) -> Rates:
    """Tokens per second of decode, alone and beside a busy program of another terminal or group,
    which is ended afterwards; each of four rates is measured for at most this time."""
    with Worker() as worker:
        plan = make_plan(worker, [1], 1, 1)
    return beside.rates(plan, lambda status: None, seconds)


def token_ms_in_processes(
    n: int, split_mode: Literal["layer", "tensor"], lib: str | None = None
) -> float | None:
    """The median milliseconds of a token with the model on `n` processes of one thread each, which
    llama.cpp's RPC connects on this machine.

    None, with a printed sentence, if this build of llama.cpp has no RPC or no such split. `lib`:
    the folder of another build.
    """
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a failed run is one run less
            addresses = []
            for _ in range(n):
                server = RpcServer("127.0.0.1", _free_port(), lib=lib, is_silent=True)
                addresses.append(stack.enter_context(server).endpoint)
            records = measure(
                [64],
                16,
                2,
                rpc=addresses,
                lib=lib,
                split_mode=split_mode,
                threads=1,
                out="../results",
            )
        return float(figures(records).tpot_ms.iloc[0])
    except LabError as error:
        say(str(error).replace("\n", " "))
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def events(record: RequestRecord) -> pd.DataFrame:
    """The events of a request: when each arrived (ms after the request was sent), its bytes, and
    what it carried."""
    import pandas as pd

    columns = record.request.events
    arrive_ms = [ns / 1e6 for ns in columns.arrive_ns]
    return pd.DataFrame(
        {"arrive_ms": arrive_ms, "bytes": columns.n_bytes, "kind": columns.kind}
    )


def _draw(picture: Picture, size: tuple[float, float]) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    # The figure comes first: a new backend would stay non-interactive.
    figure = plt.figure(figsize=size, layout="constrained")
    with matplotlib.rc_context({"text.parse_math": False}):
        picture.draw(figure)


def _timed(records: Sequence[Record]) -> list[Record]:
    """The records of timed runs without an error. LabError with the first error where there is
    none."""
    timed = [record for record in records if record.run.is_timed]
    if not timed:
        errors = text_doubts.failures(records)
        raise LabError(
            f"All runs failed. {' '.join(errors[:1])}".strip(),
            "Measure again, with shorter lengths.",
        )
    return timed
