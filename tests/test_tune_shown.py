"""What `lab tune` found, shown as text, JSON, pictures and pages: planted sessions with exact times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

import lab
from lab.analysis.tuning import Crossing, of_sessions
from lab.cli import tuning as tune_command
from lab.core import results
from lab.core.levers import Batch
from lab.core.record import FAILED, Record, Steps, Tuning
from lab.drawing import canvas
from lab.experiments import tuning
from lab.models import catalog
from lab.show import console, plot_trial, text_tune
from lab.show.section import Section
from tests.conftest import MACHINE, MODEL, SETTINGS, make_record, make_run, run_lab

DEFAULT, OFF, ONE = "default", "--flash-attn off", "--threads 1"
CHOICES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    OFF: {"flash_attn": "off", "flash_attn_resolved": "off"},
    ONE: {"n_threads": 1},
    "--no-repack": {"repack": False},
    "--cache-type-k q8_0": {"type_k": "q8_0"},
}
N_PROMPT, N_GEN = 20, 301


def a_run(
    variant: str, block: int, stage: str = "search", prefill_ms: float = 1.0, decode_ms: float = 9.0, **changes: Any
) -> Record:
    """A run of a choice: TTFT is 20 x prefill_ms + 1, TPOT decode_ms + 1; each block is a little slower or faster."""
    goal, own = changes.pop("goal", "request"), changes.pop("settings", CHOICES.get(variant, {}))
    of_block = 1 + 0.01 * (block % 3)
    run = make_run(
        N_PROMPT,
        5,
        changes.pop("repeat", 0),
        prefill_ms=prefill_ms * of_block,
        decode_ms=decode_ms * of_block,
        block=block,
        variant=variant,
        tuning=Tuning(goal, stage, N_GEN),
        **changes,
    )
    return make_record(run, session="20260101T000000Z-tune", settings=dataclasses.replace(SETTINGS, **own))


def session(
    searched: dict[str, float] | None = None,
    won: str | None = OFF,
    n_confirmed: int = 6,
    gain: float = 2.0,
    **more: Any,
) -> list[Record]:
    """A session: the decode time of each choice in four blocks of the search, then blocks of the winner."""
    times = {DEFAULT: 9.0, OFF: 4.5, ONE: 12.0} if searched is None else searched
    made = [
        a_run(variant, block, decode_ms=ms * (1 + 0.003 * ((block * 7 + i) % 5 - 2)), **more)
        for block in range(4)
        for i, (variant, ms) in enumerate(times.items())
    ]
    for block in range(n_confirmed if won else 0):
        for i, variant in enumerate((DEFAULT, won, won, DEFAULT)):
            ms = 9.0 / (1 if variant == DEFAULT else gain) * (1 + 0.002 * ((block + i) % 3 - 1))
            made.append(a_run(str(variant), 100 + block, "confirm", decode_ms=ms, repeat=i // 2, **more))
    return made


def sweep(variant: str, prefill_ms: float, decode_ms: float) -> Record:
    """Both phases after 10 and 20 tokens."""
    record = a_run(variant, 200, "lengths")
    run = make_run(20, 3, every=10, prefill_ms=prefill_ms, decode_ms=decode_ms, block=200, variant=variant)
    return dataclasses.replace(record, run=dataclasses.replace(run, tuning=record.run.tuning))


def failed(variant: str) -> Record:
    return a_run(variant, 0, status=FAILED, error="llama.cpp is out of memory", steps=Steps(), token_ids=())


LOSSY = "--cache-type-k q8_0"


def whole() -> list[Record]:
    """A session with everything in it: a winner, a loser, a lossy choice, a failure, lengths."""
    times = {DEFAULT: 9.0, OFF: 4.5, ONE: 12.0, LOSSY: 8.0}
    return [*session(times), sweep(DEFAULT, 1, 9), sweep(OFF, 3, 4.5), failed("--no-mmap")]


def saved(tmp_path: Path, records: Sequence[Record], name: str = "tune.jsonl") -> Path:
    for record in records:
        results.append(tmp_path / name, record)
    return tmp_path / name


def only(records: Sequence[Record]) -> Section:
    (section,) = text_tune.sections(records)
    return section


def test_the_gain_is_that_of_the_confirmation_and_not_the_larger_one_of_the_search() -> None:
    records = session({DEFAULT: 9.0, OFF: 3.0}, gain=1.25)
    first, medians = text_tune.sentences(*of_sessions(records))
    # default 21 + 300 x 10 ms, winner 21 + 300 x 8.2 ms, each a little slower in two of three blocks
    assert first.startswith("--flash-attn off is 1.22 times as fast for 20 + 301 tokens (95 % interval 1.2")
    assert first.endswith(", from 6 new blocks measured after the choice).")
    assert medians.startswith(
        "Medians of these blocks: first token after 21.2 ms instead of 21.2 ms, each further token"
    )
    (row,) = text_tune.as_rows(records)
    assert row["recommended"] == OFF and row["gain_low"] < row["gain"] < row["gain_high"] < 1.25
    assert row["tried"][0]["time_ratio"] < 0.45


def test_what_became_of_each_choice_stands_beside_it_the_default_and_the_winner_first() -> None:
    section = only(whole())
    names, verdicts = [line[0].text for line in section.lines], [line[-1].text for line in section.lines]
    assert names == [DEFAULT, OFF, f"{LOSSY}\nchanges the model's output", ONE, "--no-mmap"]
    assert verdicts == ["the base", "recommended", "faster in the search", "slower", "failed"]
    assert section.caption == (
        "tiny Q4_0 on Test CPU, 4 cores: 20 prompt tokens + 301 generated; goal: time of the whole request"
    )
    assert section.warnings == ["Runs failed with --no-mmap (llama.cpp is out of memory)."]
    default, winner = section.lines[0], section.lines[1]
    assert [cell.text for cell in default[1:4]] == ["4", "3.03 s", "1.00"]
    estimate, interval = winner[3].lines
    low, high = map(float, interval.split("-"))
    assert low < float(estimate) < high and float(estimate) == pytest.approx(0.553, abs=0.01)


def test_after_each_prompt_it_is_said_for_which_answers_the_winner_is_faster() -> None:
    part, _ = only(whole()).parts
    # after 10 tokens: default 11 + (n - 1) x 10 ms, winner 31 + (n - 1) x 5.5 ms
    assert [cell.text for cell in part.lines[0]] == ["10", "1.79", "6 or more tokens"]
    (found,) = of_sessions(session())
    for at, words in (
        (Crossing(20, 1.5, 260, None, True), "below 260"),
        (Crossing(20, 1.5, None, 900, True), "above 900"),
    ):
        sentence, _ = text_tune.sentences(dataclasses.replace(found, crossings=(at,)))
        assert sentence.endswith(f"; it loses {words} generated tokens.")
    assert only(session(gain=1.0)).parts == []  # nothing is recommended


FASTEST = "--flash-attn off was the fastest in the search"
NOTHING = "Nothing that was tried is faster than the default beyond noise: keep the default."


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (session({DEFAULT: 9.0, ONE: 9.0}, won=None), NOTHING),
        (session({DEFAULT: 9.0, ONE: 12.0}, won=None), NOTHING),
        (
            session(gain=1.0),
            f"Keep the default: {FASTEST}, but 6 new blocks do not show a gain clearly above 1 %. There",
        ),
        (
            session(gain=0.9),
            f"Keep the default: {FASTEST}, but 6 new blocks do not show a gain clearly above 1 %. There",
        ),
        (session(won=None), f"No recommendation: {FASTEST} (1.81 times as fast"),
        (session(n_confirmed=2), f"No recommendation: {FASTEST} (1.81 times as fast"),
        (session({DEFAULT: 9.0}, won=None), "No other setting was measured, so nothing is recommended."),
    ],
    ids=["equal", "slower", "not confirmed", "lost", "interrupted", "too few blocks", "alone"],
)
def test_without_a_confirmed_gain_nothing_is_recommended(records: list[Record], words: str) -> None:
    (sentence,) = only(records).sentences
    assert sentence.startswith(words)
    (row,) = text_tune.as_rows(records)
    assert row["recommended"] is None and "recommended" not in [one["verdict"] for one in row["tried"]]


def test_a_gain_of_the_search_alone_is_called_too_optimistic() -> None:
    (nothing,), (two,) = only(session(won=None)).sentences, only(session(n_confirmed=2)).sentences
    assert "but nothing confirmed it. The gain of a search is too optimistic" in nothing
    assert "but only 2 new blocks of at least 4 confirmed it. The gain of a search is too optimistic" in two


def test_a_lossy_winner_is_called_lossy_in_every_line() -> None:
    records = session({DEFAULT: 9.0, LOSSY: 4.5}, won=LOSSY)
    section = only(records)
    assert section.sentences[0].startswith(f"{LOSSY} (changes the model's output) is 1.81 times as fast")
    assert section.lines[1][0].text == f"{LOSSY}\nchanges the model's output"
    assert text_tune.as_rows(records)[0]["changes_output"] is True
    drawn = canvas.drawn(section.pictures[0].draw, (10, 4.6))
    assert [tick.get_text() for tick in drawn.axes[0].get_yticklabels()][1] == section.lines[1][0].text


@pytest.mark.parametrize(
    ("goal", "words"),
    [("ttft", "the first token after 20 prompt tokens"), ("tpot", "each further token after 20 prompt tokens")],
)
def test_a_goal_names_the_tokens_that_it_is_about(goal: str, words: str) -> None:
    records = session(goal=goal, prefill_ms=9.0, n_confirmed=0, won=None)
    assert only(records).question == f"Which settings are the fastest for {words}?" and not only(records).parts


def test_recommended_settings_come_as_command_lines_and_only_they() -> None:
    (found,) = of_sessions(session())
    lines = text_tune.command_lines(found)
    assert list(lines) == ["llama-server", "llama-cli", "llama-bench", "llama-cpp-python", "Ollama", "lab"]
    assert lines["llama-server"].startswith("llama-server --model ./tiny.gguf --ctx-size 512 --parallel 1 --threads 2")
    assert "--flash-attn off" in lines["llama-server"] and "flash_attn=False" in lines["llama-cpp-python"]
    assert "\nFROM ./tiny.gguf\n" in lines["Ollama"]
    *_, part = only(session()).parts
    assert part.facts == lines and part.title == "The recommended settings in other programs"
    (unproven,) = of_sessions(session(gain=1.0))
    assert text_tune.command_lines(unproven) == {}


def test_what_a_program_lacks_stands_in_a_comment() -> None:
    records = session({DEFAULT: 9.0, "--no-repack": 4.5}, won="--no-repack")
    assert (
        only(records)
        .parts[-1]
        .facts["llama-cpp-python"]
        .endswith("\n# without --no-repack: llama-cpp-python has no such option")
    )


def test_the_models_file_is_found_on_this_machine_but_not_named_on_a_page(tmp_path: Path, embedded: Path) -> None:
    model = dataclasses.replace(MODEL, name=catalog.DEFAULT, source=catalog.EMBEDDED, file=embedded.name)
    path = saved(tmp_path, [dataclasses.replace(record, model=model) for record in session()])
    assert f"llama-server --model {embedded} " in run_lab("show", path)[1]
    assert run_lab("report", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert f"llama-server --model ./{embedded.name} " in page and str(embedded.parent) not in page


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_fits_and_shows_twelve_rows_without_details(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"--threads {n} --flash-attn off --no-repack" for n in range(3, 20)]
    for n, name in enumerate(names, 3):
        monkeypatch.setitem(CHOICES, name, {"n_threads": n, "flash_attn": "off", "repack": False})
    path = saved(tmp_path, session({DEFAULT: 9.0, OFF: 4.5} | dict.fromkeys(names, 12.0)))
    code, out, _ = run_lab("show", path)
    table = out[: out.index("--flash-attn off is")]
    assert code == 0 and "7 more rows: add --details" in table and table.count("slower") == 10
    assert all(len(line) <= width for line in table.splitlines()[2:]) and "Columns left out" not in table
    _, everything, _ = run_lab("show", "--details", path)
    assert "more rows" not in everything and everything.count("slower") == 17


def test_the_command_ends_with_what_was_found_and_ctrl_c_with_the_best_so_far(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object) -> Iterator[Record]:
        yield from session(won=None)
        raise KeyboardInterrupt

    options = ("tune", "-m", mini, "-p", 20, "-n", 5, "--out", tmp_path, "--no-plot")
    monkeypatch.setattr(tuning, "execute", lambda *_: iter(whole()))
    code, out, _ = run_lab(*options)
    assert code == 0 and "--flash-attn off is 1.81 times as fast" in out and "llama-server --model" in out
    assert json.loads(run_lab(*options, "--json")[1])["tunings"][0]["recommended"] == OFF
    monkeypatch.setattr(tuning, "execute", searched)
    code, _, err = run_lab(*options)
    assert code == 130 and "Interrupted. 12 finished runs are in " in err
    assert "No recommendation: --flash-attn off was the fastest in the search (1.81 times as fast" in err


def test_show_plot_and_report_read_a_session(tmp_path: Path) -> None:
    path = saved(tmp_path, whole())
    code, out, err = run_lab("show", path)
    assert (code, err) == (0, "") and "--flash-attn off is 1.81 times as fast for 20 + 301 tokens" in out
    assert "prefill" not in out  # no table of plain runs
    document = json.loads(run_lab("show", "--json", path)[1])
    assert document["rows"] == [] and [one["recommended"] for one in document["tunings"]] == [OFF]
    assert document["tunings"][0]["crossings"][0]["from_gen"] == 6
    assert run_lab("plot", path)[1].split() == [str(tmp_path / f"tune-tune.{kind}") for kind in ("png", "svg")]
    assert run_lab("report", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<h1>Which settings are the fastest for 20 + 301 tokens?</h1>" in page
    assert "--flash-attn off is 1.81 times as fast" in page and "<h2>Runs</h2>" not in page and page.count("<svg") == 1
    assert "lab tune --prompt-len 20 --gen 301 --allow-lossy --model" in page


def test_beside_plain_runs_a_session_stays_apart(tmp_path: Path) -> None:
    plain = make_record(make_run(), session="plain")
    saved(tmp_path, [plain, *whole()])
    document = json.loads(run_lab("show", "--json", tmp_path)[1])
    assert len(document["rows"]) == 1 == document["rows"][0]["repeats"] and len(document["tunings"]) == 1
    assert len(plot_trial.sessions([plain, *whole()])) == 0
    code, _, err = run_lab("report", tmp_path)
    assert (code, err) == (0, "") and "The fastest settings" in (tmp_path / "report.html").read_text()


def test_other_commands_leave_a_session_out_and_say_so_where_nothing_is_left(tmp_path: Path) -> None:
    path = saved(tmp_path, session())
    for command in ("compare", "explain"):
        code, _, err = run_lab(command, path)
        assert code == 1 and "These results are only of lab tune." in err
    for i, ms in enumerate((1.0, 2.0)):
        for repeat in range(3):
            record = make_record(make_run(20, 5, repeat, prefill_ms=ms), session=f"plain-{i}")
            saved(tmp_path, [dataclasses.replace(record, settings=_with(n_threads=1 + i).settings)])
    code, out, _ = run_lab("compare", "--no-plot", tmp_path)
    assert code == 0 and "n_threads" in out and OFF not in out and out.count("against the base") == 1


FASTER = "lab tune found faster settings for 20 + 301 tokens on this machine: --flash-attn off, 1.81 times as fast."


def test_plain_runs_name_the_settings_that_are_known_to_be_faster(tmp_path: Path) -> None:
    saved(tmp_path, session())
    path = saved(tmp_path, [make_record(make_run(), session="plain")], "plain.jsonl")
    assert FASTER in run_lab("show", path)[1]
    assert json.loads(run_lab("show", "--json", path)[1])["faster_settings"] == [FASTER]
    run_lab("report", path)
    assert FASTER in (tmp_path / "plain.html").read_text()


def _with(**changes: Any) -> Record:
    return make_record(make_run(), session="plain", settings=dataclasses.replace(SETTINGS, **changes))


@pytest.mark.parametrize(
    ("plain", "others"),
    [
        ([_with(flash_attn="off")], session()),
        ([_with(), _with(flash_attn="off", n_threads=1)], session()),
        ([_with()], session(gain=1.0)),
        ([_with()], session(goal="ttft")),
        ([_with(lib="another")], session()),
        ([make_record(make_run(), model=dataclasses.replace(MODEL, name="other"))], session()),
        ([make_record(make_run(), machine=dataclasses.replace(MACHINE, cpu="Other CPU"))], session()),
        ([make_record(make_run(batch=Batch(2, False)))], session()),
        ([], session()),
    ],
    ids=["in use", "in use by one", "no gain", "another goal", "build", "model", "machine", "experiment", "no runs"],
)
def test_faster_settings_are_named_only_where_they_are_known_to_be_faster(
    plain: list[Record], others: list[Record]
) -> None:
    assert text_tune.faster_settings(plain, others) == []
    assert text_tune.faster_settings([_with()], session()) == [FASTER]


def test_the_newest_session_of_a_workload_counts() -> None:
    newer = [dataclasses.replace(record, session="20260202T000000Z-tune") for record in session(gain=1.0)]
    assert text_tune.faster_settings([_with()], [*newer, *session()]) == []


def test_a_session_without_a_default_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path, [record for record in session() if record.run.variant != DEFAULT])
    assert "lab tune measured no run of the default" in run_lab("show", path)[1]
    code, _, err = run_lab("report", path)
    assert code == 1 and "no run went well" in err and "Traceback" not in err


def test_hostile_settings_stay_text(tmp_path: Path) -> None:
    evil = "--flash-attn <script>alert(1)</script> $x$ \x1b[31m"
    records = session({DEFAULT: 9.0, evil: 4.5}, won=evil, settings={})
    odd = [
        r if r.run.variant == DEFAULT else dataclasses.replace(r, settings=_with(n_threads=1).settings) for r in records
    ]
    path = saved(tmp_path, odd)
    _, out, _ = run_lab("show", path)
    assert "<script>alert(1)</script> $x$" in out and "\x1b" not in out
    assert run_lab("report", path)[0] == run_lab("plot", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<script>alert" not in page and "\x1b" not in page and "&lt;script&gt;alert(1)" in page


def test_the_picture_has_every_run_beside_the_interval_of_its_choice() -> None:
    section = only(whole())
    (ax,) = canvas.drawn(section.pictures[0].draw, (10, 4.6)).axes
    runs = [line for line in ax.lines if line.get_marker() == "o"]
    drawn = sorted(round(float(y)) for line in runs for y in np.asarray(line.get_ydata()))
    assert drawn.count(1) == 4 + 12 and drawn.count(2) == 4 and drawn.count(3) == 4
    shown = " ".join(text.get_text() for text in ax.texts)
    assert shown.startswith("1.00 0.553 (") and ax.get_xscale() == "log"
    assert "faster | slower" in ax.get_xlabel()


def test_odd_records_of_a_session_are_left_out_and_break_nothing(tmp_path: Path) -> None:
    good = whole()
    steps = good[0].run.steps
    zero = tuple(0 for _ in steps.kind)
    odd: list[dict[str, Any]] = [
        {"tuning": Tuning("odd", "odd", -5)},
        {"block": None},
        {"steps": Steps()},
        {"n_gen": 1, "steps": make_run(N_PROMPT, 1).steps},
        {"steps": dataclasses.replace(steps, start_ns=zero, ready_ns=zero, end_ns=zero)},
    ]
    for number, changes in enumerate(odd):
        records = [
            dataclasses.replace(each, run=dataclasses.replace(each.run, **changes)) if i % 2 else each
            for i, each in enumerate(good)
        ]
        section = only(records)
        assert section.lines[0][0].text == DEFAULT
        canvas.drawn(section.pictures[0].draw, (10, 4.6))
        assert json.loads(json.dumps(text_tune.as_rows(records), allow_nan=False))[0]["tried"], number


def test_python_shows_the_table_and_the_picture_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = of_sessions(whole())
    lab.show_tuned(found)
    shown = capsys.readouterr().out
    text_tune.print_tuned(whole(), console.console())
    assert shown.strip() == capsys.readouterr().out.strip() and "--flash-attn off" in shown
    figure = lab.plot_tuned(found)
    (drawn,) = [axes.get_title() for axes in figure.axes]
    (of_command,) = canvas.drawn(only(whole()).pictures[0].draw, (10, 4.6)).axes
    assert drawn == of_command.get_title() and len(figure.axes[0].lines) == len(of_command.lines)
    plt.close(figure)


@pytest.mark.parametrize(
    ("n_noisy", "words"), [(0, []), (1, ["! 1 of 36 runs"]), (12, ["! 12 of 36 runs", "half of the runs that confirm"])]
)
def test_disturbed_runs_are_counted(n_noisy: int, words: list[str]) -> None:
    (found,) = of_sessions(session())
    quiet, loud = found.measured[: -n_noisy or None], found.measured[len(found.measured) - n_noisy :]
    noisy = [dataclasses.replace(run, timing=dataclasses.replace(run.timing, is_disturbed=True)) for run in loud]  # type: ignore[type-var]
    section = text_tune.section(dataclasses.replace(found, measured=(*quiet, *noisy)))
    said = " ".join([section.title, *section.warnings])
    assert all(word in said for word in words) and ("disturbed" in said) == bool(words)
    assert len(section.warnings) == (n_noisy == 12)


def test_ctrl_c_in_a_warm_up_leaves_nothing_to_name(tmp_path: Path) -> None:
    warm_up = a_run(DEFAULT, 0, warmup=True)
    assert tune_command._so_far([warm_up], tmp_path) == ""
    said = tune_command._so_far([warm_up, *session(n_confirmed=0)], tmp_path)
    assert said.startswith(f"12 finished runs are in {tmp_path}. No recommendation: ")


def test_an_odd_name_is_known_before_the_search(tmp_path: Path) -> None:
    status, _, err = run_lab("tune", "--save", "../x", "--budget", "10s", "-o", tmp_path)
    assert status == 1 and "'../x' cannot name settings" in err and not list(tmp_path.iterdir())


def test_a_plan_names_what_is_tried_as_options(tmp_path: Path, embedded: Path) -> None:
    status, out, _ = run_lab("tune", "-p", "300", "-n", "8", "--flash-attn", "on", "--dry-run", "-o", tmp_path)
    lines = out.splitlines()
    assert status == 0 and "  --no-mmap" in lines and "--flash-attn" not in out and not list(tmp_path.iterdir())
    assert any(line.split()[0] == "--ubatch" and line.endswith("256, 128, 64") for line in lines)


def test_recommended_settings_are_keywords_that_leave_the_threads_of_prefill_alone() -> None:
    (found,) = of_sessions(session({DEFAULT: 9.0, ONE: 4.5}, won=ONE))
    assert found.settings == {"threads": 1, "threads_batch": SETTINGS.n_threads_batch}
    (without,) = of_sessions(session({DEFAULT: 9.0, ONE: 4.5}, won=ONE, gain=1.0))
    assert without.choice and without.settings == {}
