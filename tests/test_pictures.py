"""Rules that every picture keeps, tested on figures: nothing is cut off or covered, numbers and
colours can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import lab
from lab.app import kinds
from lab.core import results, shell
from lab.core.record import Record
from lab.errors import LabError
from lab.features.explain import picture as explain_picture
from lab.features.explain.picture import plot_roofline
from lab.roofline import explanation, kernel_rates
from lab.show import canvas, comparison, plot_runs, plot_trial, text_setup
from lab.show.point_labels import label_points
from lab.show.section import Picture, numbered
from lab.show.wording import percent
from tests.bench import doubt
from tests.support.rates import FAST, timed
from tests.support.records import MODEL, SETTINGS, make_record, make_run, session
from tests.support.requests import request_session
from tests.support.sessions import KERNELS, batch_run, repeats
from tests.support.stalls import stall_record
from tests.support.tuning import full_session, section_of

Draw = Callable[[Figure], Any]

HOLLOW = "disturbed runs (hollow)"
DOCS = Path(__file__).parents[1] / "docs"
SAMPLES = DOCS.with_name("results")
SMALL = (8, 5)
WIDE = (11, 5)


def setups(n: int) -> list[Record]:
    """Runs of three lengths in n setups."""
    records = []
    for n_threads in range(1, n + 1):
        records += session(settings=dataclasses.replace(SETTINGS, n_threads=n_threads))
    return records


def long_name() -> list[Record]:
    """Runs of a model whose name is a path of 200 letters."""
    path = "/models/" + "a-long-folder/" * 13 + "tiny.gguf"
    return session(model=dataclasses.replace(MODEL, name=path))


def trial(n_blocks: int = 8, n_disturbed: int = 0) -> list[Record]:
    """Variant B takes 1.5 times the time of A (in each second block twice) to prefill, and as long
    to decode. The first blocks are disturbed."""
    records = []
    for block in range(n_blocks):
        ms_of_b = 2.0 if block % 2 == 0 else 1.5
        for variant, ms in (("A: --threads 2", 1.0), ("B: --threads 1", ms_of_b)):
            for repeat in range(2):
                run = make_run(1000, 5, repeat, prefill_ms=ms, block=block, variant=variant)
                record = make_record(run)
                records.append(doubt.neighbour(record) if block < n_disturbed else record)
    return records


def batches() -> list[Record]:
    """Two repeats of three numbers of sequences; the first run is disturbed."""
    records = []
    for repeat in range(2):
        records += [make_record(batch_run(n_seq, repeat)) for n_seq in (1, 2, 8)]
    return [doubt.neighbour(records[0]), *records[1:]]


def stalls() -> list[Record]:
    """Stalls with and without chunks, beside one and two answers; the first run is disturbed."""
    records = []
    for chunk in (10, None):
        for n_streams in (1, 2):
            records += [stall_record(100, chunk, n_streams) for _ in range(6)]
    return [doubt.neighbour(records[0]), *records[1:]]


def drawing(name: str, records: Any) -> Draw:
    return plot_runs.drawings(records)[name]


def drawing_of_experiment(name: str, records: list[Record]) -> Draw:
    sections = kinds.experiments_of(records, [KERNELS])
    (section,) = [section for section in sections if section.name == name]
    return section.pictures[0].draw


def roofline() -> Draw:
    rows = explanation.explain(timed(1.5), FAST)
    roof = kernel_rates.roof(FAST)
    return lambda figure: plot_roofline(rows, roof, "tiny Q4_0", figure.subplots())


def sample_picture(name: str) -> Picture:
    """The picture of this name that the sample of its page has."""
    contents = results.read([DOCS / f"{name}-amd-epyc.jsonl"])
    shown = kinds.sections([*contents.records, *contents.findings])
    pictures = [picture for section in shown for picture in section.all_pictures]
    return next(picture for picture in pictures if picture.name == name)


def sweep() -> list[Record]:
    return [make_record(make_run(100, 3, every=20))]


PICTURES: dict[str, tuple[Callable[[], Draw], tuple[float, float]]] = {
    "prefill": (lambda: drawing("prefill", session()), SMALL),
    "shares": (lambda: drawing("shares", session()), SMALL),
    "long name": (lambda: drawing("shares", long_name()), SMALL),
    "long name on a page": (lambda: drawing("shares", long_name()), (5, 3.9)),
    "one run": (lambda: drawing("prefill", [make_record()]), SMALL),
    "decode": (lambda: drawing("decode", repeats(1)), SMALL),
    "on a page": (lambda: drawing("decode", setups(2)), (5, 3.9)),
    "many setups": (lambda: drawing("prefill", setups(7)), SMALL),
    "many lines": (lambda: drawing("decode", setups(8)), SMALL),
    "ttft": (lambda: drawing("prefill", request_session()), SMALL),
    "sweep": (lambda: drawing("sweep", sweep()), WIDE),
    "start": (lambda: sample_picture("start").draw, (10, 4.6)),
    "choose": (lambda: sample_picture("choose").draw, SMALL),
    "trial": (lambda: drawing("trial", trial()), WIDE),
    "tune": (lambda: section_of(full_session()).pictures[0].draw, (10, 4.6)),
    "roofline": (roofline, SMALL),
    "batch": (lambda: drawing_of_experiment("batch", batches()), WIDE),
    "stall": (lambda: drawing_of_experiment("stall", stalls()), WIDE),
}


@pytest.fixture(params=PICTURES, scope="module")
def figure(request: pytest.FixtureRequest) -> Figure:
    make_drawing, size = PICTURES[request.param]
    figure = canvas.drawn(make_drawing(), size)
    figure.draw_without_rendering()
    return figure


def legends(figure: Figure) -> list[Any]:
    of_axes = [ax.get_legend() for ax in figure.axes]
    return [*figure.legends, *filter(None, of_axes)]


def legend_labels(figure: Figure) -> list[str]:
    labels: list[str] = []
    for legend in legends(figure):
        labels += [text.get_text() for text in legend.get_texts()]
    return labels


def title_of(figure: Figure) -> str:
    return figure.get_suptitle() or figure.axes[0].get_title()


def axes_titles(figure: Figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes]


def names_of_threads(numbers: range) -> list[str]:
    return [f"tiny Q4_0, n_threads {number}" for number in numbers]


def test_no_picture_cuts_off_or_covers_anything(figure: Figure) -> None:
    frame = figure.bbox.padded(1)
    artists: list[Any] = [*figure.axes, *figure.legends, *figure.texts]
    for artist in artists:
        box = artist.get_tightbbox()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1
    for legend in legends(figure):
        for ax in figure.axes:
            box = legend.get_window_extent()
            assert not box.overlaps(ax.get_window_extent())
            assert not box.overlaps(ax.xaxis.label.get_window_extent())


def test_every_picture_has_a_title_units_and_words_that_a_stranger_knows(
    figure: Figure,
) -> None:
    title = title_of(figure)
    assert "tiny" in title or "smollm2-135m" in title
    texts: list[Any] = figure.findobj(Text)
    shown = " ".join(text.get_text() for text in texts)
    assert "arm" not in shown.split()
    explained = shown.replace("95 % of the", "").replace("95 % interval", "")
    assert "95 %" not in explained


FINDINGS = {
    "prefill": "Prefill: 10.0 ms for 10 prompt tokens, 2.00 s for 1,000",
    "decode": "Decode: 11.0 ms per token after 20 prompt tokens, 21.0 ms per token after 40",
    "shares": "Prefill's share: 18 % with 10 prompt tokens, 96 % with 1,000",
    "batch": "8 sequences together: 1.00x the tokens/s of one in total, 0.125x per user",
    "stall": "A prompt of 100 tokens stops 2 streams for up to 134 ms all at once, 15.0 ms in "
    "chunks of 10",
    "sweep": "5x the prompt takes 5x the time to prefill, and a token after it 1x the time",
    "trial": "B is slower than A in 1 of 2 rows (1.75 times the time); no clear difference in 1 "
    "of 2 rows",
    "tune": "--flash-attn off is 1.81 times as fast as the default (1.81-1.81)",
}
"""The first lines of titles."""


@pytest.mark.parametrize("name", FINDINGS)
def test_a_title_begins_with_what_was_found_and_names_model_and_machine(name: str) -> None:
    make_drawing, size = PICTURES[name]
    if name == "batch":
        quiet = [make_record(batch_run(n_seq)) for n_seq in (1, 2, 8)]
        figure = canvas.drawn(drawing_of_experiment("batch", quiet), size)
    else:
        figure = canvas.drawn(make_drawing(), size)
    finding, subject = title_of(figure).split("\n")
    assert finding == FINDINGS[name]
    assert subject.startswith("tiny Q4_0")
    assert "Test CPU, 4 cores" in subject


def test_of_doubtful_runs_a_title_has_no_finding() -> None:
    figure = canvas.drawn(PICTURES["batch"][0](), WIDE)
    assert figure.get_suptitle().startswith("Sequences decoded together\n")
    disturbed = [doubt.neighbour(record) for record in repeats(1)]
    beginnings = {
        "prefill": "Prefill: time until ",
        "decode": "Decode: time per ",
        "shares": "Where the time ",
    }
    for name, beginning in beginnings.items():
        assert title_of(canvas.drawn(drawing(name, disturbed), SMALL)).startswith(beginning)


def test_a_title_of_several_setups_says_what_is_drawn() -> None:
    figure = canvas.drawn(drawing("prefill", setups(2)), SMALL)
    assert title_of(figure).startswith("Prefill: time until the prompt is processed\n")


def test_each_of_several_setups_has_its_model_and_machine_in_the_title() -> None:
    one_thread = dataclasses.replace(SETTINGS, n_threads=1)
    records = [make_record(batch_run(n_seq)) for n_seq in (1, 8)]
    records += [make_record(batch_run(n_seq), settings=one_thread) for n_seq in (1, 8)]
    pictures: list[Picture] = []
    for section in kinds.experiments_of(records, [KERNELS]):
        if section.name == "batch":
            pictures += section.pictures
    assert len(pictures) == 2
    for picture in pictures:
        _, subject = canvas.drawn(picture.draw, WIDE).get_suptitle().split("\n")
        assert subject.startswith("tiny Q4_0, n_threads ")
        assert subject.endswith(", Test CPU, 4 cores")


def test_a_quantization_is_no_model_and_a_path_has_no_folders_in_a_title() -> None:
    records = []
    for quantization in ("F16", "Q8_0"):
        model = dataclasses.replace(MODEL, quantization=quantization)
        records.append(make_record(model=model))
    assert text_setup.where(records) == "tiny in F16 and Q8_0 on Test CPU, 4 cores"
    other = dataclasses.replace(MODEL, name="other")
    assert text_setup.where([*records, make_record(model=other)]).startswith("2 models on ")
    assert text_setup.where(long_name()[-1:]) == "tiny.gguf Q4_0 on Test CPU, 4 cores"
    label = "B: -m '/models/a long folder/tiny.gguf' --threads 2"
    assert shell.without_folders(label) == "B: -m tiny.gguf --threads 2"
    assert shell.without_folders("A: --threads 2") == "A: --threads 2"


def test_numbers_of_axes_have_separators_and_stand_at_the_measured_lengths() -> None:
    records = []
    for n_prompt in (10, 1000, 10000):
        records += [
            make_record(make_run(n_prompt, 5, repeat, prefill_ms=2)) for repeat in (0, 1)
        ]

    ax = lab.plot_prefill(records)
    canvas.figure_of(ax).draw_without_rendering()
    slow = lab.plot_decode([make_record(make_run(10, 5, decode_ms=4000))])
    canvas.figure_of(slow).draw_without_rendering()

    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["10,000", "1,000", "10"]
    assert list(ax.xaxis.get_minorticklocs()) == []
    assert "2,000" in [tick.get_text() for tick in slow.get_yticklabels()]


@pytest.mark.parametrize("size", [SMALL, (5, 3.9)])
def test_labels_of_shares_have_room_in_their_bars(size: tuple[float, float]) -> None:
    figure = canvas.drawn(drawing("shares", session()), size)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    bars: Any = [bar for container in ax.containers for bar in container]
    labels = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert labels
    for label in labels:
        frames = [bar.get_window_extent() for bar in bars]
        assert any(
            frame.x0 <= label.x0 and label.x1 <= frame.x1
            for frame in frames
            if frame.overlaps(label)
        )


def test_six_series_share_their_axes() -> None:
    figure = canvas.drawn(drawing("prefill", setups(6)), SMALL)
    assert len(figure.axes) == 1


def test_more_than_six_series_get_small_multiples_with_shared_axes() -> None:
    figure = canvas.drawn(drawing("prefill", setups(7)), SMALL)
    assert axes_titles(figure) == names_of_threads(range(1, 8))
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    assert len({ax.get_ylim() for ax in figure.axes}) == 1


def test_a_colour_means_one_thing_in_all_panels() -> None:
    figure = canvas.drawn(drawing("decode", setups(3)), SMALL)

    assert axes_titles(figure) == names_of_threads(range(1, 4))
    colours_of_panels = set()
    for ax in figure.axes:
        lines = [line for line in ax.lines if len(np.asarray(line.get_xdata())) > 1]
        colours_of_panels.add(tuple(dict.fromkeys(str(line.get_color()) for line in lines)))
    (colours,) = colours_of_panels
    assert len(colours) == 3
    assert legend_labels(figure) == [
        "after 10 prompt tokens",
        "after 100 prompt tokens",
        "after 1,000 prompt tokens",
    ]


def test_points_beyond_a_logarithmic_axis_are_marked_and_counted() -> None:
    """Of two setups, one 100 times slower, the fast one has a token of a microsecond."""
    fast = [make_record(make_run(10, 100, repeat)) for repeat in range(2)]
    steps = fast[0].run.steps
    end_ns = [*steps.end_ns]
    end_ns[50] = end_ns[49] + 1000
    ready_ns = [*steps.ready_ns]
    ready_ns[50] = end_ns[50]
    steps = dataclasses.replace(steps, end_ns=tuple(end_ns), ready_ns=tuple(ready_ns))
    fast[0] = dataclasses.replace(fast[0], run=dataclasses.replace(fast[0].run, steps=steps))
    slow_settings = dataclasses.replace(SETTINGS, n_threads=1)
    slow = make_record(make_run(10, 100, decode_ms=400), settings=slow_settings)

    (ax,) = canvas.drawn(drawing("decode", [*fast, slow]), SMALL).axes

    bottom, _ = ax.get_ylim()
    marks: list[Any] = [line for line in ax.lines if line.get_marker() == "v"]
    assert ax.get_yscale() == "log"
    assert [list(mark.get_ydata()) for mark in marks] == [[bottom]]
    labels = " ".join(ax.get_legend_handles_labels()[1])
    assert labels.count("1 point below the axis") == 1


def test_many_series_have_different_colours() -> None:
    assert len({style["color"] for style in canvas.styles(12)}) == 12


def test_many_setups_in_axes_of_the_reader_have_shades_of_their_colours() -> None:
    left, _ = Figure().subplots(1, 2)
    ax = lab.plot_decode(setups(8), left)
    colours = {
        line.get_color() for line in ax.lines if str(line.get_label()).endswith("n_threads 8")
    }
    assert len(colours) == 3


def test_a_trial_is_drawn_as_ratios_with_every_block() -> None:
    records = trial(n_disturbed=1)
    (row, _) = comparison.compare(records)[0].rows

    (ax,) = canvas.drawn(drawing("trial", records), WIDE).axes

    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["prefill, 1,000 tokens", "TPOT, 1,000 tokens"]
    assert "\u2190 B is faster" in ax.get_xlabel()
    assert "A is faster \u2192" in ax.get_xlabel()
    assert ax.get_title() == "B: --threads 1\nagainst A: --threads 2"
    lines: list[Any] = list(ax.lines)
    filled = [line for line in lines if line.get_markerfacecolor() != "none"]
    blocks = [line for line in filled if line.get_marker() == "o"]
    assert sorted(blocks[0].get_xdata()) == pytest.approx([1.5] * 4 + [2.0] * 3)
    assert HOLLOW in [line.get_label() for line in lines]
    assert [1, 1] in [list(line.get_xdata()) for line in lines]
    assert row.ratio is not None
    interval = f"{row.estimate:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"
    assert interval in [text.get_text() for text in ax.texts]


def test_a_roofline_names_its_finding_and_keeps_ceilings_beside_the_points() -> None:
    rows = explanation.explain(timed(1.5), FAST)
    roof = kernel_rates.roof(FAST)
    (ax,) = canvas.drawn(roofline(), SMALL).axes

    best = (rows.gflops / (rows.intensity * roof.gbps).clip(upper=roof.gflops)).groupby(
        rows.phase
    )
    shares = [percent(best.max()[phase]) for phase in ("prefill", "decode")]
    assert f"at most {shares[0]} in prefill and {shares[1]} in decode" in ax.get_title()
    lines: list[Any] = list(ax.lines)
    dashes = [line for line in lines if not isinstance(line.get_marker(), str)]
    for dash in dashes:
        right_end = max(x for x, _ in dash.get_marker()) * dash.get_markersize() / 2
        assert right_end < -explain_picture.POINT / 2  # left of the point, in points of type
    assert sum(len(dash.get_xdata()) for dash in dashes) == len(rows)


@pytest.mark.parametrize(
    ("high", "size", "expected"),
    [(500, SMALL, ["2", "5"]), (4e3, (5, 5), ["3"]), (1e9, (5, 5), [])],
)
def test_ticks_between_powers_of_ten_have_labels_where_there_is_room(
    high: float, size: tuple[float, float], expected: list[str]
) -> None:
    figure = Figure(figsize=size, layout="constrained")
    ax = figure.subplots()
    ax.set(xscale="log", xlim=(1, high), yscale="log", ylim=(1e-6, 1))
    canvas.finish([ax], "")
    figure.draw_without_rendering()

    labels = [tick.get_text() for tick in ax.get_xticklabels(minor=True)]
    assert not any("e" in tick.get_text() for tick in ax.get_yticklabels())
    assert [
        label for label in labels if label and 1 <= float(label.replace(",", "")) < 10
    ] == expected


def test_claims_have_their_verdicts_in_the_title_and_their_triangles_in_the_legend() -> None:
    picture = sample_picture("claims")
    figure = canvas.drawn(picture.draw, picture.file_size)

    verdicts, subject = figure.get_suptitle().split("\n")
    assert verdicts.startswith("16 claims: ")
    assert "AMD EPYC" in subject
    assert "the claim: above the threshold" in legend_labels(figure)


def test_no_label_of_a_quantization_covers_an_interval() -> None:
    contents = results.read(sorted(SAMPLES.glob("sample-quant-*.jsonl")))
    (picture,) = kinds.sections(contents.all_lines)[0].all_pictures
    figure = canvas.drawn(picture.draw, picture.file_size)
    figure.draw_without_rendering()

    for ax in figure.axes:
        lines: list[Any] = [line for line in ax.lines if len(line.get_ydata()) == 2]  # type: ignore[arg-type]
        bars = [line for line in lines if len(set(line.get_ydata())) == 1]
        assert bars
        for text in ax.texts:
            box = Text.get_window_extent(text)
            for bar in bars:
                assert not box.overlaps(bar.get_window_extent())


def test_runs_have_the_pictures_that_their_data_allow() -> None:
    assert list(plot_runs.drawings(trial())) == ["trial", "decode"]
    assert list(plot_runs.drawings(session())) == ["shares", "prefill", "decode"]
    assert list(plot_runs.drawings(sweep())) == ["sweep"]
    assert plot_trial.trials(trial()[:2]) == []  # of one variant


@pytest.mark.parametrize(
    ("name", "records"),
    [("batch", batches()), ("stall", stalls())],
)
def test_experiments_draw_disturbed_runs_hollow(name: str, records: list[Record]) -> None:
    figure = canvas.drawn(drawing_of_experiment(name, records), WIDE)

    n_hollow = 0
    for ax in figure.axes:
        for line in ax.lines:
            if line.get_markerfacecolor() == "none":
                n_hollow += len(np.asarray(line.get_xdata()))
    assert n_hollow > 0
    assert legend_labels(figure).count(HOLLOW) == 1


def test_a_model_with_dollars_in_its_name_is_no_formula() -> None:
    odd = dataclasses.replace(MODEL, name="a$b$")
    figure = canvas.drawn(drawing("prefill", session(model=odd)), SMALL)
    figure.draw_without_rendering()
    assert "a$b$" in figure.axes[0].get_title()


def test_pictures_of_equal_name_get_different_names() -> None:
    pictures = []
    for name in ("a", "batch", "batch-2", "batch", "batch-2"):
        pictures.append(Picture(name, "", lambda figure: None))
    names = [picture.name for picture in numbered(pictures)]
    assert names == ["a", "batch-1", "batch-2-1", "batch-3", "batch-2-2"]


@pytest.mark.parametrize(
    ("x", "y"),
    [([0, 1, 2], [1, 2, 3]), ([1, 2, 3], [1, 0, 3]), ([-1, 2], [1, 2])],
)
def test_a_logarithmic_axis_refuses_what_it_cannot_show(x: list[int], y: list[int]) -> None:
    with pytest.raises(LabError, match="A logarithmic axis cannot show"):
        canvas.plot_lines({"line": (x, y)}, "x", "y", "Title", log=True)


@pytest.mark.parametrize("x", [0.1, 0.5, 0.9])
def test_a_label_longer_than_the_room_beside_its_point_stays_in_the_axes(x: float) -> None:
    figure = Figure(figsize=(5, 3), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    label_points(ax, [(x, 0.5, "qwen3-30b-a3b, epyc-7763-cores=2: 3.0x")])
    figure.draw_without_rendering()
    label = ax.texts[0].get_window_extent()
    frame = ax.get_window_extent()
    assert frame.x0 <= label.x0
    assert label.x1 <= frame.x1 + 1
