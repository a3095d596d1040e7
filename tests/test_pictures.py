"""Rules that every picture keeps, tested on figures: nothing is cut off or covered, numbers and colours can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from lab.app import kinds
from lab.core.record import Record
from lab.features.explain.picture import plot_roofline
from lab.features.tune import result
from lab.roofline import explanation, step_kernels
from lab.show import canvas, comparison, plot_runs, plot_trial
from lab.show.section import Picture, numbered
from tests.bench import doubt
from tests.conftest import MODEL, SETTINGS, make_record, make_run
from tests.test_batch import KERNELS, session as batches
from tests.test_doubt import repeats
from tests.test_explain import FAST, timed
from tests.test_requests_shown import session as served
from tests.test_stall import stall_record
from tests.test_table_and_plots import session
from tests.test_tune_shown import whole as tuned

HOLLOW = "disturbed runs (hollow)"


def setups(n: int) -> list[Record]:
    """Runs of three lengths in so many setups."""
    settings = (dataclasses.replace(SETTINGS, n_threads=i) for i in range(1, n + 1))
    return [record for one in settings for record in session(settings=one)]


def trial(n_blocks: int = 8, n_disturbed: int = 0) -> list[Record]:
    """Variant B takes 1.5 times the time of A (in each second block twice) to prefill, and as long to decode."""
    made = []
    for block in range(n_blocks):
        for name, ms in (("A: --threads 2", 1.0), ("B: --threads 1", 1.5 if block % 2 else 2.0)):
            for repeat in range(2):
                run = make_run(1000, 5, repeat, prefill_ms=ms, block=block, variant=name)
                record = make_record(run)
                made.append(doubt.neighbour(record) if block < n_disturbed else record)
    return made


def of_levers(records: list[Record], name: str) -> Callable[[Figure], Any]:
    (section,) = [one for one in kinds.experiments_of(records, [KERNELS]) if one.name == name]
    return section.pictures[0].draw


def roof(records: list[Record]) -> Callable[[Figure], Any]:
    rows = explanation.explain(records, FAST)
    return lambda figure: plot_roofline(
        rows, step_kernels.roof(FAST), "tiny Q4_0", figure.subplots()
    )


def stalled() -> list[Record]:
    records = [
        stall_record(100, chunk, n, i) for chunk in (10, None) for n in (1, 2) for i in range(6)
    ]
    return [doubt.neighbour(records[0]), *records[1:]]


PICTURES: dict[str, tuple[Callable[[], Callable[[Figure], Any]], tuple[float, float]]] = {
    "prefill": (lambda: plot_runs.drawings(session())["prefill"], (8, 5)),
    "shares": (lambda: plot_runs.drawings(session())["shares"], (8, 5)),
    "one run": (lambda: plot_runs.drawings([make_record()])["prefill"], (8, 5)),
    "decode": (lambda: plot_runs.drawings(repeats(1))["decode"], (8, 5)),
    "on a page": (lambda: plot_runs.drawings(setups(2))["decode"], (5, 3.9)),
    "many setups": (lambda: plot_runs.drawings(setups(7))["prefill"], (8, 5)),
    "many lines": (lambda: plot_runs.drawings(setups(8))["decode"], (8, 5)),
    "ttft": (lambda: plot_runs.drawings(served())["prefill"], (8, 5)),
    "sweep": (
        lambda: plot_runs.drawings([make_record(make_run(100, 3, every=20))])["sweep"],
        (11, 5),
    ),
    "ab": (lambda: plot_runs.drawings(trial())["ab"], (11, 5)),
    "tune": (lambda: result.section(result.of_sessions(tuned())[0]).pictures[0].draw, (10, 4.6)),
    "roofline": (lambda: roof(timed(1.5)), (8, 5)),
    "batch": (lambda: of_levers(batches((1, 2, 8)), "batch"), (11, 5)),
    "stall": (lambda: of_levers(stalled(), "stall"), (11, 5)),
}


@pytest.fixture(params=PICTURES, scope="module")
def figure(request: pytest.FixtureRequest) -> Figure:
    make, size = PICTURES[request.param]
    made = canvas.drawn(make(), size)
    made.draw_without_rendering()
    return made


def texts(figure: Figure) -> Iterator[Text]:
    yield from (
        text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()
    )


def legends(figure: Figure) -> list[Any]:
    return [
        *figure.legends,
        *(legend for ax in figure.axes if (legend := ax.get_legend()) is not None),
    ]


def test_no_picture_cuts_off_or_covers_anything(figure: Figure) -> None:
    frame = figure.bbox.padded(1)
    boxes: list[Any] = [
        artist.get_tightbbox() for artist in (*figure.axes, *figure.legends, *figure.texts)
    ]
    for box in boxes:
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert frame.y0 <= box.y0 and box.y1 <= frame.y1
    for legend in legends(figure):
        for ax in figure.axes:
            assert not legend.get_window_extent().overlaps(ax.get_window_extent())


def test_every_picture_has_a_title_units_and_words_that_a_stranger_knows(figure: Figure) -> None:
    title = figure.get_suptitle() or figure.axes[0].get_title()
    assert "tiny" in title
    shown = " ".join(text.get_text() for text in texts(figure))
    assert "arm" not in shown.split() and "95 %" not in shown.replace("95 % of the", "").replace(
        "95 % interval", ""
    )


def test_numbers_of_axes_have_separators_and_stand_at_the_measured_lengths() -> None:
    records = [
        make_record(make_run(n, 5, i, prefill_ms=2)) for n in (10, 1000, 10000) for i in range(2)
    ]
    ax = lab.plot_prefill(records)
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["10,000", "1,000", "10"]
    assert list(ax.xaxis.get_minorticklocs()) == []
    slow = lab.plot_decode([make_record(make_run(10, 5, decode_ms=4000))])
    slow.figure.draw_without_rendering()  # type: ignore[union-attr]
    assert "2,000" in [tick.get_text() for tick in slow.get_yticklabels()]


@pytest.mark.parametrize(("n", "n_panels"), [(6, 1), (7, 7)])
def test_more_than_six_series_get_small_multiples_with_shared_axes(n: int, n_panels: int) -> None:
    figure = canvas.drawn(plot_runs.drawings(setups(n))["prefill"], (8, 5))
    assert len(figure.axes) == n_panels
    assert (
        len({ax.get_ylim() for ax in figure.axes})
        == len({ax.get_xlim() for ax in figure.axes})
        == 1
    )
    if n_panels > 1:
        assert [ax.get_title() for ax in figure.axes] == [
            f"tiny Q4_0, n_threads {i}" for i in range(1, 8)
        ]


def test_a_colour_means_one_thing_in_all_panels() -> None:
    figure = canvas.drawn(plot_runs.drawings(setups(3))["decode"], (8, 5))
    assert [ax.get_title() for ax in figure.axes] == [
        f"tiny Q4_0, n_threads {i}" for i in (1, 2, 3)
    ]
    colours = [
        [line.get_color() for line in ax.lines if len(np.asarray(line.get_xdata())) > 1]
        for ax in figure.axes
    ]
    assert len({tuple(dict.fromkeys(of)) for of in colours}) == 1 and len(set(colours[0])) == 3
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [
        "after 10 prompt tokens",
        "after 100 prompt tokens",
        "after 1,000 prompt tokens",
    ]
    many = canvas.styles(12)
    assert len({tuple(style["color"]) for style in many}) == 12


def test_a_trial_is_drawn_as_ratios_with_every_block() -> None:
    records = trial(n_disturbed=1)
    drawn = plot_runs.drawings(records)
    assert list(drawn) == ["ab", "decode"]
    figure = canvas.drawn(drawn["ab"], (11, 5))
    (ax,) = figure.axes
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["prefill, 1,000 tokens", "TPOT, 1,000 tokens"]
    assert "\u2190 B is faster" in ax.get_xlabel() and "A is faster \u2192" in ax.get_xlabel()
    assert ax.get_title() == "B: --threads 1\nagainst A: --threads 2"
    lines: list[Any] = list(ax.lines)
    quiet = [
        line for line in lines if line.get_marker() == "o" and line.get_markerfacecolor() != "none"
    ]
    assert sorted(quiet[0].get_xdata()) == pytest.approx([1.5] * 4 + [2.0] * 3)
    assert HOLLOW in [line.get_label() for line in lines]
    assert any(list(line.get_xdata()) == [1, 1] for line in lines)
    (row, _) = comparison.compare(records)[0].rows
    assert row.ratio is not None
    shown = " ".join(text.get_text() for text in ax.texts)
    assert f"{row.estimate:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})" in shown
    assert (
        plot_trial.trials(records[:2]) == []
        and next(iter(plot_runs.drawings(session()))) == "shares"
    )


@pytest.mark.parametrize("name", ["batch", "stall"])
def test_experiments_draw_disturbed_runs_hollow(name: str) -> None:
    made: dict[str, Callable[[], list[Record]]] = {
        "batch": partial(batches, (1, 2)),
        "stall": stalled,
    }
    records = made[name]()
    records = records if name == "stall" else [doubt.neighbour(records[0]), *records[1:]]
    figure = canvas.drawn(of_levers(records, name), (11, 5))
    entries = [text.get_text() for legend in legends(figure) for text in legend.get_texts()]
    assert entries.count(HOLLOW) == 1
    hollow = [
        line for ax in figure.axes for line in ax.lines if line.get_markerfacecolor() == "none"
    ]
    assert any(len(np.asarray(line.get_xdata())) for line in hollow)


def test_a_model_with_dollars_in_its_name_is_no_formula() -> None:
    odd = dataclasses.replace(MODEL, name="a$b$")
    figure = canvas.drawn(plot_runs.drawings(session(model=odd))["prefill"], (8, 5))
    figure.draw_without_rendering()
    assert "a$b$" in figure.axes[0].get_title()


def test_pictures_of_equal_name_get_names_of_their_own() -> None:
    names = ("a", "batch", "batch-2", "batch", "batch-2")
    made = numbered([Picture(name, "", lambda figure: None) for name in names])
    assert [picture.name for picture in made] == [
        "a",
        "batch-1",
        "batch-2-1",
        "batch-3",
        "batch-2-2",
    ]
