"""What the notebooks use besides `lab`: tables as the commands print them, a server, guesses and exercises.

A missing guess or answer is Python's `...`; it prints a sentence instead of raising an error. A wrong guess of a pop
question is kept in a file beside the notebooks, with the same question for other numbers. The last notebook asks it.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.app import kinds
from lab.core import memory, results
from lab.core.cost import StepCost
from lab.core.lists import join_and
from lab.core.record import SCHEMA, Ceilings, Model, Record, Settings
from lab.core.request import RequestRecord
from lab.core.results import Contents
from lab.core.shape import BLOCKS
from lab.errors import LabError
from lab.features.explain import advice
from lab.features.explain.section import explained
from lab.features.predict import tables
from lab.features.report import page
from lab.models import catalog, devices, synthetic
from lab.process.wire import MUL_MAT
from lab.remote import own_server
from lab.remote.own_server import OwnServer
from lab.roofline import explanation, probing, step_kernels
from lab.roofline.prediction import Prediction
from lab.runner import machine
from lab.show import (
    comparison,
    console,
    sweep_laws,
    table,
    text_comparison,
    text_doubts,
    text_requests,
    text_setup,
    wording,
)
from lab.show.section import Context, Picture, print_sections
from lab.show.sweep_laws import Law

if TYPE_CHECKING:
    import pandas as pd

    from lab.features.trace.lines import AttentionLine

CLOSE = 1.1
WRONG = 1.5  # a guess within the first factor is good; one outside the second is asked again
KEPT = Path("guesses.json")  # in the folder of the notebooks, where their kernels run

_running: list[OwnServer] = []

block = (
    BLOCKS.__getitem__
)  # how a quantization packs weights: (weights in a block, bytes of a block)
device = devices.find_device
roof = step_kernels.roof
sessions = comparison.by_session
threads = machine.default_threads


def begin() -> None:
    """Print the versions of the lab and of its records, and set up tables."""
    import pandas as pd

    pd.set_option("display.max_colwidth", None)  # cells hold sentences
    print(f"mini-lab {metadata.version('mini-lab')}, results files in format {SCHEMA}")


# What the commands print and draw


def show(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Print what `lab show` prints; `ceilings` and plain `runs` add the predictions of an experiment."""
    made = kinds.sections(records, Context([ceilings] if ceilings else [], runs))
    kinds.print_results(records, console.console(), made)


def rows(records: Sequence[Record]) -> tuple[Any, ...]:
    """The rows of an experiment's table, as in `lab show --json`. LabError for other runs."""
    parts = kinds.experiments_of(_timed(records))
    if not parts:
        raise LabError(
            "These runs belong to no experiment.",
            "Run one: lab.batch(), lab.turns() or lab.stall()",
        )
    return tuple(parts[0].rows)


