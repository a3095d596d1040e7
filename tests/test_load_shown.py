"""What loads showed: arms of planted requests, their figures, text and pictures."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.text import Text

import lab
from lab.core import results
from lab.core.record import FAILED, OK
from lab.core.request import (
    CLOSED,
    POISSON,
    RATE_LIMITED,
    REFUSED,
    TEXT,
    TIMEOUT,
    Asked,
    Endpoint,
    Events,
    Load,
    Request,
    RequestRecord,
    ServerSettings,
    ServerTimings,
    Slo,
    Usage,
)
from lab.errors import LabError
from lab.show import comparison
from lab.features.serve import load_figures
from lab.show import canvas
from lab.show.console import console
from lab.show.section import Section, print_section
from tests.conftest import MACHINE, make_record, run_lab

SLO = Slo(ttft_s=0.5, tpot_s=0.1)
LOAD = Load(
    arrivals=CLOSED,
    concurrency=1,
    round=0,
    warmup_s=1,
    duration_s=4,
    lengths="10 + 5 tokens",
    seed=1,
    slo=SLO,
)


def of(**changes: Any) -> Load:
    """A load as LOAD, with changes."""
    return dataclasses.replace(LOAD, **changes)


def at(rate: float, **changes: Any) -> Load:
    return of(arrivals=POISSON, concurrency=None, rate=rate, **changes)


OPEN = at(2.0)
BUSY = at(10.0)
TWO = of(concurrency=2)
FOUR = of(concurrency=4)


def planted(
    at_s: float,
    load: Load = LOAD,
    ttft_s: float = 0.1,
    gap_s: float = 0.05,
    n: int = 5,
    **changes: Any,
) -> Request:
    """A request with n tokens, an event each: the first after `ttft_s`, the others in steps of `gap_s`."""
    arrive_ns = tuple(round(1e9 * (ttft_s + gap_s * i)) for i in range(n))
    request = Request(
        asked=Asked(n_prompt=10, n_gen=n, load=load),
        started_at=f"2026-01-01T00:{load.round:02}:{at_s:09.6f}Z",
        scheduled_ns=None if load.arrivals == CLOSED else round(1e9 * at_s),
        sent_ns=round(1e9 * at_s),
        ended_ns=arrive_ns[-1],
        status=OK,
        events=Events(arrive_ns, (9,) * n, (TEXT,) * n, (1,) * n),
        usage=Usage(prompt_tokens=10, completion_tokens=n, cached_tokens=0),
    )
    return dataclasses.replace(request, **changes)


UNCOUNTED = dataclasses.replace(planted(2).events, n_tokens=None)


def failed(
    at_s: float, load: Load = LOAD, failure: str = TIMEOUT, failed_ns: int = 0, **changes: Any
) -> Request:
    own: dict[str, Any] = {"failure": failure, "failed_ns": failed_ns, "ended_ns": None}
    return planted(at_s, load, status=FAILED, events=Events(), usage=None, **own, **changes)


def arms_of(*requests: Request) -> list[SimpleNamespace]:
    return [SimpleNamespace(**row) for row in load_figures.arm_rows(load_figures.frame(requests))]


def arm(*requests: Request) -> SimpleNamespace:
    return arms_of(*requests)[0]


def spaced(n: int, load: Load = LOAD, **changes: Any) -> list[Request]:
    """n requests, evenly over the window, and one behind it, so that the round is whole."""
    return [
        *(planted(1 + 3.6 * (i + 0.5) / n, load, **changes) for i in range(n)),
        planted(5.1, load),
    ]


def with_ttft(times_s: list[float], load: Load = LOAD) -> list[Request]:
    return [planted(1 + 3.9 * i / len(times_s), load, ttft) for i, ttft in enumerate(times_s)] + [
        planted(5.1, load)
    ]


def test_tokens_count_that_arrived_inside_the_window() -> None:
    rows = load_figures.frame([planted(at_s, OPEN) for at_s in (0, 0.8, 2, 4.85, 5)])
    # 0.9, 0.95 are of the warm-up, 1.0 is in the window; 4.95 is in the window, 5.0 is behind it
    assert list(rows.n_in_window) == [0, 3, 5, 1, 0]
    bundled = load_figures.row(planted(0.8, events=UNCOUNTED, usage=Usage(completion_tokens=20)))
    assert bundled["n_in_window"] == 12


@pytest.mark.parametrize(
    ("requests", "due_s"),
    [
        ([planted(at_s) for at_s in (0.9, 1.0, 4.9, 5.0)], [1.0, 4.9]),
        (
            [planted(1.5, OPEN, scheduled_ns=900_000_000), planted(5.1, OPEN)],
            [],
        ),  # intended in the warm-up
        (
            [planted(0.5), failed(2, failure=REFUSED, sent_ns=None), planted(4.8)],
            [2, 4.8],
        ),  # by its date
        ([failed(at_s, failure=REFUSED, sent_ns=None) for at_s in (0, 2, 4.8)], [2, 4.8]),
    ],
)
def test_a_request_belongs_to_the_window_in_which_it_was_due(
    requests: list[Request], due_s: list[float]
) -> None:
    rows = load_figures.frame(requests)
    assert [round(at_s, 6) for at_s in rows.at_s[rows.inside]] == due_s


WARM = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=3)
LONG = Asked(n_prompt=10, n_gen=9, load=LOAD)
CUT = [planted(at_s) for at_s in (0.0, 1.5, 2.0)]  # nobody asked after 2.3 s
TOGETHER = [
    planted(i, FOUR, 0.5, timings=ServerTimings(n_prompt=10, prompt_ms=400))
    for i in range(6)
    for _ in range(4)
]
"""As llama-server reports it: 400 ms for each of four prompts in one step."""
WAVES = [
    [planted(shift_s + 0.3 * wave, TWO) for wave in range(18) for _ in range(2)]
    for shift_s in (0, 0.1, 0.2)
]
"""Two users, answers of 0.3 s with 5 tokens: 6.67 answers and 33.3 tokens per second."""
BOUND = planted(2, events=UNCOUNTED, usage=Usage(completion_tokens=9))
UNKNOWN = planted(2, events=UNCOUNTED, usage=None)

FIGURES: list[tuple[list[Request], dict[str, Any]]] = [
    # the last one ends at 5.15 s
    (
        [planted(0.8, OPEN), planted(2, OPEN), planted(4.85, OPEN)],
        {"tokens_tps": 9 / 4, "requests_ps": 2 / 4},
    ),
    # a round that was given up counts only where there is no other; one that hung was not given up
    (CUT, {"n_cut_off": 1, "window_s": [2.3 - 1]}),
    (
        [*CUT, planted(1.5, of(round=1)), planted(4.9, of(round=1))],
        {"n_cut_off": 1, "n_rounds": 1, "n": 2},
    ),
    ([planted(0.5), planted(2), failed(3, failed_ns=60 * 10**9)], {"n_cut_off": 0, "n": 2}),
    # of an open loop only the last round can be, and only where chance does not explain the pause
    ([planted(1, BUSY), planted(4.3, BUSY)], {"n_cut_off": 0}),
    ([planted(1, BUSY), planted(3, BUSY)], {"n_cut_off": 1}),
    ([planted(1, OPEN), planted(3, OPEN)], {"n_cut_off": 0}),
    ([planted(1, BUSY), planted(3, BUSY), planted(4.9, at(10, round=1))], {"n_cut_off": 0}),
    # percentiles are values that were measured, and say how many are beyond; nothing is beyond the 99th of 99
    (
        with_ttft([0.001 * i for i in range(200, 0, -1)]),
        {"ttft_n": 200, "ttft_median_s": 0.1005, "ttft_p95_s": 0.19},
    ),
    (
        with_ttft([0.001 * i for i in range(200, 0, -1)]),
        {"ttft_p95_beyond": 10, "ttft_p99_beyond": 2},
    ),
    (with_ttft([0.001 * i for i in range(1, 100)]), {"ttft_p95_s": 0.095, "ttft_p99_s": math.nan}),
    # waits of an open loop count from the intended time
    (
        [planted(2.5, OPEN, 0.1, scheduled_ns=2 * 10**9), planted(4.9, OPEN, 0.1)],
        {"ttft_median_s": 0.35, "e2e_median_s": 0.55, "late_most_s": 0.5, "attainment": 0.5},
    ),
    # failures count as bad and not as latencies
    (
        [
            *spaced(8, OPEN),
            failed(2, OPEN),
            failed(2.1, OPEN),
            failed(3, OPEN, RATE_LIMITED),
            failed(0.5, OPEN),
        ],
        {
            "n": 11,
            "n_ok": 8,
            "ttft_n": 8,
            "failures": {TIMEOUT: 2, RATE_LIMITED: 1},
            "goodput_ps": 2,
        },
    ),
    # rates of a closed loop do not depend on where the window cuts its waves; a failure takes its time, and a pause
    *((waves, {"requests_ps": 2 / 0.3, "tokens_tps": 10 / 0.3}) for waves in WAVES),
    ([*WAVES[0], failed(2.0, TWO, RATE_LIMITED)], {"requests_ps": 2 * 26 / (26 * 0.3 + 0.25)}),
    # without the number of tokens in an event TPOT is a bound, and without a count unknown
    ([BOUND, failed(5.1)], {"tpot_is_bound": True, "user_tps": math.nan, "tpot_median_s": 0.05}),
    ([UNKNOWN, planted(5.1)], {"attainment": 0, "tpot_n": 0, "tokens_tps": math.nan}),
    # a rate has an interval: t(1) at 95 %, 6 requests in a round
    (
        [*spaced(8, OPEN), *spaced(4, at(2, round=1))],
        {
            "tokens_tps": 7.5,
            "tokens_tps_low": 0,
            "tokens_tps_high": 7.5 + 6.31375 * 2.5 + 7.5 / 12,
            "user_tps": 20,
        },
    ),
    # a truncated answer is not a good one
    (
        [
            *(planted(1 + i, asked=LONG, finish_reason="length") for i in range(2)),
            planted(3),
            planted(4),
        ],
        {"n": 4, "attainment": 0.5, "e2e_n": 2, "ttft_n": 4},
    ),
    # prompts that are computed together count once as prefill
    (TOGETHER, {"share_prefill": 0.4, "share_decode": 0.3, "share_idle": 0.3}),
    (
        [*TOGETHER, failed(2, FOUR, REFUSED)],
        {"share_prefill": 0.4, "share_decode": 0.3, "share_idle": 0.3},
    ),
    ([*TOGETHER, planted(2, FOUR)], {"share_prefill": math.nan, "share_idle": 0.3}),
]


@pytest.mark.parametrize(("requests", "figures"), FIGURES)
def test_figures_of_planted_requests(requests: list[Request], figures: dict[str, Any]) -> None:
    shown = vars(arm(*requests))
    for name, value in figures.items():
        assert shown[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


def test_an_open_loop_that_piles_up_is_overloaded_and_does_not_hold() -> None:
    busy = dataclasses.replace(BUSY, slo=Slo(ttft_s=60))
    shown = arm(*(planted(0.1 * i, busy, 0.1 + 0.08 * i) for i in range(200)))
    assert shown.is_overloaded and shown.in_flight_end > shown.in_flight_begin + 10
    capacity = load_figures.capacity([vars(shown)])
    assert capacity is not None and (capacity["at_least"], capacity["best"]) == (None, 10)
    assert not arm(*spaced(40, busy)).is_overloaded
    assert not arm(*(planted(0.1 * i, FOUR, 0.1 + 0.08 * i) for i in range(50))).is_overloaded


def test_bunches_of_slow_requests_make_attainment_less_sure() -> None:
    apart = arm(*with_ttft(([0.3] * 19 + [0.6]) * 5))
    assert (apart.attainment_low, apart.attainment_high) == pytest.approx(
        (0.887, 0.984), abs=1e-3
    )  # Clopper-Pearson
    bunched = arm(*with_ttft([0.3] * 60 + [0.6] * 5 + [0.3] * 35))
    assert apart.attainment == bunched.attainment == 0.95 and bunched.attainment_low < 0.85
    slow = arm(
        *with_ttft([0.1] * 60 + [0.49] * 10 + [0.1] * 30)
    )  # all met the limit, but nearly not in bunches
    assert (
        slow.attainment == 1 and slow.attainment_low < arm(*with_ttft([0.1] * 100)).attainment_low
    )
    assert arm(*with_ttft([0.1] * 35)).attainment_low == pytest.approx(0.025 ** (1 / 35))


@pytest.mark.parametrize(
    ("holding", "words"),
    [
        ([(1, 80), (2, 80), (4, 20)], "between 2 and 4 requests/s"),
        ([(1, 80), (2, 80)], "at least 2 requests/s"),
        (
            [(1, 80), (2, 72), (4, 20)],
            "between 1 and 4 requests/s; 2 requests/s met the limits, but not clearly",
        ),
        ([(1, 72)], "unknown, too few requests; 1 request/s met the limits, but not clearly"),
        ([(1, 20), (2, 80)], "below 1 request/s"),  # all lower loads must hold
    ],
)
def test_capacity_in_words(holding: list[tuple[float, int]], words: str) -> None:
    """Of loads at a rate, each with a number of 80 requests within the limits."""
    requests = []
    for rate, n_good in holding:
        bad = {80 * (2 * i + 1) // (2 * (80 - n_good)) for i in range(80 - n_good)}
        requests += with_ttft([5.0 if i in bad else 0.05 for i in range(80)], at(rate))
    capacity = load_figures.capacity(load_figures.arm_rows(load_figures.frame(requests)))
    assert capacity is not None and capacity["sentence"] == words


def recorded(session: str, requests: list[Request], **changes: Any) -> list[RequestRecord]:
    settings = ServerSettings(n_slots=4, n_ctx=4096)
    given = {
        "url": "http://127.0.0.1:1/v1",
        "api": "chat",
        "settings": settings,
        "server": "llama-server",
        **changes,
    }
    own: dict[str, Any] = {"machine": MACHINE, "endpoint": Endpoint(**given), "model": "tiny"}
    return [RequestRecord(session=session, request=request, **own) for request in requests]


def section(*requests: Request) -> Section:
    (only,) = load_figures.sections(recorded("s", list(requests)))
    return only


MANY = of(concurrency=16)
REFUSAL = "400 Bad Request: request (300 tokens) exceeds the available context size (256 tokens)"


DOUBTS: list[tuple[list[Request], str]] = [
    (
        [*spaced(9, usage=WARM), planted(2, usage=WARM)],
        "10 requests had prompt tokens in the server's cache",
    ),
    ([*spaced(9, usage=WARM), planted(2, usage=WARM)], "10 answers shorter than requested"),
    ([planted(0), planted(1.5)], "1 round stopped early (left out"),
    (
        [planted(2.5, OPEN, scheduled_ns=2 * 10**9), planted(9, OPEN)],
        "was busy and sent requests up to 500 ms late",
    ),
    ([planted(0.1 * i, BUSY, 0.1 + 0.08 * i) for i in range(50)], "overloaded"),
    (
        [planted(1, asked=LONG, finish_reason="length"), planted(6)],
        "! 1 user: 1 answer truncated (finish reason",
    ),
    (
        [planted(4, asked=LONG, finish_reason="stop"), planted(6)],
        "! 1 user: 1 answer shorter",
    ),  # ended by itself
    (
        [failed(2, error=REFUSAL), planted(6)],
        f"1 of 1 requests failed (1 timeout, for example {REFUSAL})",
    ),
    ([failed(2), planted(6)], "1 request failed, and none succeeded."),
    (
        TOGETHER,
        "prefill / decode / idle: 4 users: 40 / 30 / 30 %. With 4 users, prefill takes most of the time.",
    ),
    (
        [*TOGETHER, failed(2, FOUR, failed_ns=10**9)],
        "4 users: ? / ? / 22 %. Only a server that reports",
    ),
]


@pytest.mark.parametrize(("requests", "words"), DOUBTS)
def test_doubts_are_said(
    requests: list[Request], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_section(section(*requests), console())
    assert words in capsys.readouterr().out


def test_a_load_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_section(section(*spaced(60), *spaced(120, MANY, ttft_s=2.0), failed(2, MANY)), console())
    text = capsys.readouterr().out
    assert (
        "Capacity (at least 90 % of requests within TTFT 500 ms, TPOT 100 ms): between 1 and 16 users."
        in text
    )
    assert "The server has 4 slots, so users wait: 12 of 16 users." in text and "1 round" in text
    assert (
        "! 16 users: 1 of 121 requests failed (1 timeout)." in text
        and "121 requests  95 % (6)" in text
    )


def test_a_load_without_limits_is_answered_by_its_largest_arm() -> None:
    plain, many = (dataclasses.replace(one, slo=None) for one in (LOAD, FOUR))
    assert load_figures.answer_of(arms_of(*spaced(60, plain), *spaced(60, many, ttft_s=0.5))) == (
        "With 4 users the server generates 28.6 tokens/s (1 user: 16.7); the median request takes 700 ms and waits 500 "
        "ms for its first token."
    )


def pictures(*requests: Request) -> dict[str, Any]:
    return {one.name: one.draw for one in section(*requests).pictures}


def texts(figure: Any) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(Text))


def levels(*users: int) -> list[Request]:
    return [one for n in users for one in spaced(60, of(concurrency=n), ttft_s=0.1 * n)]


def test_latency_and_timeline_are_drawn() -> None:
    many = of(concurrency=20)
    drawn = pictures(*levels(1, 2, 3, 4, 8, 16), *spaced(400, many), failed(2, many))
    assert list(drawn) == ["load", "timeline"]
    figure = canvas.drawn(drawn["load"], (11, 5))
    ttft, tpot = figure.axes
    lines: dict[str, Any] = {str(line.get_label()): line for line in ttft.lines}
    assert len(lines["requests"].get_ydata()) == 60  # each of an arm
    assert list(lines["median"].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.8, 1.6, 0.1])
    assert [tick.get_text() for tick in tpot.get_xticklabels()] == [
        "1",
        "2",
        "3",
        "4",
        "8",
        "16",
        "20\n1 of 401\nfailed",
    ]
    assert "limit: TTFT 500 ms, TPOT 100 ms" in texts(figure)
    (guide,) = (line for label, line in lines.items() if "slots" in label)
    assert list(guide.get_xdata()) == [3.5, 3.5]  # between 4 and 8 users
    figure = canvas.drawn(drawn["timeline"], (11, 7))
    shown = [ax for ax in figure.axes if ax.get_visible()]
    titles = [shown[i].get_title() for i in (0, -1)]
    assert len(shown) == 6 and titles == [
        "1 user: 61 requests",
        "20 users: 402 requests, 1 of 3 drawn",
    ]
    assert len(shown[0].patches) == 1 + 2 * 61  # the window; waiting and being answered
    assert "failed" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "requests",
    [
        [failed(0.1 * i, failure=REFUSED) for i in range(51)],
        [planted(0)],
        [planted(2, n=1), planted(5.1, n=1)],
        spaced(30, OPEN),
        spaced(3, of(arrivals="unheard of", concurrency=None)),
        [dataclasses.replace(one, started_at="?") for one in spaced(3, of(concurrency=None))],
    ],
)
def test_whatever_happened_can_be_drawn(requests: list[Request]) -> None:
    for draw in pictures(*requests).values():
        assert "tiny on llama-server" in texts(canvas.drawn(draw, (8, 5)))


def three_rounds(*users: int, factor: float = 1.0) -> list[Request]:
    requests = []
    for n, round_ in itertools.product(users, range(3)):
        load = of(concurrency=n, round=round_)
        requests += spaced(40, load, ttft_s=0.1 * factor * n * (1 + 0.01 * round_))
    return requests


def written(path: Path, records: list[RequestRecord]) -> Path:
    for record in records:
        results.save(path, record)
    return path


def test_show_and_report_have_loads_and_carry_them(tmp_path: Path, simulated: None) -> None:
    path = written(tmp_path / "load.jsonl", recorded("load", three_rounds(1, 16)))
    status, out, _ = run_lab("show", path)
    assert status == 0
    assert "tiny on llama-server, 4 slots; client: Test CPU, 4 cores" in out and "3 rounds" in out
    (session,) = json.loads(run_lab("show", path, "--json")[1])["loads"]
    assert [arm["load"] for arm in session["arms"]] == ["1 user", "16 users"]
    assert session["capacity"]["at_least"] == 1
    written(path, recorded("again", three_rounds(1)))
    page = tmp_path / "page.html"
    status, _, _ = run_lab("report", path, "--out", page)
    assert status == 0
    text = page.read_text()
    assert "How much load can tiny handle through llama-server?" in text
    assert text.count("<svg") == 4
    assert "within TTFT 500 ms, TPOT 100 ms): between 1 and 16 users." in text
    assert (
        "lab load --url http://127.0.0.1:1/v1 --model tiny --api chat --concurrency 1,16 --prompt-len 10"
        in text
    )
    assert len(results.read([page]).requests) == 123 * 2 + 123


def test_loads_are_compared_by_their_rounds(tmp_path: Path, simulated: None) -> None:
    base = recorded("one", three_rounds(1, 2))
    other = recorded(
        "two", three_rounds(1, 4, factor=3.0), version="b2", url="http://127.0.0.1:2/v1"
    )
    (compared,) = comparison.compare([*base, *other])
    ttft, tpot = compared.rows
    assert (ttft.figure, ttft.lever, ttft.n_prompt, ttft.n_base, ttft.n_other) == (
        "ttft_s",
        "1 user",
        10,
        3,
        3,
    )
    assert (ttft.estimate, ttft.base) == pytest.approx((3, 0.101))
    assert (tpot.figure, tpot.n_gen) == ("tpot_ms", 5) and tpot.estimate == pytest.approx(1)
    assert any("2 users" in name for name in compared.only_base)
    status, out, _ = run_lab(
        "compare", written(tmp_path / "a.jsonl", [*base, *other]), "--no-plot", "--details"
    )
    assert status == 0 and "A run of a load is a round" in out
    mixed = three_rounds(1)
    mixed[0] = dataclasses.replace(mixed[0], asked=dataclasses.replace(mixed[0].asked, n_prompt=99))
    rows = load_figures.rows(recorded("one", mixed))
    assert [(row.lever, row.n_prompt) for row in rows.itertuples()] == [
        ("1 user, 10 + 5 tokens", 0)
    ] * 3


def test_the_command_of_a_load_is_known() -> None:
    rates = dataclasses.replace(OPEN, lengths="10-20 + 5 tokens", slo=Slo(ttft_s=1, tpot_s=0.05))
    command = load_figures.again(recorded("s", spaced(3, rates)))
    assert command is not None and command.endswith(
        "--rate 2 --prompt-len 10-20 --gen 5 --warmup 1 --duration 4 --rounds 1 --slo ttft=1s,tpot=0.05s --seed 1"
    )


def test_loads_are_a_table_and_pictures_in_python() -> None:
    records = [
        *recorded("one", three_rounds(1, 16)),
        *recorded("two", [failed(0.1 * i) for i in range(51)]),
    ]
    rows = lab.arms(records)
    assert list(zip(rows.session, rows.load, rows.n_ok, strict=True)) == [
        ("one", "1 user", 120),
        ("one", "16 users", 120),
        ("two", "1 user", 0),
    ]
    assert list(rows.ttft_median_s[:2]) == pytest.approx([0.101, 1.616]) and math.isnan(
        rows.ttft_median_s[2]
    )
    assert "The timeline of requests" in texts(lab.plot_arms(records, "timeline"))
    assert lab.arms([make_record()]).empty
    with pytest.raises(LabError, match="Measure a load"):
        lab.plot_arms([make_record()])
    with pytest.raises(LabError, match="no picture 'wrong'"):
        lab.plot_arms(records, "wrong")
