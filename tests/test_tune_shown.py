"""What `lab tune` found, shown as text, JSON, pictures and pages: sessions with exact times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Record, Steps
from lab.features.tune import measuring, section
from lab.runner import as_options
from lab.show import canvas
from lab.show.section import WIDE
from tests.support.command import run_lab
from tests.support.records import SETTINGS, make_run
from tests.support.tables import headings, lines_of
from tests.support.tuning import (
    BOTH,
    DEFAULT,
    LOSSY,
    N_PROMPT,
    OFF,
    ONE,
    USUAL,
    confirming,
    first_line,
    full_session,
    result_of,
    run_of,
    searching,
    section_of,
)


def session(
    times_ms: dict[str, float] | None = None, confirmed: Sequence[Record] = ()
) -> list[Any]:
    return [first_line(), *searching(times_ms or USUAL), *confirmed]


def saved(tmp_path: Path, lines: Sequence[Any]) -> Path:
    path = tmp_path / "tune.jsonl"
    results.save(path, *lines)
    return path


def test_the_gain_is_that_of_the_confirmation_and_not_the_larger_one_of_the_search() -> None:
    lines = session(
        {DEFAULT: 9.0, OFF: 3.0},
        confirming(OFF, gain=1.25),
    )
    first, medians = section.sentences(result_of(lines))
    # default 21 + 300 x 10 ms, winner 21 + 300 x 8.2 ms, each a little slower in some blocks
    assert first.startswith("--flash-attn off is 1.22 times as fast (95 % interval 1.2")
    assert first.endswith(
        ", from 6 new blocks measured after the choice) for 20 + 301 tokens."
    )
    assert medians.startswith(
        "Medians of these blocks: first token after 21.2 ms instead of 21.2 ms, each further token"
    )
    rows: list[Any] = section_of(lines).document()["tunings"]
    (row,) = rows
    assert row["recommended"] == OFF
    assert row["gain_low"] < row["gain"] < row["gain_high"] < 1.25
    assert row["tried"][1]["speed"] > 2.2


def test_what_became_of_each_choice_stands_beside_it_the_default_and_the_winner_first() -> (
    None
):
    shown = section_of(full_session())
    names = [line[0] for line in lines_of(shown)]
    verdicts = [line[-1] for line in lines_of(shown)]
    assert names == [DEFAULT, OFF, f"{LOSSY}\nchanges the model's output", ONE, "--no-mmap"]
    assert verdicts == ["the base", "recommended", "faster in the search", "slower", "failed"]
    assert shown.caption == (
        "tiny Q4_0 on Test CPU, 4 cores: 20 + 301 tokens; goal: time of the whole request"
    )
    assert shown.warnings == ["Runs failed with --no-mmap (llama.cpp is out of memory)."]


def test_a_winner_that_the_search_did_not_measure_is_in_the_table_and_in_the_picture() -> None:
    lines = session({DEFAULT: 9.0, OFF: 4.5, "--no-repack": 8.0}, confirming(BOTH))
    shown = section_of(lines)
    assert [line[0] for line in lines_of(shown)[:3]] == [DEFAULT, BOTH, OFF]
    winner = lines_of(shown)[1]
    of_off = lines_of(shown)[2]
    assert winner[1] == "0"
    assert winner[-1] == "recommended"
    assert float(winner[3].split("\n")[0]) > float(of_off[3].split("\n")[0])
    (ax,) = canvas.drawn(shown.pictures[0].draw, WIDE).axes
    assert ax.get_yticklabels()[1].get_text().replace("\n", " ") == BOTH


def test_the_table_and_the_sentences_have_one_direction() -> None:
    """Both say how many times as fast as the default a choice is."""
    shown = section_of(full_session())
    default, winner, *_ = lines_of(shown)
    assert headings(shown)[3] == "times\nas fast"
    assert list(default[1:4]) == ["4", "3.03 s", "1.00"]
    estimate, interval = winner[3].split("\n")
    low, high = map(float, interval.split("-"))
    assert low < float(estimate) < high
    assert float(estimate) == pytest.approx(1.81, abs=0.03)
    assert "is 1.81 times as fast" in shown.answer


def test_the_bar_of_the_winner_is_its_confirmation_alone() -> None:
    lines = session(
        {DEFAULT: 9.0, OFF: 3.0, ONE: 12.0},
        confirming(OFF, gain=1.25),
    )
    figure = canvas.drawn(section_of(lines).pictures[0].draw, WIDE)
    (ax,) = figure.axes
    texts = [text.get_text() for text in ax.texts]
    assert texts[0] == "1.00"
    assert texts[1].startswith("1.22 (")
    places = {}
    for line in ax.lines:
        if line.get_marker() in ("s", "D"):
            places[line.get_marker()] = float(line.get_ydata()[0])  # type: ignore[index, arg-type]
    assert places == {"s": 1.0, "D": 2.0}


def test_runs_that_name_no_block_are_shown_as_a_session_without_a_result() -> None:
    line, *records = session()
    without_blocks = []
    for record in records:
        run = dataclasses.replace(record.run, block=None)
        without_blocks.append(dataclasses.replace(record, run=run))
    lines = [line, *without_blocks]
    assert section.sentences(result_of(lines)) == [
        "No other setting was measured, so nothing is recommended."
    ]
    assert {cells[-1] for cells in lines_of(section_of(lines))} == {"failed"}


FASTEST = "--flash-attn off was the fastest in the search"
NOTHING = "Keep the default: nothing that was tried is faster beyond noise."
UNCLEAR = (
    f"Keep the default: {FASTEST}, "
    "but 6 new blocks do not show a gain clearly above 1 %. There"
)


@pytest.mark.parametrize(
    ("lines", "phrase"),
    [
        (session({DEFAULT: 9.0, ONE: 9.0}), NOTHING),
        (session({DEFAULT: 9.0, ONE: 12.0}), NOTHING),
        (session(confirmed=confirming(OFF, gain=1.0)), UNCLEAR),
        (session(confirmed=confirming(OFF, gain=0.9)), UNCLEAR),
        (session(), f"No recommendation: {FASTEST}, but nothing confirmed it."),
        (
            session(confirmed=confirming(OFF, n_blocks=2)),
            f"No recommendation: {FASTEST}, but only 2 new blocks of at least 4",
        ),
        (session({DEFAULT: 9.0}), "No other setting was measured, so nothing is recommended."),
    ],
    ids=["equal", "slower", "not confirmed", "lost", "interrupted", "too few blocks", "alone"],
)
def test_without_a_confirmed_gain_nothing_is_recommended(
    lines: list[Any], phrase: str
) -> None:
    assert section_of(lines).answer.startswith(phrase)
    rows: list[Any] = section_of(lines).document()["tunings"]
    (row,) = rows
    assert row["recommended"] is None
    assert "recommended" not in {choice["verdict"] for choice in row["tried"]}


def test_recommended_settings_come_as_command_lines() -> None:
    lines = full_session()
    commands = section.command_lines(result_of(lines))
    assert list(commands) == ["llama-server", "lab"]
    assert commands["llama-server"].startswith(
        "llama-server --model ./tiny.gguf --ctx-size 512 --parallel 1 --threads 2"
    )
    assert "--flash-attn off" in commands["llama-server"]
    *_, part = section_of(lines).parts
    assert part.facts == commands
    assert part.title == "The recommended settings as commands"


def test_settings_without_a_gain_have_no_command_lines() -> None:
    lines = session(confirmed=confirming(OFF, gain=1.0))
    assert section.command_lines(result_of(lines)) == {}


def test_the_command_ends_with_what_was_found(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "execute", lambda *_: iter(full_session()))
    options = "tune", "-m", mini, "-p", 20, "-n", 5, "--out", tmp_path, "--no-plot"
    code, out, _ = run_lab(*options)
    assert code == 0
    assert "--flash-attn off is 1.81 times as fast" in out
    assert "llama-server" not in out
    options_of_winner = "--prompt-len 20 --gen 301 --model FOLDER/tiny.gguf --flash-attn off"
    assert f"\nWith these settings: lab measure {options_of_winner}\n" in out
    document = json.loads(run_lab(*options, "--json")[1])
    assert document["tunings"][0]["recommended"] == OFF


def test_ctrl_c_ends_the_command_with_the_best_so_far(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[Any]:
        yield from session()
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "execute", interrupted)
    code, _, err = run_lab(
        "tune", "-m", mini, "-p", 20, "-n", 5, "--out", tmp_path, "--no-plot"
    )
    assert code == 130
    assert "Interrupted. 12 finished runs are in " in err
    phrase = " ".join(err.split())
    assert f"No recommendation: {FASTEST}, but nothing confirmed it." in phrase


def test_show_and_plot_read_a_session(tmp_path: Path) -> None:
    path = saved(tmp_path, full_session())
    code, out, err = run_lab("show", path)
    assert code == 0
    assert err == ""
    assert "for 20 + 301 tokens" in " ".join(out.split())
    assert "--flash-attn off is 1.81 times as fast (95 % interval" in out
    assert "prefill" not in out  # no table of plain runs
    document = json.loads(run_lab("show", "--json", path)[1])
    assert document["rows"] == []
    assert [tuning["recommended"] for tuning in document["tunings"]] == [OFF]
    pictures = [str(tmp_path / f"tune-tune.{kind}") for kind in ("png", "svg")]
    assert run_lab("plot", path)[1].split() == pictures


def test_a_page_has_the_answer_the_picture_and_the_command(tmp_path: Path) -> None:
    path = saved(tmp_path, full_session())
    assert run_lab("report", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<h1>Which settings are the fastest for 20 + 301 tokens?</h1>" in page
    assert "--flash-attn off is 1.81 times as fast" in page
    assert "<h2>Runs</h2>" not in page
    assert page.count("<svg") == 1
    assert "lab tune --prompt-len 20 --gen 301 --allow-lossy" in page


def test_other_commands_leave_a_session_out_and_say_so_where_nothing_is_left(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path, session())
    for command in ("compare", "explain"):
        code, _, err = run_lab(command, path)
        assert code == 1
        assert "These results have tables of their own" in err


def test_a_session_without_a_default_says_so(tmp_path: Path) -> None:
    line, *records = session()
    without_default = [record for record in records if record.run.variant != DEFAULT]
    path = saved(tmp_path, [line, *without_default])
    assert "lab tune measured no run of the default" in run_lab("show", path)[1]
    code, _, err = run_lab("report", path)
    assert code == 1
    assert "no run went well" in err


def test_hostile_settings_stay_text(tmp_path: Path) -> None:
    evil = "--flash-attn <script>alert(1)</script> $x$ \x1b[31m"
    line, *records = session({DEFAULT: 9.0, evil: 4.5}, confirming(evil))
    one_thread = dataclasses.replace(SETTINGS, n_threads=1)
    lines = [line]
    for record in records:
        is_default = record.run.variant == DEFAULT
        settings = SETTINGS if is_default else one_thread
        lines.append(dataclasses.replace(record, settings=settings))
    path = saved(tmp_path, lines)
    out = run_lab("show", path)[1]
    assert "<script>alert(1)</script> $x$" in out
    assert "\x1b" not in out
    assert run_lab("plot", path)[0] == 0
    assert run_lab("report", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("changes", [{"goal": "odd"}, {"n_gen": 0}], ids=str)
def test_a_line_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs a goal"):
        dataclasses.replace(first_line(), **changes)


STEPS = run_of(DEFAULT, 0).run.steps
ZERO = (0,) * len(STEPS.kind)


@pytest.mark.parametrize(
    "changes",
    [
        {"part": "odd"},
        {"block": None},
        {"steps": Steps()},
        {
            "n_gen": 1,
            "steps": make_run(N_PROMPT, 1).steps,
        },
        {
            "steps": dataclasses.replace(
                STEPS,
                start_ns=ZERO,
                ready_ns=ZERO,
                end_ns=ZERO,
            )
        },
    ],
    ids=["part", "block", "no steps", "one token", "no time"],
)
def test_odd_records_of_a_session_break_nothing(changes: dict[str, Any]) -> None:
    line, *records = full_session()
    lines = [line]
    for i, record in enumerate(records):
        run = dataclasses.replace(record.run, **changes) if i % 2 else record.run
        lines.append(dataclasses.replace(record, run=run))
    shown = section_of(lines)
    assert lines_of(shown)[0][0] == DEFAULT
    canvas.drawn(shown.pictures[0].draw, WIDE)
    document = json.loads(json.dumps(shown.document(), allow_nan=False))
    assert document["tunings"][0]["tried"]


@pytest.mark.parametrize(
    ("lines", "status", "sentence"),
    [
        pytest.param(full_session, 0, "--settings quick uses them.", id="recommended"),
        pytest.param(session, 1, "Nothing is saved as quick", id="not recommended"),
    ],
)
def test_only_recommended_settings_are_saved_under_a_name(
    mini: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[Any]],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(as_options, "folder", lambda: tmp_path / "settings")
    monkeypatch.setattr(measuring, "execute", lambda *_: iter(lines()))
    options = "tune", "-m", mini, "--out", tmp_path, "--no-plot", "--save", "quick"
    code, _, err = run_lab(*options)
    assert code == status
    assert sentence in " ".join(err.split())
    if status == 0:
        assert as_options.settings("quick")["flash_attn"] == "off"