def draw(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Draw an experiment as its command does."""
    for part in kinds.experiments_of(_timed(records), [ceilings] if ceilings else [], runs):
        for picture in part.pictures:
            _draw(picture, (10, 4.6))


def draw_attention(line: AttentionLine) -> None:
    """Draw what `lab.attention` returns as `lab trace --attention` does: a matrix for each layer."""
    from lab.features.trace import attention_section

    for picture in attention_section.section(line).pictures:
        _draw(picture, picture.size)


def compare(records: Sequence[Record]) -> None:
    """Print a comparison of the setups in `records` as `lab compare` does."""
    groups = comparison.groups(_timed(records))
    text_comparison.print_comparisons(
        groups, comparison.compare_groups(groups), comparison.AT_LEAST, console.console()
    )


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """Print what limited runs of one setup as `lab explain` does, without advice. Returns the rows for the plots."""
    timed = _timed(records)
    label = text_setup.model_label(timed[0])
    print_sections([explained(label, timed, ceilings, has_advice=False)], console.console())
    return explanation.explain(timed, ceilings)


def gains(records: Sequence[Record], ceilings: Ceilings) -> None:
    """Print the gains that the ceilings predict for other settings, as `lab explain` does."""
    timed = _timed(records)
    for lever in advice.changes(explanation.explain(timed, ceilings), timed[0], ceilings):
        print(advice.sentence(lever))


def experiments(records: Sequence[Record], ceilings: Ceilings) -> None:
    """The same for the lab's experiments."""
    timed = _timed(records)
    for one in advice.experiments(explanation.explain(timed, ceilings), timed, ceilings):
        print(advice.sentence(one))


def show_ranking(predictions: Sequence[Prediction]) -> None:
    """Print the table of `lab.predict` on several devices, as the command does."""
    print_sections([tables.ranking(predictions)], console.console())


def abilities(records: Sequence[RequestRecord]) -> None:
    """Print what the server of these requests can do, as `lab measure --url` does."""
    text_requests.print_endpoint(records[0].endpoint, records[0].model, (), console.console())


@dataclass(frozen=True, repr=False)
class Shown:
    """A page that Jupyter shows below a cell."""

    path: str

    def __repr__(self) -> str:
        return f"The page is {self.path}"

    def _repr_html_(self) -> str:
        return f'<iframe src="{html.escape(self.path)}" width="100%" height="900"></iframe>'


def explore(records: Sequence[Record], ceilings: Ceilings, path: str = "explore.html") -> Shown:
    """Write plain runs as `lab report` does, a page with sliders, and return it for display below the cell."""
    written = page.report(path, _timed(records), [ceilings])
    print(f"The page is also in the file {written}. You can open it in a browser.")
    return Shown(path)


# Figures


def figures(records: Sequence[Record]) -> pd.DataFrame:
    """The most used columns of the summary, one row per setup and length. Times are medians."""
    columns = "model n_threads n_ubatch n_prompt n_gen prefill_s tpot_ms e2e_s prefill_share"
    return table.summary(table.runs(_timed(records)))[columns.split()]


def split(records: Sequence[Record]) -> None:
    """Print each generation as the sum of its two phases (medians)."""
    for row in figures(records).itertuples():
        tpot_s = row.tpot_ms / 1e3
        prefill, token, decode = map(
            wording.seconds, (row.prefill_s, tpot_s, (row.n_gen - 1) * tpot_s)
        )
        print(
            f"{row.n_prompt:,} prompt tokens, {row.n_gen:,} generated: prefill {prefill} + decode {row.n_gen - 1:,} x "
            f"{token} = {prefill} + {decode}; measured total {wording.seconds(row.e2e_s)}; prefill takes "
            f"{100 * row.prefill_s / row.e2e_s:.0f} % (medians of each, so the parts need not add up)"
        )


def both_laws(sweep: Sequence[Record]) -> tuple[Law, Law]:
    """Print and return the laws of a sweep of one setup: T(P) of the prompt length, t(p) of the position."""
    rows = table.summary(table.runs(_timed(sweep)))
    prefill = sweep_laws.prefill_law(rows)
    decode = sweep_laws.decode_law(rows)
    if prefill is None or decode is None:
        raise LabError(
            "The two formulas need at least four lengths.",
            "Take smaller steps: every=256, ubatch=256",
        )
    print(prefill, decode, sep="\n")
    return prefill, decode


def requests(
    prefill: Law, decode: Law, lengths: Sequence[int], answers: Sequence[int]
) -> pd.DataFrame:
    """The time of requests by the two laws, one row for each prompt length and answer length."""
    import pandas as pd

    rows = []
    for n_prompt, n_gen in itertools.product(lengths, answers):
        one, other = sweep_laws.request(prefill, decode, n_prompt, n_gen)
        times = map(wording.seconds, (one, other, one + other))
        rows.append((f"{n_prompt:,}", f"{n_gen:,}", *times, round(100 * one / (one + other))))
    return pd.DataFrame(
        rows, columns=["prompt", "answer", "prefill", "decode", "total", "prefill, %"]
    )


def terms(*rows: tuple[str, str, float, str]) -> pd.DataFrame:
    """A table of a formula's terms: (term, meaning, number, unit)."""
    import pandas as pd

    cells = [
        (
            term,
            meaning,
            f"{f'{number:,}' if isinstance(number, int) else wording.digits(number)} {unit}",
        )
        for term, meaning, number, unit in rows
    ]
    return pd.DataFrame(cells, columns=["term", "meaning", "here"]).set_index("term")


def kernels(ceilings: Ceilings, model: Model, n_threads: int, types: Sequence[str]) -> pd.DataFrame:
    """Kernel rates at a model's feed-forward shape: one row per quantization and number of tokens."""
    import pandas as pd

    headings = ["type", "tokens at once", "GB/s", "GFLOP/s"]
    wanted = (MUL_MAT, model.n_ff, model.n_embd, n_threads)
    rows = [
        (rate.type, rate.n_tokens, round(probing.gbps(rate), 2), round(probing.gflops(rate), 1))
        for rate in ceilings.rates
        if (rate.op, rate.rows, rate.columns, rate.n_threads) == wanted and rate.type in types
    ]
    if not rows:
        what = f"The kernels of {', '.join(types)} with {n_threads} threads are not measured at this model's shape."
        raise LabError(what, "Measure them: lab.ceilings(types=[...], threads=...)")
    return pd.DataFrame(rows, columns=headings).sort_values(headings[:2], ignore_index=True)


def step_ms(
    ceilings: Ceilings, model: Model, settings: Settings, n_tokens: int, n_past: int
) -> float:
    """The milliseconds of one step if each kernel runs at its ceiling. LabError for a kernel without a ceiling."""
    return 1e3 * step_kernels.total(model, settings, ceilings, n_tokens, n_past, 1).total_s


def step_cost(model: Model, n_tokens: int, n_past: int = 0) -> StepCost:
    """FLOPs and bytes of one step of `n_tokens` after `n_past`, with logits for the last token."""
    return step_kernels.step_cost(model, n_tokens, n_past, 1)


def shape(name: str, quantization: str) -> Model:
    """A model of `lab models` in a quantization, made from its shape; needs no file."""
    return synthetic.model_of(catalog.find(name), quantization)


def kv_bytes(model: Model, kind: str = "f16") -> float:
    """Bytes of one token in a KV cache of type `kind`. LabError if the model's header does not tell."""
    if n_bytes := memory.kv_bytes_per_position(model, kind, kind):
        return n_bytes
    raise step_kernels.not_known(model)


def caches(models: Sequence[Model]) -> pd.DataFrame:
    """KV cache sizes (F16): bytes per token, at 8,192 tokens, and the length at which the cache equals the weights."""
    import pandas as pd

    rows = [
        {
            "model": f"{model.name} {model.quantization}",
            "queries per kv head": (model.n_head or 0) // (model.n_head_kv or 1),
            "bytes per token": f"{kv_bytes(model):,.0f}",
            "cache at 8,192 tokens, GB": round(8192 * kv_bytes(model) / 1e9, 2),
            "weights, GB": round(model.n_bytes / 1e9, 2),
            "tokens until the cache weighs as much": f"{model.n_bytes / kv_bytes(model):,.0f}",
        }
        for model in models
        if model.n_bytes
    ]
    return pd.DataFrame(rows)


def ceilings_of(contents: Contents) -> Ceilings:
    """The ceilings in a results file for the machine of its first record. LabError without any."""
    return probing.need(
        contents.ceilings, probing.place_of_record(contents.records[0]), "this file"
    )


def machine_name(record: Record) -> str:
    """The machine that made a record, as the plots name it."""
    return machine.label(record.machine, record.settings)


def serve(n_threads: int | None = None) -> OwnServer:
    """Start a server with the embedded model on a free port, in the place of an earlier one; it ends with `end()`."""
    while _running:
        _running.pop().end()
    _running.append(own_server.start_own(catalog.embedded_path(), catalog.DEFAULT, n_threads))
    return _running[-1]


def events(record: RequestRecord) -> pd.DataFrame:
    """The events of a request: when each arrived (ms after the request was sent), its bytes, and what it carried."""
    import pandas as pd

    columns = record.request.events
    arrive_ms = [ns / 1e6 for ns in columns.arrive_ns]
    return pd.DataFrame({"arrive_ms": arrive_ms, "bytes": columns.n_bytes, "kind": columns.kind})


# Guesses and exercises


def guess(
    guess: Any,
    measured: float,
    unit: str,
    how: str = "measured",
    again: tuple[str, str, float] | None = None,
) -> None:
    """Print a guess, the measured (or, with `how`, computed) value, and by what factor the guess was off.

    `again` is a number such as "1.2", the question with other numbers, and its measured answer in the same unit: if the
    guess is off by more than a factor of WRONG, `ask` asks it. A better guess removes it.
    """
    if not math.isfinite(measured):
        print(f"{unit}: not known from this measurement")
        return
    value = f"{how}: {wording.digits(measured)} {unit}"
    number = _number(guess)
    if number is None:
        not_a_number = f"{guess!r} is not a number (write 12.5, without a unit)"
        print(f"{value}; {'you entered no guess' if guess is ... else not_a_number}")
        return
    factor = _factor(number, measured)
    words = (
        f"the guess is {wording.digits(factor)} times too {'high' if number > measured else 'low'}"
    )
    if not math.isfinite(factor):
        words = f"off by {wording.digits(abs(measured - number))}"
    elif factor <= CLOSE:
        words = "a good guess"
    print(f"your guess: {wording.digits(number)} {unit}; {value}; {words}")
    name, question, right = again or ("", "", math.nan)
    if factor > WRONG and math.isfinite(right):
        asked = {
            "words": question,
            "answer": float(right),
            "unit": unit,
            "guess": number,
            "measured": float(measured),
        }
        _write(_kept() | {name: asked})
        print(f"The last notebook asks this again, with other numbers (pop question {name}).")
    elif name:
        _forget(name)


def ask() -> None:
    """Print the questions whose guesses were wrong, with other numbers."""
    for number, asked in _kept().items():
        guessed, measured = (wording.digits(asked[name]) for name in ("guess", "measured"))
        then = f"With the numbers of notebook {number[0]}, you guessed {guessed} and measured {measured}"
        print(f'"{number}": {asked["words"]} ({then} {asked["unit"]}.)')
    if not _kept():
        print(f"No question to ask again: no guess was off by more than a factor of {WRONG:g}.")


def ask_again(guesses: Any) -> None:
    """Print the guesses, a dict by the questions' numbers, beside what was measured. Good ones are not asked again."""
    kept = _kept()
    if guesses is ... and kept:
        print("No guesses yet: replace the dots in the cell above, and run both cells.")
    elif guesses is not ... and not isinstance(guesses, dict):
        print(
            f"{guesses!r} does not say which questions are meant. Write {{{[*kept, '1.1'][0]!r}: 12.5}}."
        )
    for number, new in guesses.items() if isinstance(guesses, dict) else ():
        if number not in kept:
            print(f"{number!r} is not asked. Questions to ask: {join_and([*kept]) or 'none'}.")
        elif (value := _number(new)) is None:
            print(f"{number}: {new!r} is not a number. Write 12.5, without a unit.")
        else:
            print(f"{number}: ", end="")
            guess(value, kept[number]["answer"], kept[number]["unit"])
            if _factor(value, kept[number]["answer"]) <= WRONG:
                _forget(number)


def check(answer: Any, right: float | str, hint: str, within: float = 0.1) -> None:
    """Print whether an answer is right: the letter of a choice, or a number with a relative error up to `within`."""
    if answer is ...:
        print("No answer yet: replace the dots in the cell above, and run both cells.")
        return
    if isinstance(right, str):
        good = str(answer).strip().lower() == right
    else:
        number = _number(answer)
        if number is None:
            print(f"{answer!r} is not a number. Write 12.5, without a unit.")
            return
        good = abs(number - right) <= within * abs(right)
    print("Right." if good else f"Not yet. Hint: {hint}")


def _write(kept: dict[str, dict[str, Any]]) -> None:
    text = json.dumps({number: kept[number] for number in sorted(kept)}, indent=1)
    results.write_whole(KEPT, text.encode(), "The file of wrong guesses")


def _forget(number: str) -> None:
    if number in (kept := _kept()):
        _write({one: other for one, other in kept.items() if one != number})


def _kept() -> dict[str, dict[str, Any]]:
    """The questions to ask again, by their numbers. LabError if KEPT is not such a file."""
    try:
        questions = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        for one in questions.values():
            ", ".join(
                [
                    one["words"],
                    one["unit"],
                    *(f"{one[name]:g}" for name in ("answer", "guess", "measured")),
                ]
            )
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise LabError(
            f"{KEPT}, the file of wrong guesses, cannot be read: {error}", "Delete it."
        ) from error
    return questions


def _factor(one: float, other: float) -> float:
    """How many times as large the larger one is as the smaller one; infinite if one is not positive."""
    return max(one / other, other / one) if one > 0 and other > 0 else math.inf


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def _draw(picture: Picture, size: tuple[float, float]) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    figure = plt.figure(
        figsize=size, layout="constrained"
    )  # first: a new backend would stay non-interactive
    with matplotlib.rc_context({"text.parse_math": False}):
        picture.draw(figure)


def _timed(records: Sequence[Record]) -> list[Record]:
    """The records of timed runs without an error. LabError with the first error where there is none."""
    timed = [record for record in records if record.run.is_timed]
    if not timed:
        errors = text_doubts.failures(records)
        raise LabError(
            f"All runs failed. {' '.join(errors[:1])}".strip(),
            "Measure again, with shorter lengths.",
        )
    return timed
