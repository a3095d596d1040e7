"""One table of figures: what `lab.runs`, headings, comparisons and the documentation read."""

from __future__ import annotations

import dataclasses
import math

import pytest

import lab
from lab.core import figures, phases
from lab.core.record import FAILED
from lab.show import columns
from tests.support.records import make_record, make_run
from tests.support.sessions import batch_run

UNITS = {"s", "ms", "tps", "share", "token"}


def test_the_figures_of_a_run_follow_from_its_steps() -> None:
    run = make_run(20, 5, prefill_ms=2, decode_ms=10)  # and 1 ms to choose each token
    values = figures.of_run(run)

    assert values["prefill_s"] == pytest.approx(0.040)
    assert values["prefill_tps"] == pytest.approx(500)
    assert values["ttft_s"] == pytest.approx(0.041)
    assert values["tpot_ms"] == pytest.approx((phases.tpot_ns(run) or 0) / 1e6)
    assert values["decode_tps"] == pytest.approx(1e3 / values["tpot_ms"])
    assert values["step_ms"] == pytest.approx(10)
    assert values["e2e_s"] == pytest.approx(0.041 + 4 * values["tpot_ms"] / 1e3)
    assert values["prefill_share"] == pytest.approx(0.040 / values["e2e_s"])


def test_lab_runs_has_these_figures_and_no_others() -> None:
    run = make_run(20, 5)
    row = lab.runs([make_record(run)]).iloc[0]

    for name, value in figures.of_run(run).items():
        assert row[name] == value


def test_a_run_without_a_phase_has_no_figure_of_it() -> None:
    one_token = figures.of_run(make_run(20, 1))
    failed = figures.of_run(dataclasses.replace(make_run(20, 5), status=FAILED))

    assert math.isnan(one_token["tpot_ms"])
    assert math.isnan(one_token["decode_tps"])
    assert one_token["ttft_s"] > 0
    assert all(math.isnan(value) for value in failed.values())


def test_an_experiment_has_its_own_figures_in_place_of_phases() -> None:
    values = figures.of_run(batch_run(4))

    assert values["tpot_ms"] > 0  # the room says what it is
    assert values["e2e_s"] > 0
    assert math.isnan(values["ttft_s"])


def test_a_rate_names_its_time_and_what_is_compared_is_a_time() -> None:
    by_name = {figure.name: figure for figure in figures.FIGURES}
    for figure in figures.FIGURES:
        assert figures.unit(figure.name) in UNITS
        assert bool(figure.rate_of) == figure.name.endswith("_tps")
        if figure.rate_of:
            assert by_name[figure.rate_of].of_run
            assert not figure.label
        if figure.label:  # of what is compared less is better
            assert figures.unit(figure.name) in ("s", "ms")


def test_headings_and_names_stand_for_one_figure() -> None:
    all_figures = [*figures.FIGURES, figures.ENERGY, *figures.REQUEST_FIGURES]
    names = figures.names(all_figures)
    headings = [figure.heading for figure in all_figures if figure.heading]

    assert len(set(names)) == len(names)
    assert len(set(headings)) == len(headings)


def test_the_documentation_says_what_each_figure_of_a_run_is() -> None:
    for figure in (*figures.FIGURES, figures.ENERGY):
        assert columns.OF_RUNS[figure.name] == figure.meaning
        assert figure.meaning
