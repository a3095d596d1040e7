"""Files of very many setups: what is shown has a bound, the text says so.

Figures for all commands: python -m tests.bench.large_files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import pytest

from lab.app import kinds
from lab.core.record import Record
from lab.show import canvas, selection, table
from lab.show.plot_decode import MOST_LENGTHS, plot_decode
from lab.show.plot_prefill import plot_prefill
from lab.show.section import Section
from tests.hostile import large

N_MODELS = selection.MOST_PANELS + 8


def drawn(draw: Callable[[Any, Any], Any], records: Sequence[Record]) -> Any:
    """The figure that a function of a picture draws."""
    return canvas.drawn(lambda figure: draw(records, figure.subplots()), (8, 5))


def test_a_picture_shows_the_newest_setups_and_says_so() -> None:
    records = list(large.models(N_MODELS))
    for draw in (plot_prefill, plot_decode):
        figure = drawn(draw, records)
        titles = [ax.get_title() for ax in figure.axes]
        assert len(titles) == selection.MOST_PANELS
        assert titles[-1].startswith(f"m{N_MODELS - 1}")
        title: Any = figure.get_suptitle()
        expected = f"newest {selection.MOST_PANELS} of {N_MODELS} setups"
        assert expected in " ".join(title.split())


def sentences(sections: list[Section]) -> list[str]:
    texts: list[str] = []
    for section in sections:
        texts += [*map(str, section.sentences), *sentences(list(section.parts))]
    return texts


def test_tables_are_of_the_newest_setups_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_TABLES", 5)
    sections = kinds.sections(list(large.models(8)))
    with_tables = [part for part in sections[0].parts if part.columns]
    assert len(with_tables) == 5
    assert "5 of 8 setups are shown, the newest." in " ".join(sentences(sections))
    of_few = sentences(kinds.sections(list(large.models(5))))
    assert not any("are shown" in sentence for sentence in of_few)


def test_a_picture_of_decode_has_a_line_for_some_of_very_many_lengths() -> None:
    records = list(large.lengths(100))
    labels = drawn(plot_decode, records).axes[0].get_legend_handles_labels()[1]
    assert sum("prompt tokens" in label for label in labels) == MOST_LENGTHS
    assert "after 119 prompt tokens" in labels


def test_steps_of_many_runs_take_no_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    n_tables = []
    make = pd.DataFrame.__init__

    def count(frame: pd.DataFrame, *arguments: Any, **options: Any) -> None:
        n_tables.append(1)
        make(frame, *arguments, **options)

    monkeypatch.setattr(pd.DataFrame, "__init__", count)
    rows = table.steps(list(large.sessions(500)))
    assert rows.run.nunique() == 500
    assert len(n_tables) < 100
