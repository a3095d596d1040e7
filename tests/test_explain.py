"""What limits runs, in words and figures: exact on made-up ceilings. Other tests use its model and
ceilings.
"""

import dataclasses
from pathlib import Path

import pytest

from lab.core import results
from lab.core.record import Ceilings
from lab.features.explain import advice, section, sentences
from lab.roofline import explanation, probes, probing
from lab.show import table
from tests.support.command import run_lab
from tests.support.rates import BIG, FAST, WIDE, timed
from tests.support.records import MACHINE, exact_steps, make_record, make_run
from tests.support.tables import headings, lines_of

SAMPLE = Path(__file__).parents[1] / "results" / "sample-smollm2-135m-amd-epyc.jsonl"


def slower(ceilings: Ceilings, factor: int) -> Ceilings:
    """Ceilings whose passes all took so many times as long."""
    rates = []
    for probed in ceilings.rates:
        rates.append(dataclasses.replace(probed, times_ns=(factor * min(probed.times_ns),)))
    return dataclasses.replace(ceilings, rates=tuple(rates))


def test_the_ceilings_of_a_results_file_are_its_own() -> None:
    contents = results.read([SAMPLE])
    rows = explanation.explain(SAMPLE)
    given = explanation.explain(contents, contents.ceilings[-1])
    assert rows.least_s.tolist() == given.least_s.tolist()
    assert explanation.explain(contents).least_s.tolist() == given.least_s.tolist()


@pytest.mark.parametrize(
    ("factor", "limit"), [(1.1, explanation.KERNEL), (3, explanation.OVERHEAD)]
)
def test_the_limit_is_what_is_nearest(factor: float, limit: str) -> None:
    rows = explanation.explain(timed(factor), FAST)
    decode = rows[rows.phase == "decode"].iloc[0]
    assert (
        decode.limit == limit
    )  # Q8_0 reads at 20 where 40 are possible: its kernel is the limit
    assert decode.of_ceiling == pytest.approx(1 / factor, rel=0.01)


def test_memory_traffic_and_arithmetic_are_limits_too() -> None:
    kernels = [probed for probed in FAST.rates if probed.op != probes.READ]
    rows = explanation.explain(timed(1.0), dataclasses.replace(FAST, rates=tuple(kernels)))
    assert rows[rows.phase == "decode"].limit.tolist() == [explanation.TRAFFIC]
    steps = exact_steps(4096, 2, 512, prefill_ms=8)
    long = make_record(
        make_run(4096, 2, steps=steps),
        model=BIG,
        settings=WIDE,
    )
    rows = explanation.explain([long], FAST)
    prefill = rows[rows.phase == "prefill"].iloc[0]
    assert prefill.limit == explanation.ARITHMETIC
    assert prefill.arithmetic_s > prefill.traffic_s


def test_ceilings_that_are_too_low_are_told_and_promise_nothing_absurd() -> None:
    low = slower(FAST, 100)
    records = timed(1.1)
    rows = explanation.explain(records, low)
    verdicts = sentences.verdicts(rows, WIDE)
    too_low = "the ceiling was measured too low; measure again: lab ceilings --again"
    assert too_low in verdicts[-1]
    assert "%" not in " ".join(verdicts)
    shown = section.explained("", records, low)
    names = [heading.split()[0] for heading in headings(shown)]
    shares = names.index("weights/attention/")
    assert {line[shares] for line in lines_of(shown)} == {"-"}
    for change in advice.changes(rows, records[0], low):
        assert 0 < change.figures["decode_gain"] < 100
    right = sentences.verdicts(explanation.explain(records, FAST), WIDE)
    assert "too low" not in " ".join(right)


def test_the_command_of_a_change_measures_what_it_promised() -> None:
    rows = explanation.explain(timed(1.1), FAST)
    quick = [
        dataclasses.replace(
            probed,
            n_threads=1,
            times_ns=(1,),
        )
        for probed in FAST.rates
    ]
    ceilings = dataclasses.replace(FAST, rates=(*FAST.rates, *quick))
    narrow = dataclasses.replace(WIDE, n_ubatch=64)
    record = dataclasses.replace(timed(1.1)[0], settings=narrow)
    first, *_ = advice.changes(rows, record, ceilings)
    assert first.command is not None
    assert first.command.startswith(
        "lab ab '--threads 2' '--threads 1' --prompt-len 20 --gen 5 "
    )
    assert "--threads-batch" not in first.command
    assert first.command.endswith("--ubatch 64")


def test_many_lengths_are_named_by_the_first_and_the_last() -> None:
    records = []
    for n_prompt in (10, 20, 30, 40, 50, 60):
        records.append(
            make_record(
                make_run(n_prompt, 5, decode_ms=90),
                model=BIG,
                settings=WIDE,
            )
        )
    rows = explanation.explain(records, FAST)
    few = " ".join(sentences.verdicts(rows[rows.n_prompt < 60], WIDE))
    many = " ".join(sentences.verdicts(rows, WIDE))
    assert "10, 20, 30, 40 and 50 tokens (" in few
    assert "10 to 60 tokens (" in many


def test_broken_lines_of_ceilings_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    path = probing.save(FAST, tmp_path)
    with path.open("a") as file:
        file.write('{"schema": 3, "rates": 5}\n')
    notes: list[str] = []
    assert len(probing.kept(tmp_path, notes.append)) == 1
    assert len(notes) == 1
    assert path.name in notes[0]
    with pytest.warns(UserWarning, match=path.name):
        probing.kept(tmp_path)
    runs = tmp_path / "runs.jsonl"
    results.save(runs, timed(1.1)[0])
    code, _, err = run_lab("explain", runs, "--ceilings", tmp_path, "--no-plot")
    assert code == 0
    assert f"Note: {path.name} line 2" in err


def test_setups_that_differ_in_cpu_instructions_have_titles_to_read() -> None:
    records = []
    for flags in ("CPU : SSE3 = 1 | AVX = 1 | AVX512 = 1 | ", "CPU : SSE3 = 1 | AVX = 1 | "):
        machine = dataclasses.replace(MACHINE, system_info=flags)
        records.append(dataclasses.replace(timed(1.1)[0], machine=machine))
    labels = [label for label, _ in table.setups(table.runs(records))]
    assert [label.rpartition(", ")[2] for label in labels] == [
        "3 CPU instruction sets",
        "2 CPU instruction sets",
    ]
    assert "system_info" not in " ".join(labels)


def test_a_disturbed_session_of_other_threads_marks_no_row(tmp_path: Path) -> None:
    rates = [dataclasses.replace(probed, n_threads=1) for probed in FAST.rates]
    noise = "other processes used 1.5 cores"
    for ceilings in (
        FAST,
        dataclasses.replace(
            FAST,
            rates=tuple(rates),
            disturbed=noise,
        ),
    ):
        probing.save(ceilings, tmp_path)
    runs = tmp_path / "runs.jsonl"
    results.save(runs, timed(1.1)[0])
    code, out, _ = run_lab("explain", runs, "--ceilings", tmp_path, "--no-plot", "--details")
    assert code == 0
    assert "!!" not in out
    assert noise not in out
    assert "and decode after 20 tokens (" in out
