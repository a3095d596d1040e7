"""Doubt travels: what is disturbed, cut off or too fast is marked wherever it appears."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.app import output
from lab.core import results, shown
from lab.core.record import Ceilings, Record
from lab.features.explain import advice, sentences as explained
from lab.features.report import page
from lab.process.wire import ATTENTION, MUL_MAT, PLAIN_ATTENTION
from lab.roofline import explanation, probing
from lab.roofline.probes import READ
from lab.roofline.probing import Where
from lab.roofline.step_kernels import StepKernels
from lab.show import comparison, summaries, table, text_comparison, text_doubts, text_findings
from lab.show.text_ceilings import doubt_sentences
from tests.bench import doubt
from tests.support.rates import BIG, FAST, WIDE, rate, timed
from tests.support.records import MACHINE, exact_steps, make_record, make_run
from tests.support.sessions import repeats

SAMPLE_OF_A_BUSY_HOST = (
    Path(__file__).parents[1] / "results/sample-smollm2-135m-intel-xeon.jsonl"
)
LOAD = "another process used 1.9 cores"
LOADED = dataclasses.replace(FAST, disturbed=LOAD)
MEASURED_AGAIN = dataclasses.replace(FAST, measured_at="2027-01-01T00:00:00Z")


# Runs


@pytest.mark.parametrize(
    ("n", "n_disturbed", "doubts", "mark"),
    [
        (6, 0, (), ""),
        (6, 1, (shown.PARTLY,), "!"),
        (6, 3, (shown.DISTURBED,), "!!"),
        (2, 1, (shown.DISTURBED, shown.FEW), "!!"),
        (5, 0, (shown.FEW,), ""),
    ],
)
def test_half_of_the_runs_decide(
    n: int, n_disturbed: int, doubts: tuple[str, ...], mark: str
) -> None:
    assert shown.of_runs(n, n_disturbed, 6) == doubts
    assert shown.mark(doubts) == mark


@pytest.mark.parametrize(
    ("n_disturbed", "mark", "reliability"),
    [(0, "", ""), (1, "!", " (some of its runs were disturbed)")],
)
def test_few_disturbed_runs_are_marked_and_their_findings_stay(
    n_disturbed: int, mark: str, reliability: str
) -> None:
    records = repeats(n_disturbed)
    rows = summaries.summary(table.runs(records))

    answer = text_findings.answer(rows)
    findings = " ".join(text_findings.findings(rows, records))
    (next_step,) = output.next_steps(records, Path("kept"), "lab explain")

    assert rows.doubts.map(shown.mark).tolist() == ["", mark]
    assert answer.startswith("A request of 40 tokens with 5 back takes ")
    assert answer.endswith(f" tokens/s{reliability}.")
    assert "Prefill of 40 tokens took" in findings
    assert "No findings" not in findings
    assert "Measure again" not in " ".join(text_doubts.warnings(records))
    assert "Measure again" not in page.html(records, [])
    assert next_step.startswith("next     what limited")
    assert next_step.endswith("lab explain")


def test_nothing_is_concluded_from_rows_with_half_of_their_runs_disturbed() -> None:
    records = repeats(n_disturbed=3)
    rows = summaries.summary(table.runs(records))

    answer = text_findings.answer(rows)
    findings = " ".join(text_findings.findings(rows, records))
    (next_step,) = output.next_steps(records, Path("kept"), "lab explain")

    assert rows.doubts.map(shown.mark).tolist() == ["", "!!"]
    assert answer.startswith("A request of 20 tokens with 5 back takes ")
    assert "Prefill of 40 tokens took" not in findings
    assert "No findings from the runs of 40 prompt tokens" in findings
    assert "Measure again" in " ".join(text_doubts.warnings(records))
    lead, _, _ = page.html(records, []).partition("<main>")
    assert "Measure again while no other program runs." in lead
    assert next_step.startswith("next     measure again: lab measure --prompt-len")
    assert next_step.endswith(" --out kept")


@pytest.mark.parametrize(
    ("slowest_ms", "n_disturbed", "is_said"), [(24, 0, False), (26, 0, True), (26, 1, False)]
)
def test_quiet_runs_that_lie_far_apart_are_pointed_out(
    slowest_ms: float, n_disturbed: int, is_said: bool
) -> None:
    slow = make_record(make_run(40, 5, 6, prefill_ms=2, decode_ms=slowest_ms))
    rows = summaries.summary(table.runs([*repeats(n_disturbed), slow]))

    sentences = " ".join(text_findings.far_apart(rows))

    expected = (
        "With 40 prompt tokens the largest TPOT is 1.29x the smallest, "
        "and the lab recorded no disturbance."
    )
    assert (expected in sentences) == is_said


def test_rates_are_those_of_the_median_times() -> None:
    records = [make_record(make_run(20, 5, 0, decode_ms=5))]
    records.append(make_record(make_run(20, 5, 1, decode_ms=20)))

    (row,) = summaries.summary(table.runs(records)).to_dict("records")

    assert row["decode_tps"] == pytest.approx(1e3 / row["tpot_ms"])
    assert row["decode_tps_max"] == pytest.approx(1e3 / row["tpot_ms_min"])


def test_a_host_that_takes_the_cores_is_named_not_other_programs() -> None:
    records = list(results.read([SAMPLE_OF_A_BUSY_HOST]).records)

    (sentence,) = text_doubts.distrust(records)

    assert (
        "the host of Intel(R) Xeon(R) Processor @ 2.80GHz, 2 cores gave its cores" in sentence
    )
    assert "there, at another time." in sentence
    assert "program" not in sentence


# Comparisons


def side(name: str, n_disturbed: int, factor: float, is_paired: bool) -> list[Record]:
    """Eight repeats of two lengths, in blocks of one session if the sides are paired."""
    records = []
    for record in repeats(n_disturbed, 8, variant=name):
        steps = exact_steps(
            record.run.n_prompt, 5, 8, prefill_ms=factor, decode_ms=10 * factor
        )
        block = record.run.repeat if is_paired else None
        run = dataclasses.replace(record.run, steps=steps, block=block)
        session = "trial" if is_paired else name
        records.append(dataclasses.replace(record, session=session, run=run))
    return records


@pytest.mark.parametrize("is_paired", [False, True])
def test_a_comparison_claims_nothing_of_disturbed_rows_and_its_other_rows_stay(
    is_paired: bool,
) -> None:
    disturbed = side("a", 5, 1, is_paired)
    slower = side("b", 0, 3, is_paired)

    (compared,) = comparison.compare([*disturbed, *slower])

    for row in compared.rows:
        if row.n_prompt == 20:
            assert row.verdict == comparison.SLOWER
        else:
            assert row.verdict == comparison.DISTURBED
            assert shown.DISTURBED in row.doubts
    assert ". The other 2 are unclear." in text_comparison.answers([compared])[0]


def test_flags_that_differ_are_named_and_no_others() -> None:
    records = []
    for flags in (
        "CPU : SSE3 = 1 | AVX = 1 | AVX512 = 1 | OPENMP = 1 | ",
        "CPU : SSE3 = 1 | AVX = 1 | OPENMP = 0 | ",
    ):
        machine = dataclasses.replace(MACHINE, system_info=flags)
        for repeat in range(2):
            run = make_run(20, 5, repeat)
            records.append(make_record(run, session=flags, machine=machine))

    differences = text_comparison.differences(comparison.groups(records))

    assert differences["CPU instructions of one side only"] == ["AVX512, OPENMP", "OPENMP = 0"]


# Explanations


def faster_with_one_thread() -> Ceilings:
    """Ceilings that promise a gain with fewer threads."""
    rates = [dataclasses.replace(rate, n_threads=1, times_ns=(1,)) for rate in FAST.rates]
    return dataclasses.replace(FAST, rates=(*FAST.rates, *rates))


def test_quiet_runs_are_explained() -> None:
    records = timed(1.1)
    ceilings = faster_with_one_thread()
    rows = explanation.explain(records, ceilings)
    sentences = " ".join(explained.verdicts(rows, WIDE))
    assert " limits " in sentences
    assert "No verdict" not in sentences
    assert advice.changes(rows, records[0], ceilings)


def test_disturbed_runs_are_not_explained_and_promise_nothing() -> None:
    records = [doubt.neighbour(record) for record in timed(1.1)]
    ceilings = faster_with_one_thread()
    rows = explanation.explain(records, ceilings)
    sentences = " ".join(explained.verdicts(rows, WIDE))
    for doubts in rows.doubts:
        assert shown.DISTURBED in doubts
    assert " limits " not in sentences
    assert "No verdict" in sentences
    assert not advice.changes(rows, records[0], ceilings)
    assert not advice.experiments(rows, records, ceilings)


def test_ceilings_of_a_loaded_machine_explain_nothing() -> None:
    records = timed(1.1)
    rows = explanation.explain(records, LOADED)
    assert " limits " not in " ".join(explained.verdicts(rows, WIDE))
    assert not advice.changes(rows, records[0], LOADED)
    (sentence, *_) = doubt_sentences(LOADED)
    assert LOAD in sentence
    assert "lab ceilings --again" in sentence


@pytest.mark.parametrize(
    ("measured", "disturbed"),
    [([LOADED], LOAD), ([LOADED, MEASURED_AGAIN], None), ([MEASURED_AGAIN, LOADED], None)],
    ids=["loaded only", "quiet later", "quiet earlier"],
)
def test_ceilings_of_a_quiet_machine_are_preferred(
    measured: Sequence[Ceilings], disturbed: str | None
) -> None:
    ceilings = probing.known(measured, Where(MACHINE))
    assert ceilings is not None
    assert ceilings.disturbed == disturbed


def test_attention_is_a_limit_and_flash_attention_changes_it() -> None:
    flash = []
    for n_tokens in (1, 512):
        slow = rate(ATTENTION, "F16", n_tokens, 20, 0.01)
        flash.append(dataclasses.replace(slow, n_positions=4096, columns=BIG.head_dim or 0))
    plain = []
    for slow in flash:
        times_ns = (slow.times_ns[0] // 4,)
        plain.append(dataclasses.replace(slow, op=PLAIN_ATTENTION, times_ns=times_ns))
    products = [rate for rate in FAST.rates if rate.op in (MUL_MAT, READ)]
    ceilings = dataclasses.replace(FAST, rates=(*products, *flash, *plain))
    kernels = StepKernels(BIG, WIDE, ceilings).total(1, 22, 1)
    assert kernels is not None
    run = make_run(20, 5, decode_ms=1.1e3 * kernels.total_s, prefill_ms=50)
    record = make_record(run, model=BIG, settings=WIDE)

    rows = explanation.explain([record], ceilings)
    (change, *_) = advice.changes(rows, record, ceilings)
    without_flash = dataclasses.replace(WIDE, flash_attn_resolved="off")
    changed = StepKernels(BIG, without_flash, ceilings).total(1, 22, 1)
    planned = dataclasses.replace(WIDE, flash_attn="off", flash_attn_resolved=None)
    planned_step = StepKernels(BIG, planned, ceilings).total(1, 22, 1)

    assert kernels.attention_s > 0.7 * kernels.total_s
    verdicts = " ".join(explained.verdicts(rows, WIDE))
    assert rows.limit.iloc[-1] == explanation.OF_ATTENTION[explanation.KERNEL]
    assert "llama.cpp's kernel of attention (--flash-attn on" in verdicts
    assert "At its best it reads the cache at " in verdicts
    assert change.figures["change"] == "flash attention off instead of on"
    assert change.figures["decode_gain"] > 1.5
    assert change.command is not None
    assert "'--flash-attn on' '--flash-attn off'" in change.command
    assert changed is not None
    assert changed.attention_s == pytest.approx(
        kernels.attention_s / 2
    )  # the best pass counts
    assert planned_step == changed


@pytest.mark.parametrize(
    ("share", "limit"),
    [(0.43, explanation.OF_ATTENTION[explanation.KERNEL]), (0.33, explanation.KERNEL)],
)
def test_the_limit_is_the_largest_part_of_the_kernels(share: float, limit: str) -> None:
    row = SimpleNamespace(
        measured_s=62.6,
        least_s=0.77 * 62.6,
        attention_s=share * 62.6,
        attention_arithmetic_s=10,
        attention_traffic_s=0.1,
        arithmetic_s=10,
        traffic_s=0.1,
    )
    assert explanation.limit_of(row) == limit


def test_shares_of_explanations_pictures_and_tables_are_the_same() -> None:
    records = []
    for repeat, decode_ms in enumerate((10, 90, 810)):
        run = make_run(20, 5, repeat, decode_ms=decode_ms)
        records.append(make_record(run, model=BIG, settings=WIDE))

    (share,) = summaries.summary(table.runs(records)).prefill_share
    rows = explanation.explain(records, FAST)

    assert rows.of_request.tolist() == pytest.approx([share, 1 - share])
