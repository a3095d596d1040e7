"""The datasheet of a reader's machine: what the lessons write, and what is predicted from it."""

import csv
import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lab.core.files import data_file
from lab.core.record import Machine, Model
from lab.errors import LabError
from lab.features.lessons import lesson, sheet as lessons_sheet
from lab.features.predict.ranking import predict
from lab.models import asked_devices, catalog, described, devices, own_sheet
from lab.models.own_sheet import OwnSheet, SheetRow
from lab.roofline import conditioning, datasheet
from lab.roofline.prediction import OnDevice
from tests.support.records import make_record, make_run

pytestmark = pytest.mark.usefixtures("one_engine")

RECORDS = [make_record(make_run())]
SMOL = "smollm2-135m:Q4_1"


def planted(*rows: SheetRow, facts: str = "cores=8 simd=avx2", model: str = SMOL) -> OwnSheet:
    return OwnSheet("a planted machine", facts, model, rows)


def written(folder: Path, sheet: OwnSheet) -> str:
    path = folder / "datasheet.toml"
    path.write_text(own_sheet.text_of_sheet(sheet), encoding="utf-8")
    return str(path)


def test_a_sheet_is_read_as_it_was_written(tmp_path: Path) -> None:
    sheet = planted(SheetRow(1, "w", 5.125, 7.0), SheetRow(2, "read_rate", 29.1))
    assert own_sheet.read(written(tmp_path, sheet)) == sheet


def test_a_device_of_a_sheet_is_the_one_of_its_words(tmp_path: Path) -> None:
    path = written(tmp_path, planted(SheetRow(2, "read_rate", 51.2)))
    row = predict("1000", 200, "llama-3.2-1b:Q4_0", path)[0]
    same = predict("1000", 200, "llama-3.2-1b:Q4_0", "gbps=51.2 cores=8 simd=avx2")[0]
    assert row.name == path
    assert row.about == "a planted machine"
    assert (row.tpot_s, row.prefill_s) == (same.tpot_s, same.prefill_s)


def test_the_rates_of_a_sheet_narrow_as_measured_ones_do(tmp_path: Path) -> None:
    rows = [
        SheetRow(2, "read_rate", 51.2),
        SheetRow(1, "prefill", 900.0),
        SheetRow(1, "w", 5.0),
        SheetRow(3, "w", 9.0),
        SheetRow(5, "w", 6.0),
        SheetRow(1, "k", 31.25),
    ]
    path = written(tmp_path, planted(*rows))
    row = predict("1000", 200, "llama-3.2-1b:Q4_0", path)[0]
    machine = "gbps=51.2 cores=8 simd=avx2"
    rates = (f"{SMOL}=125", f"{SMOL}=pp:900")  # 6 ms, the median, and 64 times 31.25 us
    same = predict("1000", 200, "llama-3.2-1b:Q4_0", machine, measured=rates)[0]
    assert row.tpot_s == pytest.approx(same.tpot_s)
    assert row.prefill_s == pytest.approx(same.prefill_s)


Publication = tuple[str, str, str]  # the device, who published, and flash attention


