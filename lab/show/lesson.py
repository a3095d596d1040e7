"""What the notebooks say: a guess beside what was measured, tables as the commands print them, exercises.

What is printed or shown comes from the other rooms. A guess or an answer that is not written yet is
the dots of Python (`guess = ...`), and is met with a friendly word instead of an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import metadata
from numbers import Real
from typing import TYPE_CHECKING, Any

from lab.analysis import comparison as comparing
from lab.analysis import sweep_laws, table, wording
from lab.analysis.sweep_laws import DecodeLaw, PrefillLaw
from lab.core import cost
from lab.core.record import OK, SCHEMA, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.process.wire import MUL_MAT
from lab.show import console, text_compare, text_results, text_why
from lab.why import advice, prediction, probing, roofline
from lab.why.roofline import Explained

if TYPE_CHECKING:
    import pandas as pd

CLOSE = 1.1
"""A guess within this factor is good."""


def begin() -> None:
    """Say which lab, and which version of the records, what follows was made with."""
    import pandas as pd

    pd.set_option("display.max_colwidth", None)  # a meaning is a sentence
    print(f"mini-lab {metadata.version('mini-lab')}, records of schema {SCHEMA}")


def show(records: Sequence[Record]) -> None:
    """The table and its sentences, as `lab show` prints them."""
    text_results.print_results(records, console.console())


def compare(records: Sequence[Record]) -> None:
    """Groups of runs beside each other, as `lab compare` prints them."""
    found = comparing.groups(_timed(records))
    text_compare.print_comparisons(found, comparing.compare_groups(found), comparing.AT_LEAST, console.console())


def explain(records: Sequence[Record], ceilings: Ceilings) -> list[Explained]:
    """What limited runs of one setup, as `lab explain` prints it before its `promises`; its rows, for the pictures."""
    timed = _timed(records)
    rows = roofline.explain(timed, ceilings)
    text_why.print_explained(table.model_label(timed[0]), rows, ceilings, [], console.console())
    return rows


def promises(records: Sequence[Record], ceilings: Ceilings) -> None:
    """What the ceilings promise of other settings, as `lab explain` prints it."""
    timed = _timed(records)
    for lever in advice.levers(roofline.explain(timed, ceilings), timed[0], ceilings):
        print(text_why.advice_of(lever))


def figures(records: Sequence[Record]) -> pd.DataFrame:
    """The summary with only its most telling columns, one row per setup and length; times are medians."""
    rows = table.summary(table.runs(_timed(records)))
    return rows[
        ["model", "n_threads", "n_ubatch", "n_prompt", "n_gen", "prefill_s", "tpot_ms", "e2e_s", "prefill_share"]
    ]


def kernels(found: Ceilings, model: Model, n_threads: int, types: Sequence[str]) -> pd.DataFrame:
    """How fast packed weights of a model's shape are read and multiplied here: a row per type and size of step."""
    import pandas as pd

    rows = [
        {
            "type": rate.type,
            "tokens at once": rate.n_tokens,
            "GB/s": round(probing.gbps(rate), 2),
            "GFLOP/s": round(probing.gflops(rate), 1),
        }
        for rate in found.rates
        if (rate.op, rate.rows, rate.columns, rate.n_threads) == (MUL_MAT, model.n_ff, model.n_embd, n_threads)
        and rate.type in types
    ]
    if not rows:
        raise LabError(
            f"The kernels of {', '.join(types)} with {n_threads} threads are not measured in this model's shape.",
            "Measure them: ceilings.measure(types=[...], threads=...)",
        )
    return pd.DataFrame(rows).sort_values(["type", "tokens at once"], ignore_index=True)


def step_ms(found: Ceilings, model: Model, settings: Settings, n_tokens: int, n_past: int) -> float:
    """Least milliseconds of one step in its kernels, by a machine's ceilings. LabError for a kernel without one."""
    least = roofline.step_kernels(model, settings, found, n_tokens, n_past, 1)
    if least is None:
        raise LabError(f"What a step of {model.name} costs is not known from its header.", "Take another model.")
    return 1e3 * least.total_s


def devices(model: Model, settings: Settings, n_prompt: int, n_gen: int, names: Sequence[str] = ()) -> None:
    """The same request on devices of models/devices.toml (all without `names`), as `lab predict -d all` prints it."""
    found = prediction.on_devices(model, settings, n_prompt, n_gen, names)
    text_why.print_devices(model, n_prompt, n_gen, found, console.console())


def caches(models: Sequence[Model]) -> pd.DataFrame:
    """How large the KV cache of models is (F16), and after how many tokens it weighs as much as the weights."""
    import pandas as pd

    rows = []
    for model in models:
        per_position = cost.kv_bytes_per_position(model)
        if per_position and model.n_head and model.n_head_kv and model.n_bytes:
            rows.append(
                {
                    "model": f"{model.name} {model.quantization}",
                    "queries per kv head": model.n_head // model.n_head_kv,
                    "bytes per token": f"{per_position:,.0f}",
                    "cache at 8,192 tokens, GB": round(8192 * per_position / 1e9, 2),
                    "weights, GB": round(model.n_bytes / 1e9, 2),
                    "tokens until the cache weighs as much": f"{model.n_bytes / per_position:,.0f}",
                }
            )
    return pd.DataFrame(rows)


