"""What choosing a token would cost where a text does not say how its tokens were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.core import results
from lab.features.why.parts import SAMPLING, GapPart, Pair
from lab.features.why.readers.commands import KOBOLD, LLAMA, OLLAMA
from lab.features.why.readers.setup import program_of
from lab.roofline.choosing import default_cost_s
from lab.show.wording import percent, seconds

WITH_CHAIN = (LLAMA, OLLAMA, KOBOLD)
HOW_TO_MEASURE = "what llama-server's default chain costs here: lab choose"


def with_cost(parts: Sequence[GapPart], pair: Pair, folder: Path) -> list[GapPart]:
    """The parts; that of an unknown chain says what the default would cost on this machine.

    The cost comes from runs of `lab choose` in the folder, for the vocabulary of the side that has
    records. It is of llama-server's chain, which Ollama and KoboldCpp share.
    """
    completed: list[GapPart] = []
    has_chain = any(
        figure.is_of_server and program_of(figure) in WITH_CHAIN for _, figure in pair.sides
    )
    for part in parts:
        reason = part.reason
        if part.name == SAMPLING and part.lacking and has_chain:
            reason = f"{reason}; {cost(pair, folder)}"
        completed.append(replace(part, reason=reason))
    return completed


def cost(pair: Pair, folder: Path) -> str:
    """What the default chain takes for a token, and its share of the recorded side's token."""
    for letter, figure in pair.in_order:
        if not figure.records:
            continue
        here = figure.records[0].machine.cpu
        nearby = results.nearby({folder}, figure.records).records
        measured = [record for record in nearby if record.machine.cpu == here]
        cost_s = default_cost_s(measured, figure.records[0].model.n_vocab)
        if cost_s is not None:
            share = percent(cost_s * figure.tps)
            return (
                f"llama-server's default chain costs {seconds(cost_s)} a token here, {share} of "
                f"a token of {letter}"
            )
    return HOW_TO_MEASURE
