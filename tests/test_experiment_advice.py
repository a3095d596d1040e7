"""The experiments that `lab explain` advises: where they pay and where they do not, in words and
commands.
"""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from lab import main
from lab.core.record import Ceilings
from lab.features.explain import advice
from lab.features.explain.advice import Advice
from lab.process.wire import ATTENTION, MUL_MAT
from lab.roofline import explanation
from lab.roofline.step_kernels import StepKernels
from tests.support.command import run_lab
from tests.support.rates import BIG, FAST, WIDE, rate, timed
from tests.support.records import MACHINE

SAMPLE = "results/sample-smollm2-135m-amd-epyc.jsonl"
SIZES = "--prompt-len 20 --gen 5"


def products(times: dict[int, float]) -> Ceilings:
    """Products that read at 20 GB/s with one column, and take so many times as long with n.

    Attention costs nothing.
    """
    rates = [
        rate(ATTENTION, "F16", 1, 34e6, 1e12),
        rate(ATTENTION, "F16", 512, 34e6, 1e12),
    ]
    for n, times_as_long in times.items():
        rates.append(rate(MUL_MAT, "Q8_0", n, 20 / times_as_long, 1e9))
    return Ceilings(
        FAST.measured_at,
        MACHINE,
        on_gpu=False,
        rates=tuple(rates),
    )


SHARED = products({1: 1, 512: 1})
PROPORTIONAL = products({1: 1, 512: 512})
BETWEEN = products({1: 1, 2: 1.5, 512: 384})


def experiments(ceilings: Ceilings) -> dict[str, Advice]:
    """The advice by name of the experiment, for a run of another machine: kernels decide."""
    record = timed(1.1)[0]
    elsewhere = dataclasses.replace(MACHINE, cpu="Other CPU")
    rows = explanation.explain([record], ceilings)
    records = [dataclasses.replace(record, machine=elsewhere)]
    return {
        str(experiment.figures["experiment"]): experiment
        for experiment in advice.experiments(rows, records, ceilings)
    }


def test_where_a_step_of_many_takes_as_long_as_a_step_of_one_all_experiments_pay() -> None:
    advised = experiments(SHARED)
    batch = advised["batch"].figures
    assert batch["n_seq"] == 16
    assert (batch["total_gain"], batch["user_share"]) == pytest.approx((16, 1), rel=1e-6)
    turns = advised["turns"].figures
    first_s = StepKernels(BIG, WIDE, SHARED).total(15, 0, 0).total_s
    second_s = StepKernels(BIG, WIDE, SHARED).total(5, 15, 1).total_s
    assert turns["n_cached"] == 15
    assert turns["n_new"] == 5
    assert turns["saved_s"] == pytest.approx(turns["ttft_s"] * first_s / (first_s + second_s))
    speculate = advised["speculate"].figures
    assert speculate["n_draft"] == 3  # of 5 tokens
    assert speculate["least_acceptance"] == pytest.approx(0, abs=1e-6)
    assert speculate["gain"] == pytest.approx((1 - 0.8**4) / (1 - 0.8), rel=1e-6)


def test_commands_measure_the_sizes_that_were_predicted() -> None:
    commands = {
        name: experiment.command or "" for name, experiment in experiments(SHARED).items()
    }
    assert commands["batch"].startswith(f"lab batch --sequences 1,16 {SIZES} ")
    assert commands["turns"].startswith("lab turns --system 8 --turn 5+2 --turns 2 ")
    assert commands["speculate"].startswith(
        f"lab speculate --draft lookup --draft-len 3 {SIZES} "
    )


def test_where_each_token_takes_as_long_as_the_first_neither_batching_nor_drafting_pays() -> (
    None
):
    assert experiments(PROPORTIONAL).keys() == {"turns"}


def test_between_them_two_sequences_pay_and_guesses_with_one_half_right() -> None:
    advised = experiments(BETWEEN)
    batch = advised["batch"].figures
    assert batch["n_seq"] == 2  # 4 give no more in all
    assert (batch["total_gain"], batch["user_share"]) == pytest.approx((2 / 1.5, 1 / 1.5))
    speculate = advised["speculate"].figures
    assert speculate["n_draft"] == 1
    assert speculate["least_acceptance"] == pytest.approx(0.5)
    assert speculate["gain"] == pytest.approx(1.8 / 1.5)


def test_the_sentences_say_the_gain_and_the_command() -> None:
    sentences = {
        name: advice.sentence(experiment) for name, experiment in experiments(BETWEEN).items()
    }
    assert sentences["batch"].startswith(
        "Predicted for 2 sequences decoded together: 1.33x the tokens/s in total, 0.667x per user, "
        f"after prompts of 20 tokens. Try: lab batch --sequences 1,2 {SIZES} "
    )
    turns = sentences["turns"]
    assert turns.startswith(
        "Predicted for 15 of 20 prompt tokens cached from an earlier turn (all but 5): the first "
        "token comes "
    )
    assert "x as fast (saves " in turns
    assert "). Try: lab turns " in turns
    assert sentences["speculate"].startswith(
        "Predicted for speculative decoding that guesses 1 token at a time: faster if each is "
        "right with a chance above 50 %; at 80 %, 1.20x as fast (without the time to draft). Try: "
        "lab speculate --draft lookup --draft-len 1 "
    )


def test_advice_on_a_sample_is_commands_of_the_lab(tmp_path: Path) -> None:
    asked = ("explain", SAMPLE, "--ceilings", tmp_path, "--no-plot")
    code, out, err = run_lab(*asked, "--json")
    assert code == 0, err
    (document,) = json.loads(out)
    by_name = {experiment["experiment"]: experiment for experiment in document["experiments"]}
    assert list(by_name) == ["batch", "turns"]
    # 10,000 tokens are more than the model was trained for
    assert by_name["turns"]["n_cached"] == 1000 - 64
    details = run_lab(*asked, "--details")[1]
    for name, experiment in by_name.items():
        program, command, *arguments = shlex.split(experiment["command"])
        assert program == "lab"
        assert command == name
        main.lab.commands[name].make_context(name, arguments)
        assert f"Try: {experiment['command']}\n" in details


def test_the_answer_is_first_and_one_command_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("explain", SAMPLE, "--ceilings", tmp_path, "--no-plot")
    shown = run_lab(*asked)[1]
    assert shown.strip().startswith(
        "In 4 of 6 rows the largest part of the time goes to multiplying Q4_1 weights:"
        " llama.cpp's kernel (routine) for Q4_1 is slower than"
    )
    lines = shown.splitlines()
    assert "as fast. Try: lab ab " in shown
    assert lines[-1].startswith("More (")
    assert len(lines) <= 14
    details = run_lab(*asked, "--details")[1]
    assert details.count("Try: lab") == 4
    assert "(the ridge)" in details
    assert "without choosing the next token" in details
