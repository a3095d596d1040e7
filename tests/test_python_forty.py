"""The functions as people call them: rightly, wrongly, and with numbers of other libraries."""

from __future__ import annotations

import decimal
import fractions
import logging
import os
import pathlib
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

import lab
from lab.core import results
from lab.core.arguments import BY_TYPE
from lab.runner import session
from tests.support import typed_settings
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import make_record, make_run

ROOT = Path(__file__).parents[1]
SAMPLE = str(ROOT / "results/sample-smollm2-135m-amd-epyc.jsonl")
SWEEP = str(ROOT / "results/sample-sweep-smollm2-135m-amd-epyc.jsonl")
UNTYPED: Any = lab  # calls that a type checker refuses
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def quick(
    monkeypatch: pytest.MonkeyPatch, simulated: None, tmp_path: Path
) -> Iterator[FakeWorker]:
    """Every session has the fake engine, and lies in a folder of its own."""
    worker = FakeWorker()
    monkeypatch.setattr(session, "Worker", lambda: worker)
    monkeypatch.setattr("lab.features.ab.Worker", lambda: worker)
    monkeypatch.setattr("lab.runner.trial.Worker", lambda: worker)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield worker


def measure(*arguments: Any, **keywords: Any) -> Any:
    """`lab.measure` with few tokens and runs, unless others are given."""
    return lab.measure(*arguments, **{"gen": 2, "repeat": 1, "out": "here", **keywords})


def lengths(records: Any) -> list[int]:
    return sorted({record.run.n_prompt for record in records if not record.is_warmup})


def records() -> Any:
    return lab.read(SAMPLE)


