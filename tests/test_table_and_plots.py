"""Tables, sentences and plots from records whose figures are known exactly."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import lab
from lab.app import kinds
from lab.core.record import Device, Record
from lab.show import console, table, text_findings
from tests.conftest import MACHINE, MODEL, SETTINGS, make_record, make_run


def session(decode_ms: float = 10, **changes: object) -> list[Record]:
    runs = [
        make_run(n, 5, repeat, prefill_ms=prefill_ms, decode_ms=decode_ms * (1 + n / 1000))
        for n, prefill_ms in ((10, 1), (100, 1), (1000, 2))
        for repeat in range(2)
    ]
    return [make_record(make_run(10, 2, warmup=True))] + [
        make_record(run, **changes) for run in runs
    ]


def test_runs_have_their_figures() -> None:
    row = table.runs([make_record(make_run(20, 4))]).iloc[0]
    assert row.prefill_s == pytest.approx(0.020)
    assert row.prefill_tps == pytest.approx(1000)
    assert row.ttft_s == pytest.approx(0.021)
    assert row.tpot_ms == pytest.approx(11)
    assert row.decode_tps == pytest.approx(1000 / 11)
    assert row.e2e_s == pytest.approx(0.054)
    assert row.prefill_share == pytest.approx(20 / 54)


def test_steps_number_the_generated_tokens() -> None:
    rows = table.steps([make_record(make_run(20, 4))])
    assert list(rows.generated) == [0, 0, 1, 2, 3, 4]
    assert list(rows.n_past) == [0, 8, 16, 20, 21, 22]
    assert rows.itl_ms.isna().tolist() == [True, True, True, False, False, False]
    assert rows.itl_ms.dropna().tolist() == pytest.approx([11, 11, 11])
    assert rows.compute_ms.iloc[3] == pytest.approx(10)


def test_summary_takes_medians_of_timed_runs_only() -> None:
    records = [make_record(make_run(20, 5, i, prefill_ms=ms)) for i, ms in enumerate((1, 2, 9))]
    records += [
        make_record(make_run(20, 5, warmup=True, prefill_ms=50)),
        make_record(make_run(20, 5, status="failed")),
    ]
    (row,) = table.summary(table.runs(records)).to_dict("records")
    assert (row["repeats"], row["prefill_s"], row["prefill_s_min"], row["prefill_s_max"]) == (
        3,
        *map(pytest.approx, (0.04, 0.02, 0.18)),
    )


def test_labels_have_the_fewest_fields_in_which_setups_differ() -> None:
    four = dataclasses.replace(SETTINGS, n_threads=4, n_threads_batch=4)
    other = dataclasses.replace(MODEL, name="other", sha256="ab")
    sweep = [make_record(make_run(100, 3, every=50))]
    cases = {
        "tiny Q4_0, n_threads 2": session() + session(settings=four),
        "tiny Q4_0": session() + session(model=other, settings=four),
        "tiny Q4_0, Test CPU, 4 cores": session(),
    }
    for label, records in cases.items():
        assert table.setups(table.runs(records))[0][0] == label
    labels = [label for label, _ in table.setups(table.runs([*session(), *sweep]))]
    assert labels == ["tiny Q4_0", "tiny Q4_0, sweep_every 50"]


def test_sentences_say_what_the_table_shows() -> None:
    sentences = " ".join(text_findings.findings(table.summary(table.runs(session()))))
    assert "Prefill of 1,000 tokens took 20x as long as for 100 (10x the tokens)" in sentences
    assert "2x per token, because each token attends to more" in sentences
    assert "11.1 ms per token after 10 prompt tokens and 21.0 ms after 1,000" in sentences


def test_gpus_and_mains_or_battery_are_part_of_a_setup() -> None:
    one = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, Device("GPU0", "a GPU", "gpu")))
    two = dataclasses.replace(one, devices=(*one.devices, Device("GPU1", "a GPU", "gpu")))
    mixed = dataclasses.replace(one, devices=(*one.devices, Device("GPU1", "another", "gpu")))
    offloaded = dataclasses.replace(SETTINGS, n_gpu_layers=99)
    records = [
        make_record(make_run(20, 5, repeat), machine=here, settings=offloaded)
        for here in (one, two, mixed)
        for repeat in range(2)
    ]
    labels = [label for label, rows in table.setups(table.runs(records))]
    assert labels == ["a GPU", "2 x a GPU", "a GPU, another"]
    powers = [
        make_record(machine=dataclasses.replace(MACHINE, power=power))
        for power in ("mains", "battery", None)
    ]
    labels = [label for label, rows in table.setups(table.runs(powers))]
    assert labels == [
        "tiny Q4_0, power mains",
        "tiny Q4_0, power battery",
        "tiny Q4_0, power unknown",
    ]
    assert set(table.runs(powers).devices) == {"none"}
    unknown = make_record(machine=dataclasses.replace(MACHINE, devices=()))
    assert (
        table.runs([unknown]).devices[0] is None
        and len(table.summary(table.runs([unknown, unknown]))) == 1
    )


def test_text_from_outside_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    odd = dataclasses.replace(MODEL, name="phi[q4] :fire: [/b]")
    kinds.print_results([make_record(make_run(10, 2), model=odd)], console.console())
    kinds.print_results(
        [make_record(make_run(status="failed", error="x[i01] [/tmp/a]"))], console.console()
    )
    shown = capsys.readouterr().out
    assert "phi[q4] :fire: [/b]" in shown and "x[i01] [/tmp/a]" in shown


def test_plots_show_every_point_with_title_units_and_legend(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    for draw, n_points in ((lab.plot_prefill, 6), (lab.plot_decode, 6 * 4)):
        ax = draw(session(), Figure().subplots())
        points = sum(
            len(np.asarray(line.get_xdata())) for line in ax.lines if line.get_linestyle() == "None"
        )
        assert points == n_points
        assert "tiny Q4_0 on Test CPU, 4 cores (2 repeats)" in ax.get_title()
        assert "token" in ax.get_xlabel()
        assert ax.get_ylabel().endswith("s)")
        assert ax.get_legend() is not None
    files = kinds.draw(kinds.sections(session() + session(session="other")), tmp_path, "x")
    names = [
        f"x-{one}.{kind}" for one in ("shares", "prefill", "decode") for kind in ("png", "svg")
    ]
    assert [f.name for f in files] == names
    assert all(f.stat().st_size > 5000 for f in files)


def test_outliers_are_marked_at_the_edge_and_counted() -> None:
    from matplotlib.figure import Figure

    run = make_run(10, 100)
    columns = {name: [*getattr(run.steps, name)] for name in ("start_ns", "ready_ns", "end_ns")}
    for name, column in columns.items():  # one token came a second late
        first = 51 if name == "start_ns" else 50
        column[first:] = [ns + 10**9 for ns in column[first:]]
    steps = dataclasses.replace(
        run.steps, **{name: tuple(column) for name, column in columns.items()}
    )
    late = dataclasses.replace(run, steps=steps)
    ax = lab.plot_decode([make_record(late)], Figure().subplots())
    assert "1 point above the axis" in ax.get_legend_handles_labels()[1][0]
