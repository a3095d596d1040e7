"""Numbers that a name alone does not hold: ranges, units, and defaults of llama-server."""

import dataclasses
from typing import Any

import msgspec
import pytest

from lab.core import bounds, figures, request_times
from lab.core.byte_sizes import parse_size
from lab.core.figures import FigureKind
from lab.core.request import ServerTimings
from lab.core.sampling import Sampling
from lab.errors import LabError
from tests.support.records import make_run
from tests.support.requests import make_request

MILLION = 1_000_000
BILLION = 1_000_000_000


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (bounds.Whole, -MILLION * BILLION, MILLION * BILLION),
        (bounds.Number, -1e15, 1e15),
        (bounds.Count, 0, 10 * MILLION),
        (bounds.Choice, -1, MILLION),
        (bounds.Context, 0, 16_777_216),
        (bounds.Batch, 1, 1_073_741_824),
        (bounds.Sequences, 1, 10 * MILLION),
        (bounds.Seed, -9_223_372_036_854_775_808, 9_223_372_036_854_775_807),
        (bounds.Layers, 0, 2000),
        (bounds.Parts, 0, 100_000),
        (bounds.Width, 0, BILLION),
        (bounds.Extent, 0, 100 * BILLION),
        (bounds.Size, 0, 10 * MILLION * BILLION),
        (bounds.Amount, 0, 1e16),
        (bounds.Nanoseconds, 0, MILLION * BILLION),
        (bounds.Duration, 1, MILLION * BILLION),
        (bounds.Operations, 0, BILLION * BILLION),
        (bounds.Work, 0, 1e21),
    ],
)
def test_the_ends_of_a_range_are_in_it(kind: Any, low: float, high: float) -> None:
    assert msgspec.convert(low, kind) == low
    assert msgspec.convert(high, kind) == high
    below = low - max(1, abs(low) / 1e6) if isinstance(low, float) else low - 1
    above = high * (1 + 1e-6) if isinstance(high, float) else high + 1
    for beyond in (below, above):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(beyond, kind)


def test_a_text_has_ten_thousand_letters() -> None:
    assert msgspec.convert("x" * 10_000, bounds.Text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert("x" * 10_001, bounds.Text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("3", 3),
        ("3kB", 3_000),
        ("3 MB", 3_000_000),
        ("3gb", 3_000_000_000),
        ("3TB", 3_000_000_000_000),
        ("3KiB", 3_072),
        ("3MiB", 3_145_728),
        ("1.5GiB", 1_610_612_736),
        ("1TiB", 1_099_511_627_776),
        ("0.6", 1),
        ("1.000000001kB", 1000),
    ],
)
def test_a_size_has_a_unit(text: str, n_bytes: int) -> None:
    assert parse_size(text, "--memory") == n_bytes


@pytest.mark.parametrize("text", ["0.4", "0", "1PB", "1e3", "-1", "1.0000000001", "1" * 16])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(LabError, match="--memory"):
        parse_size(text, "--memory")


def test_samplers_have_the_defaults_of_llama_server() -> None:
    chain = Sampling()
    assert (chain.temp, chain.top_k, chain.top_p, chain.min_p) == (0.8, 40, 0.95, 0.05)
    assert [chain.typical, chain.repeat_penalty] == [1, 1]
    assert [chain.presence_penalty, chain.frequency_penalty] == [0, 0]
    assert [chain.dry_multiplier, chain.xtc_probability] == [0, 0]
    assert [chain.repeat_last_n, chain.mirostat, chain.seed] == [64, 0, 1]


def shown(kind: FigureKind) -> float:
    """The number of a table: of a run with 20 ms of prefill, then 4 steps of 10 ms, each with 1 ms
    to choose a token.
    """
    assert kind.of_run is not None
    value = kind.of_run(make_run(20, 5))
    assert value is not None
    return kind.scale * kind.factor * value


def test_figures_have_the_units_of_their_headings() -> None:
    assert shown(figures.PREFILL) == pytest.approx(0.020)
    assert shown(figures.PREFILL_RATE) == pytest.approx(1000)
    assert shown(figures.TTFT) == pytest.approx(0.021)
    assert shown(figures.TPOT) == pytest.approx(11)
    assert shown(figures.DECODE_RATE) == pytest.approx(1000 / 11)
    assert shown(figures.DECODE_COMPUTE) == pytest.approx(10)
    assert shown(figures.E2E) == pytest.approx(0.065)
    assert shown(figures.PREFILL_SHARE) == pytest.approx(100 * 20 / 65)


def test_figures_of_requests_have_units_too() -> None:
    """Text at 100 ns (2 tokens), 130 (1) and 190 (3): 4 tokens in 90 ns after the first event."""
    request = make_request(timings=ServerTimings(prompt_ms=0.5, gen_ms=0.25))
    of_time = figures.of_request(request_times.figures(request), figures.FIGURES)
    assert of_time["ttft_s"] == pytest.approx(100e-9)
    assert of_time["e2e_s"] == pytest.approx(190e-9)
    assert of_time["tpot_ms"] == pytest.approx(22.5e-6)
    # Without the tokens of events the first one has 1 to 4 of the 6
    events = dataclasses.replace(request.events, n_tokens=None)
    request = dataclasses.replace(request, events=events)
    values = figures.of_request(request_times.figures(request), figures.REQUEST_FIGURES)
    assert values == {
        "first_output_s": pytest.approx(100e-9),
        "stall_ms": pytest.approx(60e-6),
        "tpot_low_ms": pytest.approx(18e-6),
        "tpot_high_ms": pytest.approx(45e-6),
        "n_answer": 6,
        "n_cached": 0,
        "server_prompt_s": pytest.approx(0.5e-3),
        "server_decode_s": pytest.approx(0.25e-3),
    }


def test_narrow_terminals_lose_ttft_first_and_the_whole_request_last() -> None:
    ordered = sorted(figures.FIGURES, key=lambda figure: figure.priority)
    assert [figure.priority for figure in ordered] == [-4, -3, -2, -1, 0, 0, 0, 2]
    assert ordered[0] is figures.TTFT
    assert ordered[-1] is figures.E2E


def test_there_is_no_rate_without_a_time() -> None:
    assert figures.per(6, 2) == 3
    assert figures.per(6, 0) is None
    assert figures.per(6, None) is None
