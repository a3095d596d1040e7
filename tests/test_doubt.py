"""Doubt travels: what is disturbed, cut off or too fast is marked wherever it appears."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.app import output
from lab.core import results, shown
from lab.core.record import Record
from lab.features.explain import advice, sentences as explained
from lab.features.report import page
from lab.process.wire import ATTENTION, MUL_MAT, PLAIN_ATTENTION
from lab.roofline import explanation, probing, step_kernels
from lab.roofline.probes import READ
from lab.roofline.probing import Where
from lab.show import comparison, table, text_comparison, text_doubts, text_findings
from lab.show.text_ceilings import doubt_sentences
from tests.bench import doubt
from tests.conftest import MACHINE, exact_steps, make_record, make_run
from tests.test_explain import BIG, FAST, WIDE, rate, timed

COMMAND = ("measure", "--prompt-len", "20,40")


def repeats(n_disturbed: int, n: int = 6, **changes: Any) -> list[Record]:
    """Quiet and disturbed runs of two lengths; only the longer ones are disturbed."""
    records = []
    for repeat in range(n):
        short = make_run(20, 5, repeat, **changes)
        long = make_run(40, 5, repeat, prefill_ms=2, decode_ms=20, **changes)
        records.append(make_record(short, command=COMMAND))
        record = make_record(long, command=COMMAND)
        records.append(doubt.neighbour(record) if repeat < n_disturbed else record)
    return records


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
    assert shown.of_runs(n, n_disturbed, 6) == doubts and shown.mark(doubts) == mark


@pytest.mark.parametrize(
    ("n_disturbed", "mark", "is_firm"), [(0, "6", True), (1, "6!", True), (3, "6!!", False)]
)
def test_nothing_is_concluded_from_disturbed_rows(
    n_disturbed: int, mark: str, is_firm: bool
) -> None:
    records = repeats(n_disturbed)
    rows = table.summary(table.runs(records))
    assert rows.repeats.astype(str).str.cat(map(shown.mark, rows.doubts)).tolist() == ["6", mark]
    sentences = " ".join(text_findings.findings(rows))
    assert ("Prefill of 40 tokens took" in sentences) == is_firm
    assert ("No findings from the runs of 40 prompt tokens" in sentences) != is_firm
    answer = text_findings.answer(rows)
    assert answer.startswith(f"A request of {40 if is_firm else 20} tokens with 5 back takes ")
    assert ("(some of its runs were disturbed)" in answer) == (mark == "6!")
    assert (
        any("Measure again" in sentence for sentence in text_doubts.warnings(records)) != is_firm
    )
    lead = page.html(records, []).partition("<main>")[0]
    assert ("Measure again while no other program runs." in lead) != is_firm
    (line,) = output.next_steps(records, Path("kept"), "lab explain")
    assert line.startswith(
        "next     what limited" if is_firm else "next     measure again: lab measure --prompt-len"
    )
    assert line.endswith("lab explain" if is_firm else " --out kept")


@pytest.mark.parametrize(
    ("slowest_ms", "n_disturbed", "is_told"), [(24, 0, False), (26, 0, True), (26, 1, False)]
)
def test_quiet_runs_that_lie_far_apart_are_pointed_out(
    slowest_ms: float, n_disturbed: int, is_told: bool
) -> None:
    slow = make_record(make_run(40, 5, 6, prefill_ms=2, decode_ms=slowest_ms))
    sentences = text_findings.far_apart(table.summary(table.runs([*repeats(n_disturbed), slow])))
    expected = (
        "With 40 prompt tokens the largest TPOT is 1.29x the smallest, "
        "and the lab recorded no disturbance."
    )
    assert any(sentence.startswith(expected) for sentence in sentences) == is_told


def test_rates_are_those_of_the_median_times() -> None:
    row = table.summary(
        table.runs([make_record(make_run(20, 5, i, decode_ms=ms)) for i, ms in enumerate((5, 20))])
    )
    assert row.decode_tps.item() == pytest.approx(1e3 / row.tpot_ms.item())
    assert row.decode_tps_max.item() == pytest.approx(1e3 / row.tpot_ms_min.item())


def test_a_host_that_takes_the_cores_is_named_not_other_programs() -> None:
    record = list(
        results.read(
            [str(Path(__file__).parents[1] / "results/sample-smollm2-135m-intel-xeon.jsonl")]
        ).records
    )
    (sentence,) = text_doubts.distrust(record)
    assert "the host of Intel(R) Xeon(R) Processor @ 2.80GHz, 2 cores gave its cores" in sentence
    assert "there, at another time." in sentence and "program" not in sentence


@pytest.mark.parametrize("is_paired", [False, True])
def test_a_comparison_claims_nothing_of_disturbed_rows_and_its_other_rows_stay(
    is_paired: bool,
) -> None:
    def side(name: str, n_disturbed: int, factor: float) -> list[Record]:
        changed = []
        for record in repeats(n_disturbed, 8, variant=name):
            n = record.run.n_prompt
            steps = exact_steps(n, 5, 8, prefill_ms=factor, decode_ms=10 * factor)
            block = record.run.repeat if is_paired else None
            run = dataclasses.replace(record.run, steps=steps, block=block)
            changed.append(dataclasses.replace(record, session="s" if is_paired else name, run=run))
        return changed

    (compared,) = comparison.compare([*side("a", 5, 1), *side("b", 0, 3)])
    by_length = {n: {row.verdict for row in compared.rows if row.n_prompt == n} for n in (20, 40)}
    assert by_length == {20: {comparison.SLOWER}, 40: {comparison.DISTURBED}}
    assert all(shown.DISTURBED in row.doubts for row in compared.rows if row.n_prompt == 40)
    assert ". The other 2 are unclear." in text_comparison.answers([compared])[0]


def test_flags_that_differ_are_named_and_no_others() -> None:
    flags = [
        "CPU : SSE3 = 1 | AVX = 1 | AVX512 = 1 | OPENMP = 1 | ",
        "CPU : SSE3 = 1 | AVX = 1 | OPENMP = 0 | ",
    ]
    records = [
        make_record(
            make_run(20, 5, i), session=text, machine=dataclasses.replace(MACHINE, system_info=text)
        )
        for text in flags
        for i in range(2)
    ]
    differ = text_comparison.differences(comparison.groups(records))
    assert differ["CPU instructions of one side only"] == ["AVX512, OPENMP", "OPENMP = 0"]


def test_disturbed_runs_are_not_explained_and_promise_nothing() -> None:
    quiet = timed(1.1)
    fewer = [dataclasses.replace(rate, n_threads=1, times_ns=(1,)) for rate in FAST.rates]
    best = dataclasses.replace(FAST, rates=(*FAST.rates, *fewer))
    for records, is_firm in ((quiet, True), (list(map(doubt.neighbour, quiet)), False)):
        rows = explanation.explain(records, best)
        assert all((shown.DISTURBED in doubts) != is_firm for doubts in rows.doubts)
        assert bool(advice.changes(rows, records[0], best)) == is_firm
        assert is_firm or not advice.experiments(rows, records, best)
        sentences = " ".join(explained.verdicts(rows, WIDE))
        assert (" limits " in sentences) == is_firm and ("No verdict" in sentences) != is_firm


def test_ceilings_of_a_loaded_machine_explain_nothing_until_they_are_measured_again() -> None:
    load = "another process used 1.9 cores"
    loaded = dataclasses.replace(FAST, disturbed=load)
    rows = explanation.explain(timed(1.1), loaded)
    assert " limits " not in " ".join(explained.verdicts(rows, WIDE)) and not advice.changes(
        rows, timed(1.1)[0], loaded
    )
    sentence = doubt_sentences(loaded)[0]
    assert load in sentence
    assert "lab ceilings --again" in sentence
    again = dataclasses.replace(FAST, measured_at="2027-01-01T00:00:00Z")
    for measured, disturbed in (([loaded], load), ([loaded, again], None), ([again, loaded], None)):
        ceilings = probing.known(measured, Where(MACHINE))
        assert ceilings
        assert ceilings.disturbed == disturbed


def test_attention_is_a_limit_of_its_own_and_flash_attention_its_lever() -> None:
    slow = [
        dataclasses.replace(rate(ATTENTION, "F16", n, 20, 0.01), n_positions=4096) for n in (1, 512)
    ]
    plain = [
        dataclasses.replace(rate, op=PLAIN_ATTENTION, times_ns=(rate.times_ns[0] // 4,))
        for rate in slow
    ]
    products = [rate for rate in FAST.rates if rate.op in (MUL_MAT, READ)]
    best = dataclasses.replace(FAST, rates=(*products, *slow, *plain))
    kernels = step_kernels.total(BIG, WIDE, best, 1, 22, 1)
    assert kernels and kernels.attention_s > 0.7 * kernels.total_s
    record = make_record(
        make_run(20, 5, decode_ms=1.1e3 * kernels.total_s, prefill_ms=50), model=BIG, settings=WIDE
    )
    rows = explanation.explain([record], best)
    assert rows.limit.iloc[-1] == explanation.ATTENTION
    assert "Attention (--flash-attn on" in " ".join(explained.verdicts(rows, WIDE))
    (lever, *_) = advice.changes(rows, record, best)
    assert (
        lever.figures["change"] == "flash attention off instead of on"
        and lever.figures["decode_gain"] > 1.5
    )
    assert lever.command and "'--flash-attn on' '--flash-attn off'" in lever.command
    off = dataclasses.replace(WIDE, flash_attn_resolved="off")
    changed = step_kernels.total(BIG, off, best, 1, 22, 1)
    assert changed and changed.attention_s == pytest.approx(
        kernels.attention_s / 2
    )  # the best pass counts


def test_the_limit_is_the_largest_part_of_the_kernels() -> None:
    """Of 62.6 s, attention has 43 % and the weights 33 %: attention is the limit."""
    for share, limit in ((0.43, explanation.ATTENTION), (0.33, explanation.KERNEL)):
        parts = {explanation.ATTENTION: share * 62.6}
        row = SimpleNamespace(
            measured_s=62.6, least_s=0.77 * 62.6, parts=parts, arithmetic_s=10, traffic_s=0.1
        )
        assert explanation.limit_of(row) == limit


def test_shares_of_explanations_pictures_and_tables_are_the_same() -> None:
    records = [
        make_record(make_run(20, 5, i, decode_ms=10 * 9**i), model=BIG, settings=WIDE)
        for i in range(3)
    ]
    (share,) = table.summary(table.runs(records)).prefill_share
    rows = explanation.explain(records, FAST)
    assert rows.of_request.tolist() == pytest.approx([share, 1 - share])
