"""What the experiments are predicted to gain: exact on made-up ceilings, both where they pay and where they do not."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import main
from lab.core.record import Ceilings, Record
from lab.features.explain import advice
from lab.roofline import explanation, step_kernels
from lab.process.wire import ATTENTION, MUL_MAT
from tests.conftest import MACHINE, run_lab
from tests.test_explain import BIG, FAST, WIDE, rate, timed


def products(times: dict[int, float]) -> Ceilings:
    """Products read at 20 GB/s with one column, and take so many times as long with n; attention costs nothing."""
    of_products = [rate(MUL_MAT, "Q8_0", n, 20 / longer, 1e9) for n, longer in times.items()]
    return Ceilings(
        FAST.measured_at,
        MACHINE,
        False,
        (*of_products, *(rate(ATTENTION, "F16", n, 34e6, 1e12) for n in (1, 512))),
    )


SHARED = products({1: 1, 512: 1})
PROPORTIONAL = products({1: 1, 512: 512})
BETWEEN = products({1: 1, 2: 1.5, 512: 384})


def tried(best: Ceilings, record: Record | None = None) -> dict[str, Any]:
    """The experiments' figures, words and commands by name; the record is of another machine: kernels decide."""
    given = record or timed(1.1)[0]
    records = [dataclasses.replace(given, machine=dataclasses.replace(MACHINE, cpu="Other CPU"))]
    rows = explanation.explain([given], best)
    found = advice.experiments(rows, records, best)
    return {
        one.figures["experiment"]: SimpleNamespace(**one.figures, words=one.change) for one in found
    }


def test_where_a_step_of_many_takes_as_long_as_of_one_all_experiments_pay() -> None:
    levers = tried(SHARED)
    batch = levers["batch"]
    cache = levers["turns"]
    guessing = levers["speculate"]
    assert batch.n_seq == 16 and (batch.total_gain, batch.user_share) == pytest.approx(
        (16, 1), rel=1e-6
    )
    (row,) = [
        row
        for row in explanation.explain(timed(1.1), SHARED).itertuples()
        if row.phase == "prefill"
    ]
    first, rest = (
        step_kernels.total(BIG, WIDE, SHARED, *step) for step in ((15, 0, 0), (5, 15, 1))
    )
    assert first and rest
    saved_s = row.measured_s * first.total_s / (first.total_s + rest.total_s)
    assert (cache.n_cached, cache.n_new, cache.ttft_s) == (15, 5, row.measured_s)
    assert (cache.saved_s, cache.gain) == pytest.approx(
        (saved_s, row.measured_s / (row.measured_s - saved_s))
    )
    assert guessing.least_acceptance == pytest.approx(0, abs=1e-6)
    assert (guessing.n_draft, guessing.gain) == (
        3,
        pytest.approx((1 - 0.8**4) / (1 - 0.8), rel=1e-6),
    )  # of 5 tokens
    sizes = "--prompt-len 20 --gen 5"
    assert batch.command.startswith(f"lab batch --sequences 1,16 {sizes} ")
    assert cache.command.startswith("lab turns --system 8 --turn 5+2 --turns 2 ")
    assert guessing.command.startswith("lab speculate --draft lookup --draft-len ")
    assert f"3 {sizes} " in guessing.command


def test_where_each_token_takes_as_long_as_the_first_neither_batching_nor_guessing_pays() -> None:
    assert tried(PROPORTIONAL).keys() == {
        "turns"
    }  # and no sentence on guesses of which all would have to be right


def test_between_them_two_sequences_pay_and_guesses_of_which_half_are_right() -> None:
    levers = tried(BETWEEN)
    batch = levers["batch"]
    guessing = levers["speculate"]
    assert (batch.n_seq, batch.total_gain) == (2, pytest.approx(2 / 1.5))  # 4 give no more in all
    assert batch.user_share == pytest.approx(1 / 1.5)
    assert guessing.n_draft == 1
    assert (guessing.least_acceptance, guessing.gain) == pytest.approx((0.5, 1.8 / 1.5))
    sentences = {
        name: advice.sentence(advice.Advice(lever.words, lever.command, {}))
        for name, lever in levers.items()
    }
    assert sentences["batch"].startswith(
        "Predicted for 2 sequences decoded together: 1.33x the tokens/s in total, 0.667x per user, after prompts of 20 "
        "tokens. Try: lab batch --sequences 1,2 --prompt-len 20 --gen 5 "
    )
    assert re.match(
        r"Predicted for 15 of 20 prompt tokens cached from an earlier turn \(all but 5\): the "
        r"first token comes \d\.\d\dx as fast \(saves .* of .*\)\. Try: lab tur",
        sentences["turns"],
    )
    assert sentences["speculate"].startswith(
        "Predicted for speculative decoding that guesses 1 token at a time: faster if more than 50 % of the guesses "
        "are right; at 80 %, "
        "1.20x as fast (without the time to draft). Try: lab speculate --draft lookup --draft-len 1 "
    )


def test_commands_of_levers_are_commands_of_the_lab(tmp_path: Path) -> None:
    sample = "results/sample-smollm2-135m-amd-epyc.jsonl"
    code, out, err = run_lab("explain", sample, "--ceilings", tmp_path, "--no-plot", "--json")
    assert code == 0, err
    (document,) = json.loads(out)
    by_name = {lever["experiment"]: lever for lever in document["experiments"]}
    assert list(by_name) == ["batch", "turns"]
    assert (
        by_name["turns"]["n_cached"] == 1000 - 64
    )  # 10,000 are more than the model was trained for
    for name in by_name.keys() & main.lab.commands.keys():
        lab_, command, *words = shlex.split(by_name[name]["command"])
        assert (lab_, command) == ("lab", name)
        main.lab.commands[name].make_context(name, words)
    out = run_lab("explain", sample, "--ceilings", tmp_path, "--no-plot", "--details")[1]
    for lever in by_name.values():
        assert f"Try: {lever['command']}\n" in out


def test_the_answer_is_first_and_one_command_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = (
        "explain",
        "results/sample-smollm2-135m-amd-epyc.jsonl",
        "--ceilings",
        tmp_path,
        "--no-plot",
    )
    shown, details = (run_lab(*asked, *more)[1] for more in ((), ("--details",)))
    assert shown.strip().startswith(
        "In 4 of 6 rows the largest part of the time goes to multiplying Q4_1 weights:"
        " llama.cpp's kernel (routine) for Q4_1 is slower than"
    )
    assert "without choosing the next token" in shown and "ceiling" in shown
    _, below = shown.split("Columns left out")
    sentences = [line for line in below.splitlines()[1:] if line]
    assert (
        len(sentences) == 5
        and "as fast. Try: lab ab " in sentences[-2]
        and "more lines" in sentences[-1]
    )
    assert (
        shown.count("Try: lab") == 2 and details.count("Try: lab") == 4 and "(the ridge)" in details
    )
