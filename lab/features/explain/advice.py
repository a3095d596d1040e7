"""Advice in words: what is predicted to be faster, and the command that tries it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import shell, shown
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Ceilings, Record
from lab.roofline import gains
from lab.roofline.gains import ACCEPTANCE, ANSWER, Batching, CachedPrompt, Drafting
from lab.roofline.step_prediction import taught_by
from lab.runner.as_options import options
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

PHASES = {PREFILL: "prefill of {:,} tokens", DECODE: "decode after {:,} tokens"}

ONE_SEQUENCE = ("--kv-unified", "on")
RANDOM_TOKENS = ("--prompt", "random")
LEFT_OUT = {"turns": [ONE_SEQUENCE], "speculate": [ONE_SEQUENCE, RANDOM_TOKENS]}
"""Options that commands do not get: they have one sequence, and speculation uses the lab's texts.
"""


class Advice(NamedTuple):
    """A change with its predicted gain, in words; its figures; the command that tries it, if there
    is one.
    """

    change: str
    command: str | None
    figures: dict[str, Any]


def sentence(advice: Advice) -> str:
    """The change with its predicted gain, and the command to try it."""
    if advice.command is None:
        return f"Predicted for {advice.change}."
    return f"Predicted for {advice.change}. Try: {advice.command}"


def changes(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> list[Advice]:
    """The changes of settings and weights with the largest gains, for a setup's explained rows."""
    advice = []
    for change in gains.changes(rows, record, ceilings):
        by_phase = []
        for phase, gain in change.gains.items():
            subject = PHASES[phase].format(gain.n_prompt)
            by_phase.append(f"{subject} is {digits(gain.factor)}x as fast")
        advice.append(
            Advice(f"{change.label}: {', '.join(by_phase)}", change.command, change.figures)
        )
    return advice


def experiments(
    rows: pd.DataFrame, records: Sequence[Record], ceilings: Ceilings
) -> list[Advice]:
    """The experiments with a predicted gain, for one setup's explained rows and their records."""
    plain = [record for record in records if record.run.is_plain]
    rows = rows[rows.doubts.map(shown.may_promise)]
    if not plain or rows.empty:
        return []
    record = plain[0]
    prediction = taught_by(plain, record, ceilings)
    decode = gains.shortest_decode(rows)
    prefill = gains.longest_prefill(rows, record.model)
    advice = []
    if decode is not None:
        batching = gains.batching(decode, prediction)
        if batching is not None:
            advice.append(_of_batching(batching, record))
    if prefill is not None:
        cached_prompt = gains.cached_prompt(prefill, prediction)
        if cached_prompt is not None:
            advice.append(_of_cached_prompt(cached_prompt, record))
    if decode is not None:
        drafting = gains.drafting(decode, prediction)
        if drafting is not None:
            advice.append(_of_drafting(drafting, record))
    return advice


def _of_batching(batching: Batching, record: Record) -> Advice:
    change = (
        f"{batching.n_seq} sequences decoded together: {digits(batching.total_gain)}x the tokens/s "
        f"in total, {digits(batching.user_share)}x per user, after prompts of "
        f"{plural(batching.n_prompt, 'token')}"
    )
    sizes = {
        "--sequences": f"1,{batching.n_seq}",
        "--prompt-len": batching.n_prompt,
        "--gen": batching.n_gen,
    }
    return _advice("batch", change, sizes, batching, record)


def _of_cached_prompt(cached: CachedPrompt, record: Record) -> Advice:
    change = (
        f"{cached.n_cached:,} of {cached.n_prompt:,} prompt tokens cached from an earlier turn "
        f"(all but {cached.n_new}): the first token comes {digits(cached.gain)}x as fast "
        f"(saves {seconds(cached.saved_s)} of {seconds(cached.ttft_s)})"
    )
    sizes = {
        "--system": cached.n_cached - cached.n_new - ANSWER,
        "--turn": f"{cached.n_new}+{ANSWER}",
        "--turns": 2,
    }
    return _advice("turns", change, sizes, cached, record)


def _of_drafting(drafting: Drafting, record: Record) -> Advice:
    change = (
        f"speculative decoding that guesses {plural(drafting.n_draft, 'token')} at a time: faster "
        f"if each is right with a chance above {100 * drafting.least_acceptance:.0f} %; at "
        f"{100 * ACCEPTANCE:.0f} %, {digits(drafting.gain)}x as fast (without the time to draft)"
    )
    sizes = {
        "--draft": "lookup",
        "--draft-len": drafting.n_draft,
        "--prompt-len": drafting.n_prompt,
        "--gen": drafting.n_gen,
    }
    return _advice("speculate", change, sizes, drafting, record)


def _advice(
    experiment: str,
    change: str,
    sizes: dict[str, object],
    gain: Batching | CachedPrompt | Drafting,
    record: Record,
) -> Advice:
    """Advice to try an experiment of these sizes with the settings of a record."""
    arguments: list[object] = []
    for name, value in sizes.items():
        arguments += [name, value]
    for option in options(record):
        if option not in LEFT_OUT.get(experiment, ()):
            arguments += option
    command = shell.lab(experiment, *arguments)
    figures = {**dataclasses.asdict(gain), "command": command, "experiment": experiment}
    return Advice(change, command, figures)
