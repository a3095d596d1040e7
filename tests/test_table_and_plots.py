"""Tables, sentences and plots from records whose figures are known exactly."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import lab
from lab.app import kinds
from lab.core.record import Device, Record
from lab.show import console, summaries, table, text_findings
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run, session

GPU = Device("GPU0", "a GPU", "gpu")
SECOND_GPU = Device("GPU1", "a GPU", "gpu")
DIFFERENT_GPU = Device("GPU1", "another", "gpu")


def labels_of(records: list[Record]) -> list[str]:
    return [label for label, _ in table.setups(table.runs(records))]


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
    records = []
    for repeat, prefill_ms in enumerate((1, 2, 9)):
        records.append(make_record(make_run(20, 5, repeat, prefill_ms=prefill_ms)))
    records.append(make_record(make_run(20, 5, warmup=True, prefill_ms=50)))
    records.append(make_record(make_run(20, 5, status="failed")))

    (row,) = summaries.summary(table.runs(records)).to_dict("records")

    assert row["repeats"] == 3
    assert row["prefill_s"] == pytest.approx(0.04)
    assert row["prefill_s_min"] == pytest.approx(0.02)
    assert row["prefill_s_max"] == pytest.approx(0.18)


def test_labels_have_the_fewest_fields_in_which_setups_differ() -> None:
    four_threads = dataclasses.replace(SETTINGS, n_threads=4, n_threads_batch=4)
    different_model = dataclasses.replace(MODEL, name="other", sha256="ab")
    sweep = make_record(make_run(100, 3, every=50))

    single = labels_of(session())
    by_threads = labels_of([*session(), *session(settings=four_threads)])
    by_model = labels_of([*session(), *session(model=different_model, settings=four_threads)])
    with_sweep = labels_of([*session(), sweep])

    assert single == ["tiny Q4_0, Test CPU, 4 cores"]
    assert by_threads[0] == "tiny Q4_0, n_threads 2"
    assert by_model[0] == "tiny Q4_0"
    assert with_sweep == ["tiny Q4_0", "tiny Q4_0, sweep_every 50"]


def test_sentences_say_what_the_table_shows() -> None:
    records = session()
    rows = summaries.summary(table.runs(records))
    prefill, decode = text_findings.findings(rows, records)
    assert "Prefill of 1,000 tokens took 20x as long as for 100 (10x the tokens)" in prefill
    assert "2x per token" in prefill
    assert "because" not in prefill  # the steps of a run take equal times: no law explains it
    assert "11.1 ms per token after 10 prompt tokens and 21.0 ms after 1,000" in decode
    assert (
        "because each token attends to all before it: by median steps 1,000 positions cost 10.0 ms"
        in decode
    )


def test_no_cause_is_told_where_a_short_prompt_is_dearer() -> None:
    results = Path(__file__).parents[1] / "results"
    sample = results / "sample-to-compare-smollm2-135m-amd-epyc.jsonl"
    records = lab.read([sample]).records
    prefill = text_findings.findings(summaries.summary(table.runs(records)), records)[0]
    assert prefill.endswith("43.9x as long as for 10 (51.2x the tokens): 0.858x per token.")


def test_gpus_are_part_of_a_setup() -> None:
    offloaded = dataclasses.replace(SETTINGS, n_gpu_layers=99)
    records = []
    for gpus in (
        [GPU],
        [GPU, SECOND_GPU],
        [GPU, DIFFERENT_GPU],
    ):
        machine = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, *gpus))
        for repeat in range(2):
            run = make_run(20, 5, repeat)
            records.append(make_record(run, machine=machine, settings=offloaded))

    assert labels_of(records) == ["a GPU", "2 x a GPU", "a GPU, another"]


def test_mains_or_battery_is_part_of_a_setup() -> None:
    records = []
    for power in ("mains", "battery", None):
        records.append(make_record(machine=dataclasses.replace(MACHINE, power=power)))

    assert labels_of(records) == [
        "tiny Q4_0, power mains",
        "tiny Q4_0, power battery",
        "tiny Q4_0, power unknown",
    ]


def test_devices_that_nobody_listed_are_unknown_and_equal() -> None:
    without_gpu = make_record()
    unknown = make_record(machine=dataclasses.replace(MACHINE, devices=()))

    assert table.runs([without_gpu]).devices[0] == "none"
    assert table.runs([unknown]).devices[0] is None
    assert len(summaries.summary(table.runs([unknown, unknown]))) == 1


def test_text_from_outside_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    odd = dataclasses.replace(MODEL, name="phi[q4] :fire: [/b]")
    failed = make_run(status="failed", error="x[i01] [/tmp/a]")

    kinds.print_results(
        [make_record(make_run(10, 2), model=odd)],
        console.console(),
    )
    kinds.print_results([make_record(failed)], console.console())

    shown = capsys.readouterr().out
    assert "phi[q4] :fire: [/b]" in shown
    assert "x[i01] [/tmp/a]" in shown


@pytest.mark.parametrize(
    ("plot", "n_points"),
    [(lab.plot_prefill, 6), (lab.plot_decode, 6 * 4)],
    ids=["runs", "tokens"],
)
def test_plots_show_every_point_with_title_units_and_legend(plot: Any, n_points: int) -> None:
    ax = plot(session(), Figure().subplots())

    n_drawn = 0
    for line in ax.lines:
        if line.get_linestyle() == "None":
            n_drawn += len(np.asarray(line.get_xdata()))
    assert n_drawn == n_points
    assert "tiny Q4_0 on Test CPU, 4 cores (2 repeats)" in ax.get_title()
    assert "token" in ax.get_xlabel()
    assert ax.get_ylabel().endswith("s)")
    assert ax.get_legend() is not None


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    sections = kinds.sections(session() + session(session="other"))
    paths = list(kinds.draw(sections, tmp_path, "x"))

    assert [path.name for path in paths] == [
        *("x-shares.png", "x-shares.svg"),
        *("x-prefill.png", "x-prefill.svg"),
        *("x-decode.png", "x-decode.svg"),
    ]
    assert min(path.stat().st_size for path in paths) > 5000


def test_outliers_are_marked_at_the_edge_and_counted() -> None:
    run = make_run(10, 100)
    late_by_ns = 10**9  # from one token on
    start_ns = [*run.steps.start_ns[:51], *(ns + late_by_ns for ns in run.steps.start_ns[51:])]
    ready_ns = [*run.steps.ready_ns[:50], *(ns + late_by_ns for ns in run.steps.ready_ns[50:])]
    end_ns = [*run.steps.end_ns[:50], *(ns + late_by_ns for ns in run.steps.end_ns[50:])]
    steps = dataclasses.replace(
        run.steps, start_ns=tuple(start_ns), ready_ns=tuple(ready_ns), end_ns=tuple(end_ns)
    )
    late = dataclasses.replace(run, steps=steps)

    ax = lab.plot_decode([make_record(late)], Figure().subplots())

    _, labels = ax.get_legend_handles_labels()
    assert "1 point above the axis" in labels[0]


def test_a_mixture_of_experts_says_that_decode_depends_on_the_text() -> None:
    plain = dataclasses.replace(MODEL, n_expert=None)
    mixture = dataclasses.replace(MODEL, n_expert=128, n_expert_used=8)
    assert text_findings.of_experts(plain) == []
    (sentence,) = text_findings.of_experts(mixture)
    assert "each token reads 8 of 128" in sentence
    assert "lab measure --prompt code" in sentence