def split(records: Sequence[Record]) -> None:
    """A generation as the sum of its two jobs, with this machine's numbers (medians)."""
    for row in figures(records).itertuples():
        writes = (row.n_gen - 1) * row.tpot_ms / 1e3
        parts = wording.seconds(row.prefill_s), wording.seconds(writes), wording.seconds(row.e2e_s)
        print(
            f"{row.n_prompt:,} in, {row.n_gen:,} out: reading {parts[0]} + writing {row.n_gen - 1:,} x "
            f"{wording.seconds(row.tpot_ms / 1e3)} = {parts[0]} + {parts[1]}, of {parts[2]} in all (each a median "
            f"of its own); reading is {100 * row.prefill_share:.0f} %"
        )


def both_laws(sweep: Sequence[Record]) -> tuple[PrefillLaw, DecodeLaw]:
    """What a sweep of one setup shows: T(P) of the prompt's length, t(p) of the position. Printed with its numbers."""
    rows = table.summary(table.runs(_timed(sweep)))
    prefill, decode = sweep_laws.prefill_law(rows), sweep_laws.decode_law(rows)
    if prefill is None or decode is None:
        raise LabError("Four lengths are the fewest for a law.", "Take smaller steps: every=256, ubatch=256")
    print(prefill, decode, sep="\n")
    return prefill, decode


def requests(prefill: PrefillLaw, decode: DecodeLaw, lengths: Sequence[int], answers: Sequence[int]) -> pd.DataFrame:
    """What requests of these prompt and answer lengths take by the two laws: a row for each pair."""
    import pandas as pd

    rows = []
    for n_prompt in lengths:
        for n_gen in answers:
            each = sweep_laws.request(prefill, decode, n_prompt, n_gen)
            rows.append(
                {
                    "prompt": f"{n_prompt:,}",
                    "answer": f"{n_gen:,}",
                    "reading": wording.seconds(each.prefill_s),
                    "writing": wording.seconds(each.decode_s),
                    "the whole": wording.seconds(each.e2e_s),
                    "reading, %": round(100 * each.prefill_share),
                }
            )
    return pd.DataFrame(rows)


def terms(*rows: tuple[str, str, float, str]) -> pd.DataFrame:
    """The terms of a formula: each with its meaning, its number and its unit."""
    import pandas as pd

    shown = [
        (term, meaning, f"{f'{number:,}' if isinstance(number, int) else wording.digits(number)} {unit}")
        for term, meaning, number, unit in rows
    ]
    return pd.DataFrame(shown, columns=["term", "meaning", "here"]).set_index("term")


def beside(guess: Any, measured: float, unit: str, how: str = "measured") -> None:
    """The reader's guess beside the value that was measured (or, `how`, counted), and how far it was off."""
    if not math.isfinite(measured):
        print(f"{unit}: this measurement cannot tell")
        return
    found = f"{how}: {wording.digits(measured)} {unit}"
    number = _number(guess)
    if number is None:
        why = (
            "you wrote no guess"
            if guess is ...
            else f"{guess!r} is no number (write one, such as 12.5, without a unit)"
        )
        print(f"{found}; {why}")
        return
    told = f"your guess: {wording.digits(number)} {unit}; {found}; "
    if number <= 0 or measured <= 0:
        print(told + f"off by {wording.digits(abs(measured - number))}")
        return
    factor = max(number / measured, measured / number)
    if factor <= CLOSE:
        print(told + "well guessed")
    else:
        print(told + f"you guessed {wording.digits(factor)} times too {'much' if number > measured else 'little'}")


def check(answer: Any, right: float | str, hint: str, within: float = 0.1) -> None:
    """Say whether an exercise's answer is right: a number within a share of `right`, or the letter of a choice."""
    if answer is ...:
        print("No answer yet: put it in place of the dots in the cell above, and run both cells.")
        return
    if isinstance(right, str):
        good = str(answer).strip().lower() == right
    else:
        number = _number(answer)
        if number is None:
            print(f"{answer!r} is no number. Write one, such as 12.5, without its unit.")
            return
        good = abs(number - right) <= within * abs(right)
    print("Right." if good else f"Not yet. Hint: {hint}")


def _timed(records: Sequence[Record]) -> list[Record]:
    """The runs that went well. LabError says why there is none."""
    timed = [record for record in records if record.run.status == OK and not record.run.warmup]
    if not timed:
        errors = text_results.failures(records)
        raise LabError(f"No run went well. {' '.join(errors[:1])}".strip(), "Measure again, perhaps something smaller.")
    return timed


def _number(value: Any) -> float | None:
    """A number that a reader wrote; None for the dots and for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)