RIGHT: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
    "a string": (lambda: measure("8,16"), lambda measured: lengths(measured) == [8, 16]),
    "a number": (lambda: measure(8), lambda measured: lengths(measured) == [8]),
    "an array": (
        lambda: measure(np.array([8, 16])),
        lambda measured: lengths(measured) == [8, 16],
    ),
    "a series": (
        lambda: measure(pd.Series([8, 16])),
        lambda measured: lengths(measured) == [8, 16],
    ),
    "unique lengths": (
        lambda: measure(records().runs.n_prompt.unique()[:1], gen=np.int64(2)),
        lambda measured: len(lengths(measured)) == 1,
    ),
    "a range": (
        lambda: measure(range(8, 17, 8)),
        lambda measured: lengths(measured) == [8, 16],
    ),
    "numbers in strings": (
        lambda: measure(["8"], gen="2", repeat="1", threads="2"),
        lambda measured: measured[-1].settings.n_threads == 2,
    ),
    "numpy threads": (
        lambda: measure([np.int64(8)], threads=np.int64(2), seed=np.uint8(3)),
        lambda measured: measured[-1].settings.seed == 3,
    ),
    "switches": (
        lambda: measure(
            8, flash_attn=True, mmap="on", kv_unified=False, repack=np.bool_(True)
        ),
        lambda measured: (
            measured[-1].settings.flash_attn == "on" and measured[-1].settings.mmap is True
        ),
    ),
    "a percent": (
        lambda: measure(8, until="5%", max_repeats=8, budget="10min"),
        lambda measured: len(measured) >= 8,
    ),
    "a sweep": (
        lambda: UNTYPED.sweep("64", np.int32(16), gen=2, repeat=1, out="here"),
        lambda measured: (
            list(measured.runs[~measured.runs.warmup].n_prompt) == [16, 32, 48, 64]
        ),
    ),
    "variants": (
        lambda: lab.ab([{"threads": 1}, {"threads": np.int64(2)}], [8], gen=2, repeat=1),
        lambda measured: (
            {record.run.variant for record in measured}
            == {
                "A: --threads 1",
                "B: --threads 2",
            }
        ),
    ),
    "a batch": (
        lambda: lab.batch(np.array([1, 2]), 32, gen=4, repeat=1),
        lambda measured: {record.case.get("n_seq") for record in measured} >= {1, 2},
    ),
    "a stall": (
        lambda: lab.stall(64, chunk=[32], sequences=1, repeat=1),
        bool,
    ),
    "one path": (lambda: lab.read(SAMPLE), lambda measured: len(measured.records) > 5),
    "a Path": (lambda: lab.read(Path(SAMPLE)), lambda measured: len(measured.records) > 5),
    "runs of a path": (lambda: lab.runs(SAMPLE), lambda measured: len(measured) > 5),
    "runs of contents": (
        lambda: lab.runs(results.read([SAMPLE])),
        lambda measured: len(measured) > 5,
    ),
    "runs of nothing": (lambda: lab.runs([]), lambda measured: "tpot_ms" in measured.columns),
    "steps of nothing": (lambda: lab.steps([]), lambda measured: "itl_ms" in measured.columns),
    "a summary": (lambda: lab.summary(SAMPLE), lambda measured: len(measured) >= 3),
    "a comparison": (
        lambda: lab.compare(lab.read(SAMPLE), SWEEP),
        lambda measured: len(measured) == 1,
    ),
    "a picture": (
        lambda: lab.plot_decode(SAMPLE),
        lambda measured: measured.get_xlabel() != "",
    ),
    "a sweep's picture": (
        lambda: lab.plot_sweep(Path(SWEEP)),
        lambda measured: len(measured.axes) == 2,
    ),
    "a page": (
        lambda: lab.report("page.html", SAMPLE, at_least="5%"),
        lambda measured: measured.is_file(),
    ),
    "a prediction": (
        lambda: UNTYPED.predict(1000, "20", device=["rtx-4090"]),
        lambda measured: measured[0].n_prompt == 1000,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_call_is_taken_as_it_is_meant(name: str) -> None:
    call, is_right = RIGHT[name]
    assert is_right(call())


FRAME_NEEDS_RECORDS = "Records are needed, and this is a DataFrame."
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "gen=True": (lambda: measure(8, gen=True), "gen=True is not possible."),
    "gen=2.5": (lambda: measure(8, gen=2.5), "gen=2.5 is not possible."),
    "gen=0": (lambda: measure(8, gen=0), "gen=0 is not possible."),
    "gen of nan": (lambda: measure(8, gen=float("nan")), "gen=nan is not possible."),
    "no length": (lambda: measure([]), "There is no prompt length."),
    "length 0": (lambda: measure(0), "A prompt length of 0 cannot be measured."),
    "an empty text": (lambda: measure(""), "'' is not a prompt length"),
    "half a token": (lambda: UNTYPED.predict(100, 2.5), "gen=2.5 is not possible."),
    "bytes": (lambda: measure(b"8"), "prompt_len=b'8' is not possible."),
    "out=None": (lambda: measure(8, out=None), "out=None is not possible."),
    "out=''": (lambda: measure(8, out=""), "out='' is not possible."),
    "a missing model": (
        lambda: measure(8, model=Path("x.gguf")),
        "There is no model file x.gguf.",
    ),
    "threads=1.5": (lambda: measure(8, threads=1.5), "threads=1.5 is not possible."),
    "threads=True": (lambda: measure(8, threads=True), "threads=True is not possible."),
    "threads=0": (lambda: measure(8, threads=0), "threads=0 is not possible."),
    "flash_attn='maybe'": (
        lambda: measure(8, flash_attn="maybe"),
        "flash_attn='maybe' is not possible.",
    ),
    "watch=3": (lambda: measure(8, watch=3), "watch=3 is not possible."),
    "mmap=3": (lambda: measure(8, mmap=3), "mmap=3 is not possible."),
    "until=5": (lambda: measure(8, until=5), "until=5 is not possible."),
    "until=-1": (lambda: measure(8, until="-1%"), "until='-1%' is not possible."),
    "budget alone": (lambda: measure(8, budget=60), "budget has an effect only with until."),
    "at_least=5": (lambda: lab.compare(SAMPLE, at_least=5), "at_least=5 is not possible."),
    "at_least=-1": (lambda: lab.compare(SAMPLE, at_least=-1), "at_least=-1 is not possible."),
    "a setting of a server": (
        lambda: lab.batch(url=NOWHERE, threads=4),
        "threads is only for the lab's own engine, not for a server.",
    ),
    "a server's argument": (
        lambda: measure(8, api="chat"),
        "api is only for a server, but there is no url.",
    ),
    "variants in a dict": (
        lambda: UNTYPED.ab({"threads": 1}),
        "variants={'threads': 1} is not",
    ),
    "one variant": (lambda: lab.ab([{"threads": 1}]), "A trial needs at least two variants."),
    "a picture of a frame": (lambda: lab.plot_decode(lab.runs(SAMPLE)), FRAME_NEEDS_RECORDS),
    "runs of runs": (lambda: lab.runs(lab.runs(SAMPLE)), FRAME_NEEDS_RECORDS),
    "runs of a number": (lambda: UNTYPED.runs(3), "Records are needed, and this is a int."),
    "a part of a frame": (
        lambda: lab.summary(lab.runs(SAMPLE)[["model"]]),
        "The table has no column case.",
    ),
    "no records": (lambda: lab.plot_decode([]), "There is nothing to draw: no records"),
    "no predictions": (
        lambda: lab.plot_requests([]),
        "There is nothing to draw: no predictions",
    ),
    "a logarithm of zero": (
        lambda: lab.plot_lines({"a": ([0, 1], [1, 2])}, "x", "y", "t", log=True),
        "A logarithmic axis cannot show 0",
    ),
    "no file": (
        lambda: lab.read("nonesuch.jsonl"),
        "There is no results file nonesuch.jsonl.",
    ),
    "another file": (lambda: lab.read(str(ROOT / "pyproject.toml")), "holds no results"),
    "a path for ceilings": (
        lambda: UNTYPED.explain(SAMPLE, "results"),
        "Ceilings are needed, and this is a str.",
    ),
    "no ceilings": (
        lambda: lab.explain(list(lab.read(SAMPLE))),
        "The ceilings of smollm2-135m have not been measured.",
    ),
    "a model as the prompt's length": (
        lambda: lab.measure("phi-3-mini"),
        'A model is named by model="phi-3-mini"',
    ),
    "no settings": (lambda: lab.settings("nonesuch"), "There are no settings named nonesuch."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_a_sentence_in_pythons_words(name: str) -> None:
    call, sentence = WRONG[name]
    with pytest.raises(lab.LabError) as caught:
        call()
    message = str(caught.value)
    assert sentence in message
    assert "--" not in re.sub(r"lab (ab|tune) .*", "", message), message
    assert not list(Path("here").glob("*.jsonl")) if Path("here").exists() else True


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "thread": (
        lambda: measure(8, thread=2),
        "lab.measure() has no argument 'thread'. Did you mean threads?",
    ),
    "with a server": (lambda: measure(8, url=NOWHERE, thread=2), "Did you mean threads?"),
    "a column": (lambda: measure(8, n_threads=2), "Did you mean threads?"),
    "another column": (lambda: measure(8, n_gen=2), "Did you mean gen?"),
    "llama.cpp's": (lambda: measure(8, type_k="q8_0"), "Did you mean cache_type_k?"),
    "of a variant": (
        lambda: lab.ab([{"threads": 1}, {"thread": 2}]),
        "A variant of lab.ab() has no setting 'thread'. Did you mean threads?",
    ),
    "of another function": (
        lambda: UNTYPED.sweep(64, temp=1),
        "lab.sweep() has no argument 'temp'",
    ),
    "of a reader": (lambda: UNTYPED.runs(SAMPLE, threads=1), "lab.runs() has no argument"),
    "a base by position": (UNTYPED.report, "lab.report(): missing"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_argument_is_refused_by_its_public_name(name: str) -> None:
    call, sentence = UNKNOWN[name]
    with pytest.raises(TypeError) as caught:
        call()
    assert sentence in str(caught.value)


def test_two_sessions_are_compared_and_neither_is_the_base() -> None:
    first = [make_record(make_run(repeat=n), session="a") for n in range(3)]
    second = [make_record(make_run(repeat=n, decode_ms=20), session="b") for n in range(3)]
    (compared,) = lab.compare(first, second)
    assert {row.verdict for row in compared.rows if row.figure == "tpot_ms"} == {"slower"}


def test_the_same_input_beside_it_on_the_command_line() -> None:
    """Numbers that Python refuses, refused there too."""
    for option, value in (("--gen", "2.5"), ("--threads", "1.5"), ("--flash-attn", "maybe")):
        status, _, err = run_lab("measure", "-p", "8", option, value)
        assert status != 0
        assert value in err
    status, _, err = run_lab("measure", "-p", "", "--out", "here")
    assert status != 0
    assert "prompt length" in err


# Values of other libraries, and ordinary ones


WHOLE_NUMBERS: list[Any] = [
    *(8, 8.0, "8", " 8 ", "+8", "8k", "1.5k", True - 1 + 8, decimal.Decimal(8)),
    *(fractions.Fraction(8), np.int8(8), np.int16(8), np.int32(8), np.int64(8), np.uint8(8)),
    *(
        np.uint64(8),
        np.float32(8),
        np.float64(8),
        np.str_("8"),
        np.array(8),
        pd.Series([8])[0],
    ),
    pd.Index([8])[0],
]
SHARES: list[Any] = [
    0,
    0.0,
    0.01,
    "1%",
    "2 %",
    "0.5%",
    "99%",
    0.99,
    np.float64(0.02),
    np.float32(0.5),
]
SEVERAL: list[Any] = [
    *(
        "8",
        "8,16",
        "8-64*2",
        "8-64+8",
        "1k,2k",
        8,
        [8],
        [8, 16],
        (8, 16),
        {8, 16},
        range(8, 24, 8),
    ),
    *(np.array([8, 16]), np.array([8.0, 16.0]), np.arange(8, 24, 8), pd.Series([8, 16])),
    *(pd.Index([8, 16]), pd.array([8, 16]), ["8", "16"], [np.int64(8)], (n for n in [8, 16])),
    map(int, "8"),
    {8: 1}.keys(),
    pd.Series([8, 16, 8]).unique(),
]
PATHS: list[Any] = [
    *("results", "results/x", "./x", "../x", "/tmp/x", "~/x", "~", "a b", "ü", "x.jsonl", "-"),
    *(Path("x"), Path("~/x"), pathlib.PurePosixPath("x"), np.str_("x"), "C:\\x", "no~tilde"),
]
TEXTS: list[Any] = [
    *("text", "code,story", "random", "letter.txt", Path("letter.txt"), ["code", "story"]),
    *(
        ("code",),
        np.array(["code", "story"]),
        pd.Series(["code"]),
        np.str_("code"),
        "none",
        "CUDA0",
    ),
    *(
        "CUDA0,CUDA1",
        ["CUDA0", "CUDA1"],
        "127.0.0.1:50052",
        "ffn_.*_exps=CPU",
        "smollm2-135m:Q8_0",
    ),
]
SWITCHES: list[Any] = [True, False, np.bool_(True), "on", "off", "ON", " off "]
NUMBERS: list[Any] = [
    0,
    1,
    0.5,
    "0.5",
    "1e3",
    np.float32(2),
    np.int64(3),
    decimal.Decimal("0.1"),
]
TIMES: list[Any] = [60, 60.0, "60", "10min", "1h", "90s", np.int64(60), pd.Timedelta("10min")]
ORDINARY: list[tuple[str, Any]] = [
    *(("int", value) for value in WHOLE_NUMBERS),
    *(("Share", value) for value in SHARES),
    *(("Numbers", value) for value in SEVERAL),
    *(("StrPath", value) for value in PATHS),
    *(("Texts", value) for value in TEXTS),
    *(("bool", value) for value in SWITCHES),
    *(("float", value) for value in NUMBERS),
    *(("Time", value) for value in TIMES),
]


def test_about_a_hundred_ordinary_values_are_let_through() -> None:
    assert len(ORDINARY) >= 100
    kind: str
    value: Any
    for kind, value in ORDINARY:
        BY_TYPE[kind]("argument", value)
    assert {BY_TYPE["int"]("n", value) for value in WHOLE_NUMBERS} == {8, 8000, 1500}


def of_kind(kind: str, *values: Any) -> list[tuple[str, Any]]:
    return [(kind, value) for value in values]


REFUSED = [
    *of_kind("int", True, 2.5, "x", "8.5", "", None, [8], np.array([8]), b"8", {}),
    *of_kind("int", float("inf"), np.nan, pd.NA, pd.NaT, 8j, "1,000", np.bool_(1)),
    *of_kind("Share", 5, -1, 1, "100%", "x", None, True, "5"),
    *of_kind("StrPath", None, "", b"x", 3, ["x"], True),
    *of_kind("bool", 2, "yes please", None, [], 0.0),
    *of_kind("float", "x", None, True, float("nan"), [1]),
    *of_kind("Numbers", 2.5, [2.5], [True], b"8", {8: 1}, [[8]], [None]),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_other_values_are_refused_with_the_name_of_the_argument(kind: str, value: Any) -> None:
    with pytest.raises(lab.LabError, match="argument="):
        BY_TYPE[kind]("argument", value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.sampled_from(["8", "8,16", "", "x", "2k", "1.5", "on", "off", "auto", "-1", "8-32*2"]),
    st.lists(st.integers(-1, 40), max_size=3),
    st.builds(np.int64, st.integers(0, 40)),
    st.builds(np.float64, st.floats(0, 40)),
    st.builds(np.array, st.lists(st.integers(0, 40), max_size=3)),
)
ARGUMENTS = (
    *("gen", "repeat", "threads", "flash_attn", "mmap", "seed", "ubatch", "temp", "top_k"),
    *("batch", "every", "presence_penalty"),
)


@hypothesis_settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    prompt_len=VALUES,
    keywords=st.dictionaries(st.sampled_from(ARGUMENTS), VALUES, max_size=3),
)
def test_nothing_is_written_that_the_reader_rejects(
    prompt_len: Any, keywords: dict[str, Any]
) -> None:
    """Every call measures what can be read again, or is refused with a sentence."""
    try:
        measured = measure(prompt_len, **{"repeat": 1, **keywords})
    except lab.LabError:
        return
    file = max(Path("here").glob("*.jsonl"), key=os.path.getmtime)
    reading = results.read([file])
    assert reading.skipped == ()
    assert list(reading.records) == measured
    file.unlink()


# Paths


def test_a_tilde_is_the_users_home_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for out in ("~/one", Path("~/two")):
        assert len(measure(8, out=out))
        assert lab.read([f"{out}"]).records
    assert lab.report("~/page.html", "~/one") == tmp_path / "page.html"
    status, _, _ = run_lab("export", "~/one", "--file", "~/export.csv")
    assert status == 0
    assert (tmp_path / "export.csv").is_file()
    assert not (tmp_path / "~").exists()


# What is returned


def test_results_are_a_list_with_tables_and_pictures() -> None:
    measured = measure("8,16")
    assert type(measured) is not list
    assert measured == list(measured)
    assert set(measured.steps.row) <= set(measured.runs.row)
    assert len(measured.summary) == 2
    assert measured.plot().axes
    both = measured[:2] + measure(32)
    assert lengths(both)[-1] == 32
    assert both.runs.row.is_unique
    assert pickle.loads(pickle.dumps(measured)) == measured
    assert repr(measured) == "<Results: 3 runs (1 warm-up); .runs .steps .summary .plot()>"
    assert all(len(repr(record)) < 200 for record in measured)


def test_rows_of_a_sweep_and_its_steps_are_joined_by_a_key() -> None:
    swept = lab.read(SWEEP)
    joined = swept.steps.merge(swept.runs, on="row", suffixes=("", "_of_run"))
    assert swept.runs.row.is_unique
    assert len(joined) == len(swept.steps)
    decode = joined[joined.kind == "decode"]
    assert (decode.n_past >= decode.n_prompt_of_run).all()
    assert (decode.n_past < decode.n_prompt_of_run + decode.n_gen).all()
    assert set(swept.steps.status) == {"ok"}


def test_empty_tables_have_the_columns_of_full_ones() -> None:
    assert set(lab.runs([]).columns) == set(lab.runs(SAMPLE).columns)
    assert set(lab.steps([]).columns) == set(lab.steps(SAMPLE).columns)
    assert lab.summary([]).empty


def test_a_cut_last_line_is_a_warning(tmp_path: Path) -> None:
    text = Path(SAMPLE).read_text(encoding="utf-8")
    (tmp_path / "cut.jsonl").write_text(text[:-200], encoding="utf-8")
    with pytest.warns(UserWarning, match=r"cut.jsonl line \d+ skipped") as caught:
        assert lab.read("cut.jsonl").skipped
    assert caught[0].filename == __file__


# Manners


def test_a_session_is_logged_and_can_be_silent(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "lab"):
        measure(8, watch=False)
        assert not caplog.records
        measure(8, repeat=3)
    assert any("run 2 of 3 has ended" in line.getMessage() for line in caplog.records)
    seen: list[Any] = []
    measure(8, watch=seen.append)
    assert seen
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    measure(8)
    err = capsys.readouterr().err
    assert "run 1 of 1" in err
    assert err.endswith("\n")


def test_the_package_shows_its_functions_alone() -> None:
    assert dir(lab) == sorted(["LabError", *lab.PUBLIC])
    assert set(lab.__all__) == {"LabError", *lab.PUBLIC}
    assert not hasattr(lab, "nonsense")
    assert pickle.loads(pickle.dumps(lab.measure)) is lab.measure
    assert (ROOT / "lab/py.typed").is_file()


def test_the_types_of_settings_are_up_to_date() -> None:
    assert typed_settings.FILE.read_text(encoding="utf-8") == typed_settings.written()
