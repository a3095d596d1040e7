"""What the notebooks use besides `lab`: here are tables as the commands print them, and a server.

timed.py has the figures of runs, counted.py what is counted without runs, conclusions.py what is
said of runs, exercises.py guesses and exercises, faults.py sessions with a planted fault, and
sheet.py the datasheet.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Literal, Protocol

from lab.app import kinds
from lab.core import stats
from lab.core.matrices import BLOCKS
from lab.core.record import SCHEMA, Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.doctor import beside
from lab.features.doctor.beside import Rates
from lab.features.explain import advice
from lab.features.explain.section import explained
from lab.features.lessons.agreement import context_in_batch
from lab.features.lessons.conclusions import (
    along_answers,
    attention,
    batched,
    cheaper_prompt_token,
    chunks_cost,
    decode_law,
    disturbed,
    drafts,
    drafts_to_gain,
    limit_of_step,
    limits,
    longer_prompt,
    repacked,
    same_request,
    same_weights,
    say,
    threads_gain,
)
from lab.features.lessons.counted import (
    caches,
    ceilings_of,
    kernels,
    kv_bytes,
    machine_name,
    memory_bytes,
    shape,
    step_cost,
    step_ms,
)
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
from lab.features.lessons.timed import (
    compared,
    experiment_advice,
    figures,
    ratios,
    rows,
    steps_s,
    timed_runs,
    times_of,
)
from lab.features.measure import measure
from lab.features.predict import tables
from lab.features.report import page
from lab.features.rpc_server import RpcServer
from lab.models import catalog, devices
from lab.process.worker import Worker
from lab.remote import own_server
from lab.remote.own_server import OwnServer
from lab.roofline import choosing, explanation, kernel_rates
from lab.roofline.prediction import Prediction
from lab.runner import machine
from lab.runner.plan import make_plan
from lab.show import (
    comparison,
    console,
    summaries,
    sweep_laws,
    table,
    text_comparison,
    text_requests,
    text_setup,
)
from lab.show.section import Context, Picture, print_sections
from lab.show.sweep_laws import Law
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

    from lab.features.claims.judging import ClaimRow
    from lab.features.trace.lines import AttentionLine

__all__ = [
    "along_answers",
    "ask",
    "ask_again",
    "attention",
    "batched",
    "by_length",
    "caches",
    "ceilings_of",
    "cheaper_prompt_token",
    "check",
    "chunks_cost",
    "compared",
    "context_in_batch",
    "decode_law",
    "disturbed",
    "drafts",
    "drafts_to_gain",
    "explains",
    "figures",
    "grade",
    "guess",
    "guesses_and_errors",
    "is_settled",
    "kernels",
    "kv_bytes",
    "law_holds",
    "lawful",
    "limit_by_rates",
    "limit_of_step",
    "limits",
    "longer_prompt",
    "machine_name",
    "memory_bytes",
    "middle",
    "note",
    "noted",
    "observe",
    "overhead",
    "ratio",
    "ratios",
    "repacked",
    "rows",
    "same_request",
    "same_weights",
    "say",
    "sessions_vary",
    "shape",
    "shared_heads",
    "smaller_cache",
    "step_cost",
    "step_ms",
    "steps_s",
    "textbook",
    "threads_gain",
    "times_of",
    "users_together",
]

PICTURE_SIZE = (10, 4.6)
N_LAYERS = 6  # whose attention is drawn

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


def draw(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Draw an experiment as its command does."""
    for part in kinds.experiments_of(
        timed_runs(records), [ceilings] if ceilings else [], runs
    ):
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
    groups = comparison.groups(timed_runs(records))
    comparisons = comparison.compare_groups(groups)
    text_comparison.print_comparisons(
        groups, comparisons, comparison.AT_LEAST, console.console()
    )


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """Print what limited runs of one setup as `lab explain` does, without advice.

    Returns the rows for the plots.
    """
    timed = timed_runs(records)
    label = text_setup.model_label(timed[0])
    print_sections([explained(label, timed, ceilings, has_advice=False)], console.console())
    return explanation.explain(timed, ceilings)


def gains(records: Sequence[Record], ceilings: Ceilings) -> None:
    """Print the gains that the ceilings predict for other settings, as `lab explain` does."""
    timed = timed_runs(records)
    for change in advice.changes(explanation.explain(timed, ceilings), timed[0], ceilings):
        print(advice.sentence(change))


def experiments(records: Sequence[Record], ceilings: Ceilings) -> None:
    """The same for the lab's experiments."""
    for experiment in experiment_advice(records, ceilings):
        print(advice.sentence(experiment))


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
    def rows(self) -> list[ClaimRow]: ...


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
    written = page.report(path, timed_runs(records), [ceilings])
    print(f"The page is also in the file {written}. You can open it in a browser.")
    return LessonShown(path)


# Figures


def repeats(n_figures: int = 1) -> int:
    """The fewest runs (of a trial: blocks) with which an interval can be told for each of
    `n_figures` figures that are compared together."""
    return stats.fewest_for_interval(1 - (1 - stats.CONFIDENCE) / n_figures)


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

    lengths = summaries.summary(table.runs(timed_runs(sweep)))
    prefill = sweep_laws.prefill_law(lengths)
    if short:
        lengths = pd.concat([summaries.summary(table.runs(timed_runs(short))), lengths])
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

    measured = choosing_figures(timed_runs(records), [])
    if measured is None:
        raise LabError("No run chose a token.", "Measure again: lab.choose()")
    shares: dict[int, float] = {}
    for row in measured.rows():
        if row.name == choosing.DEFAULT:
            shares[row.n_seq] = 100 * row.share
    return shares


def verdicts(session: VerdictsShown, guesses: Mapping[int, object]) -> pd.DataFrame:
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


def rows_of(*rows: dict[str, object]) -> pd.DataFrame:
    """A table of figures that a notebook computed: a row for each dict, headed by its first
    value."""
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        if pd.api.types.is_float_dtype(frame[name]):
            frame[name] = frame[name].map(digits)
    return frame.set_index(frame.columns[0])


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
