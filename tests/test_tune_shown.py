"""What `lab tune` found, shown as text, JSON, pictures and pages: planted sessions with exact times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.payloads import Tuning
from lab.core.record import FAILED, Record, Steps
from lab.features.tune import result, tuning
from lab.features.tune.result import of_sessions
from lab.show import canvas
from lab.show.section import Context, Section
from tests.conftest import SETTINGS, make_record, make_run, run_lab

DEFAULT = "default"
OFF = "--flash-attn off"
ONE = "--threads 1"
CHOICES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    OFF: {"flash_attn": "off", "flash_attn_resolved": "off"},
    ONE: {"n_threads": 1},
    "--no-repack": {"repack": False},
    "--cache-type-k q8_0": {"type_k": "q8_0"},
}
N_PROMPT = 20
N_GEN = 301


def a_run(
    variant: str,
    block: int,
    stage: str = "search",
    prefill_ms: float = 1.0,
    decode_ms: float = 9.0,
    **changes: Any,
) -> Record:
    """A run of a choice: TTFT is 20 x prefill_ms + 1, TPOT decode_ms + 1; each block is a little slower or faster."""
    goal = changes.pop("goal", "request")
    own = changes.pop("settings", CHOICES.get(variant, {}))
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
    return make_record(
        run, session="20260101T000000Z-tune", settings=dataclasses.replace(SETTINGS, **own)
    )


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
            made.append(
                a_run(str(variant), 100 + block, "confirm", decode_ms=ms, repeat=i // 2, **more)
            )
    return made


def failed(variant: str) -> Record:
    return a_run(
        variant, 0, status=FAILED, error="llama.cpp is out of memory", steps=Steps(), token_ids=()
    )


LOSSY = "--cache-type-k q8_0"


def whole() -> list[Record]:
    """A session with everything in it: a winner, a loser, a lossy choice, a failure."""
    times = {DEFAULT: 9.0, OFF: 4.5, ONE: 12.0, LOSSY: 8.0}
    return [*session(times), failed("--no-mmap")]


def saved(tmp_path: Path, records: Sequence[Record], name: str = "tune.jsonl") -> Path:
    for record in records:
        results.save(tmp_path / name, record)
    return tmp_path / name


def only(records: Sequence[Record]) -> Section:
    (one,) = of_sessions(records)
    return result.section(one, Context(details=True))


def test_the_gain_is_that_of_the_confirmation_and_not_the_larger_one_of_the_search() -> None:
    records = session({DEFAULT: 9.0, OFF: 3.0}, gain=1.25)
    first, medians = result.sentences(*of_sessions(records))
    # default 21 + 300 x 10 ms, winner 21 + 300 x 8.2 ms, each a little slower in two of three blocks
    assert first.startswith("--flash-attn off is 1.22 times as fast (95 % interval 1.2")
    assert first.endswith(", from 6 new blocks measured after the choice) for 20 + 301 tokens.")
    assert medians.startswith(
        "Medians of these blocks: first token after 21.2 ms instead of 21.2 ms, each further token"
    )
    (row,) = only(records).document()["tunings"]
    assert row["recommended"] == OFF and row["gain_low"] < row["gain"] < row["gain_high"] < 1.25
    assert row["tried"][1]["time_ratio"] < 0.45


def test_what_became_of_each_choice_stands_beside_it_the_default_and_the_winner_first() -> None:
    section = only(whole())
    names = [line[0] for line in section.cells]
    verdicts = [line[-1] for line in section.cells]
    assert names == [DEFAULT, OFF, f"{LOSSY}\nchanges the model's output", ONE, "--no-mmap"]
    assert verdicts == ["the base", "recommended", "faster in the search", "slower", "failed"]
    assert section.caption == (
        "tiny Q4_0 on Test CPU, 4 cores: 20 + 301 tokens; goal: time of the whole request"
    )
    assert section.warnings == ["Runs failed with --no-mmap (llama.cpp is out of memory)."]
    default = section.cells[0]
    winner = section.cells[1]
    assert list(default[1:4]) == ["4", "3.03 s", "1.00"]
    estimate, interval = winner[3].split("\n")
    low, high = map(float, interval.split("-"))
    assert low < float(estimate) < high and float(estimate) == pytest.approx(0.553, abs=0.01)


def test_a_session_whose_records_name_no_block_is_shown_as_one_without_a_result() -> None:
    records = [
        dataclasses.replace(one, run=dataclasses.replace(one.run, block=None)) for one in session()
    ]
    section = only(records)
    assert result.sentences(*of_sessions(records)) == [
        "No other setting was measured, so nothing is recommended."
    ]
    assert {line[-1] for line in section.cells} == {"failed"}


FASTEST = "--flash-attn off was the fastest in the search"
NOTHING = "Keep the default: nothing that was tried is faster beyond noise."


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
        (session(won=None), f"No recommendation: {FASTEST}, but nothing confirmed it."),
        (
            session(n_confirmed=2),
            f"No recommendation: {FASTEST}, but only 2 new blocks of at least 4",
        ),
        (
            session({DEFAULT: 9.0}, won=None),
            "No other setting was measured, so nothing is recommended.",
        ),
    ],
    ids=["equal", "slower", "not confirmed", "lost", "interrupted", "too few blocks", "alone"],
)
def test_without_a_confirmed_gain_nothing_is_recommended(records: list[Record], words: str) -> None:
    assert only(records).words[0].startswith(words)
    (row,) = only(records).document()["tunings"]
    assert row["recommended"] is None and "recommended" not in [
        one["verdict"] for one in row["tried"]
    ]


def test_recommended_settings_come_as_command_lines_and_only_they() -> None:
    (found,) = of_sessions(session())
    lines = result.command_lines(found)
    assert list(lines) == ["llama-server", "lab"]
    assert lines["llama-server"].startswith(
        "llama-server --model ./tiny.gguf --ctx-size 512 --parallel 1 --threads 2"
    )
    assert "--flash-attn off" in lines["llama-server"]
    *_, part = only(session()).parts
    assert part.facts == lines and part.title == "The recommended settings as commands"
    (unproven,) = of_sessions(session(gain=1.0))
    assert result.command_lines(unproven) == {}


def test_the_command_ends_with_what_was_found_and_ctrl_c_with_the_best_so_far(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object) -> Iterator[Record]:
        yield from session(won=None)
        raise KeyboardInterrupt

    options = ("tune", "-m", mini, "-p", 20, "-n", 5, "--out", tmp_path, "--no-plot")
    monkeypatch.setattr(tuning, "execute", lambda *_: iter(whole()))
    code, out, _ = run_lab(*options)
    assert (
        code == 0 and "--flash-attn off is 1.81 times as fast" in out and "llama-server" not in out
    )
    assert (
        "\nWith these settings: lab measure --prompt-len 20 --gen 301 --model tiny.gguf --flash-attn off\n"
        in out
    )
    assert json.loads(run_lab(*options, "--json")[1])["tunings"][0]["recommended"] == OFF
    monkeypatch.setattr(tuning, "execute", searched)
    code, _, err = run_lab(*options)
    assert code == 130 and "Interrupted. 12 finished runs are in " in err
    assert (
        "No recommendation: --flash-attn off was the fastest in the search, but nothing confirmed it."
        in err
    )


def test_show_plot_and_report_read_a_session(tmp_path: Path) -> None:
    path = saved(tmp_path, whole())
    code, out, err = run_lab("show", path)
    assert (code, err) == (0, "") and "for 20 + 301 tokens" in out
    assert out.splitlines()[2].startswith("--flash-attn off is 1.81 times as fast (95 % interval")
    assert "prefill" not in out  # no table of plain runs
    document = json.loads(run_lab("show", "--json", path)[1])
    assert document["rows"] == [] and [one["recommended"] for one in document["tunings"]] == [OFF]
    assert run_lab("plot", path)[1].split() == [
        str(tmp_path / f"tune-tune.{kind}") for kind in ("png", "svg")
    ]
    assert run_lab("report", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<h1>Which settings are the fastest for 20 + 301 tokens?</h1>" in page
    assert (
        "--flash-attn off is 1.81 times as fast" in page
        and "<h2>Runs</h2>" not in page
        and page.count("<svg") == 1
    )
    assert "lab tune --prompt-len 20 --gen 301 --allow-lossy --model" in page


def test_other_commands_leave_a_session_out_and_say_so_where_nothing_is_left(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path, session())
    for command in ("compare", "explain"):
        code, _, err = run_lab(command, path)
        assert code == 1 and "These results are only of lab tune." in err


def test_a_session_without_a_default_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path, [record for record in session() if record.run.variant != DEFAULT])
    assert "lab tune measured no run of the default" in run_lab("show", path)[1]
    code, _, err = run_lab("report", path)
    assert code == 1 and "no run went well" in err and "Traceback" not in err


def test_hostile_settings_stay_text(tmp_path: Path) -> None:
    evil = "--flash-attn <script>alert(1)</script> $x$ \x1b[31m"
    records = session({DEFAULT: 9.0, evil: 4.5}, won=evil, settings={})
    one = dataclasses.replace(SETTINGS, n_threads=1)
    odd = [r if r.run.variant == DEFAULT else dataclasses.replace(r, settings=one) for r in records]
    path = saved(tmp_path, odd)
    _, out, _ = run_lab("show", path)
    assert "<script>alert(1)</script> $x$" in out and "\x1b" not in out
    assert run_lab("report", path)[0] == run_lab("plot", path)[0] == 0
    page = (tmp_path / "tune.html").read_text()
    assert "<script>alert" not in page and "\x1b" not in page and "&lt;script&gt;alert(1)" in page


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
            dataclasses.replace(each, run=dataclasses.replace(each.run, **changes))
            if i % 2
            else each
            for i, each in enumerate(good)
        ]
        section = only(records)
        assert section.cells[0][0] == DEFAULT
        canvas.drawn(section.pictures[0].draw, (10, 4.6))
        assert json.loads(json.dumps(section.document(), allow_nan=False))["tunings"][0]["tried"], (
            number
        )