def published_rates() -> dict[Publication, dict[str, float]]:
    """llama.cpp's decode rates by SPEC, of who published at least two models of the catalog."""
    rates: dict[Publication, dict[str, float]] = defaultdict(dict)
    with data_file("published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            device = devices.called(row["device"])
            is_plain = row["phase"] == "decode" and not row["marks"] and not row["n_depth"]
            is_made = row["model"] in catalog.entries() and row["quantization"][:3] != "UD-"
            if device is None or not is_plain or not is_made:
                continue
            is_llama_cpp = datasheet.runtime_of(row["source"]) == "llama.cpp"
            if is_llama_cpp and row["backend"] == datasheet.backend_of(device):
                key = device.name, row["source"], row["flash_attn"]
                rates[key][f"{row['model']}:{row['quantization']}"] = float(row["tps"])
    return {key: specs for key, specs in rates.items() if len(specs) > 1}


def shape_called(spec: str) -> Model:
    name, _, quantization = spec.partition(":")
    return lesson.shape(name, quantization)


def token_range(path: str, spec: str, flash_attn: str = "on") -> tuple[float, float]:
    """The predicted seconds of a token without context, from a datasheet."""
    settings = dataclasses.replace(
        RECORDS[0].settings, flash_attn=flash_attn, flash_attn_resolved=flash_attn
    )
    device = asked_devices.device_called(path)
    rates = conditioning.rates_of_sheet(device)
    compared = conditioning.compare(rates, shape_called, settings, device)
    return OnDevice(shape_called(spec), settings, device, compared).request(64, 2, 1).tpot_s


def test_other_models_of_published_machines_are_predicted_within_their_ranges(
    tmp_path: Path,
) -> None:
    """One rate is in the sheet, the other one is predicted. The range is one of 90 %; these rows
    are of many builds, and the models are as different as a publisher has them."""
    n_inside = 0
    publications = published_rates()
    for (name, _, flash_attn), specs in publications.items():
        (first, first_tps), *_, (last, last_tps) = sorted(specs.items())
        gbps = devices.find_device(name).gbps
        rows = [SheetRow(2, "read_rate", gbps), SheetRow(1, "w", 1e3 / first_tps)]
        path = written(tmp_path, planted(*rows, facts=name, model=first))
        low_s, high_s = token_range(path, last, "on" if flash_attn == "1" else "off")
        n_inside += low_s <= 1 / last_tps <= high_s
    assert len(publications) >= 20
    assert n_inside >= 0.75 * len(publications), n_inside


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8])
@pytest.mark.parametrize("second", ["llama-3.2-3b:Q4_0", "llama-3.1-8b:Q4_0", "qwen3-4b:Q4_0"])
def test_another_model_of_a_planted_machine_is_predicted_within_its_range(
    tmp_path: Path, share: float, second: str
) -> None:
    """A machine that reads all weights of a token at a share of its bandwidth."""
    gbps = 51.2
    first = "llama-3.2-1b:Q4_0"
    token_s = {}
    for spec in (first, second):
        token_s[spec] = lesson.step_cost(shape_called(spec), 1).weight_bytes / (
            share * gbps * 1e9
        )
    rows = [SheetRow(2, "read_rate", gbps), SheetRow(1, "w", 1e3 * token_s[first])]
    low_s, high_s = token_range(written(tmp_path, planted(*rows, model=first)), second)
    assert low_s <= token_s[second] <= high_s


READ_RATE = b'[[row]]\nlesson = 2\nfigure = "read_rate"\nvalue = 9\n'
WRONG = {
    "no text": b"\xff\xfe\x00",
    "not TOML": b"[machine\n",
    "deep": b"a = " + b"[" * 5000,
    "no machine": b"x = 1\n",
    "machine is a number": b"machine = 1\n",
    "facts are a list": b"[machine]\nfacts = []\n",
    "row is a number": b"row = 3\n[machine]\n",
    "rows are numbers": b"row = [3]\n[machine]\n",
    "too many": b"[machine]\n" + b"[[row]]\n" * 501,
    "too large": b"#" * 100_001,
    "unknown figure": b'[machine]\n[[row]]\nlesson = 1\nfigure = "speed"\nvalue = 1\n',
    "figure is a list": b"[machine]\n[[row]]\nlesson = 1\nfigure = []\nvalue = 1\n",
    "no lesson": b'[machine]\n[[row]]\nfigure = "w"\nvalue = 1\n',
    "a true lesson": b'[machine]\n[[row]]\nlesson = true\nfigure = "w"\nvalue = 1\n',
    "no value": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\n',
    "text": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = "5"\n',
    "nan": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = nan\n',
    "inf": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = inf\n',
    "zero": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = 0\n',
    "negative": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = -3\n',
    "huge": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = ' + b"9" * 400 + b"\n",
    "bad guess": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = 1\nguess = "x"\n',
    "control letters": b'[machine]\n[[row]]\nlesson = 1\nfigure = "\\u001b[31mw"\nvalue = 1\n',
    "no read rate": b'[machine]\n[[row]]\nlesson = 1\nfigure = "w"\nvalue = 1\n',
    "bad words": b'[machine]\nfacts = "cores=none"\n' + READ_RATE,
    "unknown fact": b'[machine]\nfacts = "shell=x"\n' + READ_RATE,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sheet_is_an_error_that_says_what_to_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / "datasheet.toml"
    path.write_bytes(WRONG[name])
    with pytest.raises(LabError) as caught:
        predict("1000", 200, SMOL, str(path))
    assert caught.value.hint
    assert str(caught.value).replace("\n", " ").isprintable()


def test_a_missing_sheet_and_a_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for name in ("absent.toml", "folder.toml"):
        with pytest.raises(LabError, match="cannot be read"):
            predict("1000", 200, SMOL, str(tmp_path / name))


def test_a_rate_of_a_model_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    rows = [SheetRow(2, "read_rate", 30.0), SheetRow(1, "w", 5.0)]
    path = written(tmp_path, planted(*rows, model="$(touch x)"))
    with pytest.raises(LabError):
        predict("1000", 200, SMOL, path)
    rows = [SheetRow(2, "read_rate", 30.0), SheetRow(1, "w", 1e12)]
    with pytest.raises(LabError):
        predict("1000", 200, SMOL, written(tmp_path, planted(*rows)))


# The lessons


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_lesson_adds_its_rows_and_replaces_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.note(1, RECORDS, {"w": 7}, w=5.0, k=20.0)
    lesson.note(3, RECORDS, w=10.0)
    lesson.note(1, RECORDS, {"w": "much"}, w=6.0)
    rows = own_sheet.read("datasheet.toml").rows
    assert [(row.lesson, row.figure, row.value, row.guess) for row in rows] == [
        (1, "k", 20.0, None),
        (1, "w", 6.0, None),
        (3, "w", 10.0, None),
    ]
    assert "datasheet.toml, lesson 1: w = 5.00 ms, k = 20.0 us" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 0, -1, True, "5", ...])
def test_what_was_not_measured_gets_no_row(
    folder: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.note(1, RECORDS, w=value)
    assert "adds nothing" in capsys.readouterr().out
    assert not (folder / "datasheet.toml").exists()


def test_an_unknown_figure_and_another_machine_are_errors(folder: Path) -> None:
    with pytest.raises(LabError, match="has no figure speed"):
        lesson.note(1, RECORDS, speed=3.0)
    written(folder, planted(SheetRow(1, "w", 5.0)))
    with pytest.raises(LabError, match="Move the file"):
        lesson.note(1, RECORDS, w=5.0)


def test_runs_that_failed_are_an_error(folder: Path) -> None:
    for records in ([], [make_record(make_run(status="failed", error="no memory"))]):
        with pytest.raises(LabError, match="no run that went well"):
            lesson.note(1, records, w=5.0)


def test_guesses_stand_beside_what_was_measured(folder: Path) -> None:
    lesson.note(1, RECORDS, {"w": 10, "k": ...}, w=5.0, k=20.0)
    table = lesson.guesses_and_errors()
    assert table is not None
    assert list(table["your guess"]) == ["none", "10.0"]
    assert list(table[""]) == ["", "the guess is 2.00 times too high"]


def test_sessions_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lesson.sessions_vary() is None
    assert lesson.guesses_and_errors() is None
    assert capsys.readouterr().out.count("There is no datasheet.toml in this folder yet") == 2
    lesson.note(2, RECORDS, ridge=5.0)
    with pytest.raises(LabError, match="has no w, k, prefill and longest_gap"):
        lesson.sessions_vary()
    lesson.note(1, RECORDS, w=5.0, k=16.4)
    lesson.note(3, RECORDS, w=8.0)
    capsys.readouterr()
    table = lesson.sessions_vary()
    assert table is not None
    assert table.loc["w, ms"].tolist() == ["5.00", "8.00"]
    assert table.loc["k, us"].tolist() == ["16.4", "-"]
    out = capsys.readouterr().out
    assert "2 sessions, the largest 1.6x the smallest" in out
    assert "was measured once" in out


@pytest.mark.parametrize(
    ("system_info", "simd"),
    [
        ("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 |", "amx"),
        ("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 0 |", "avx2"),
        ("CPU : NEON = 1 | ARM_FMA = 1 | DOTPROD = 1 |", "dotprod"),
        ("CPU : NEON = 1 | MATMUL_INT8 = 1 | DOTPROD = 1 |", "i8mm"),
        ("CPU : SSE3 = 1 |", "sse"),
        ("", None),
        (None, None),
    ],
)
def test_a_machine_is_written_in_words_that_predict_takes(
    system_info: str | None, simd: str | None
) -> None:
    here = Machine(
        system_info=system_info, n_cores_physical=4, ram_bytes=16_000_000_000, devices=()
    )
    assert lessons_sheet.instructions_of(here) == simd
    record = make_record(make_run(), machine=here)
    settings = dataclasses.replace(record.settings, n_threads=3)
    description = lessons_sheet.facts_of(dataclasses.replace(record, settings=settings))
    device = described.find(f"gbps=50 {description}")
    assert (device.cores, device.simd, device.memory_gb) == (3, simd or "avx2", 16)
