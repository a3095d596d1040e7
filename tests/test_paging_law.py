"""The law of waits for a disk, with planted starts, at every limit."""

import dataclasses
import math
import platform
from typing import Any

import pytest

from lab.roofline import paging
from lab.roofline.paging import MemoryLine, PagingLaw
from tests.support.records import MACHINE, MODEL, SETTINGS

FILE_BYTES = 1000
COMPUTE_S = 2.0


def start(token_s: float = COMPUTE_S, **changes: Any) -> MemoryLine:
    """Two tokens without a limit."""
    line = MemoryLine(
        session="a",
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        kernel="6.1",
        disk="254",
        round=0,
        file_bytes=FILE_BYTES,
        limit_bytes=None,
        own_bytes=100,
        resident=0.0,
        n_tokens=2,
        decode_s=2 * token_s,
        read_bytes=1400,
        n_faults=80,
        disk_s=0.5,
    )
    return dataclasses.replace(line, **changes)


def limited(wait: float, **changes: Any) -> MemoryLine:
    """With room for half of the file; `wait` is that of each byte."""
    return start(COMPUTE_S + FILE_BYTES * wait, **{"limit_bytes": 600, **changes})


def test_the_shares_of_a_start() -> None:
    line = limited(0.001)
    assert line.token_s == 3
    assert line.room == 0.5
    assert line.read_share == 0.7
    assert start().room is None
    assert limited(0.001, own_bytes=None).room is None
    assert limited(0.001, own_bytes=700).room == 0
    assert limited(0.001, read_bytes=None).read_share is None


def test_a_limit_holds_if_at_most_a_hundredth_of_the_pages_was_there() -> None:
    assert limited(0.001, resident=0.01).is_confirmed
    assert not limited(0.001, resident=0.011).is_confirmed
    assert not limited(0.001, resident=None).is_confirmed
    assert start(resident=None).is_confirmed


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_s": 0.0},
        {"decode_s": math.inf},
        {"n_tokens": 0},
        {"file_bytes": 0},
        {"limit_bytes": 0},
        {"disk_s": 0.0},
        {"disk_s": math.inf},
    ],
)
def test_impossible_starts_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs|positive"):
        start(**changes)


def test_the_smallest_start_is_possible() -> None:
    line = start(n_tokens=1, file_bytes=1, limit_bytes=1, disk_s=None)
    assert line.token_s == 2 * COMPUTE_S


def test_equal_waits_have_a_range_of_a_tenth() -> None:
    law = paging.learn([start(), *[limited(0.001)] * 4])
    assert law is not None
    assert law.n_starts == 4
    assert law.wait_s == pytest.approx(0.001)
    assert (law.low_s, law.high_s) == pytest.approx((0.001 / 1.1, 0.001 * 1.1))
    assert paging.learn([start(), *[limited(0.001)] * 3]) is None
    assert paging.learn([limited(0.001)] * 4) is None


def test_different_waits_have_the_range_of_a_further_start() -> None:
    """Logarithms 0, 0, 2, 2: mean 1, deviation 1.1547; Student's t for 90 % and 3 is 2.3534."""
    waits = [math.exp(log) for log in (0, 0, 2, 2)]
    law = paging.learn([start(), *map(limited, waits)])
    assert law is not None
    half = 2.353363 * math.sqrt(4 / 3) * math.sqrt(1 + 1 / 4)
    assert law.wait_s == pytest.approx((1 + math.e**2) / 2)
    assert law.low_s == pytest.approx(math.exp(1 - half), rel=1e-5)
    assert law.high_s == pytest.approx(math.exp(1 + half), rel=1e-5)


def test_no_start_that_was_measured_lies_outside_of_the_range() -> None:
    """One of 21 starts is far from the others: the range of a further start ends before it."""
    slow = paging.learn([start(), *[limited(1.0)] * 20, limited(8.0)])
    assert slow is not None
    assert slow.wait_s == pytest.approx(1)
    assert slow.high_s == pytest.approx(8 * 1.1)
    assert slow.low_s < 1 / 1.1
    quick = paging.learn([start(), *[limited(1.0)] * 20, limited(1 / 8)])
    assert quick is not None
    assert quick.low_s == pytest.approx(1 / 8 / 1.1)
    assert quick.high_s > 1.1


def test_the_time_without_a_limit_is_the_middle_of_its_range() -> None:
    assert paging.compute_span([limited(1.0)]) is None
    span = paging.compute_span([start(2.0), start(8.0), limited(1.0)])
    assert span == pytest.approx((2 / 1.1, 8 * 1.1))
    law = paging.learn([start(2.0), start(8.0), *[limited(1.0)] * 4])
    assert law is not None
    assert law.wait_s == pytest.approx((2 + 1000 - 4) / 1000)


def test_only_starts_without_room_and_with_a_wait_teach() -> None:
    assert paging.waits_of([limited(0.5)], COMPUTE_S) == [pytest.approx(0.5)]
    assert paging.waits_of([limited(0.5, limit_bytes=1050)], COMPUTE_S) == []  # 0.95 of it
    assert len(paging.waits_of([limited(0.5, limit_bytes=1049)], COMPUTE_S)) == 1
    assert paging.waits_of([limited(0.5, resident=0.5)], COMPUTE_S) == []
    assert paging.waits_of([limited(0.5, own_bytes=None)], COMPUTE_S) == []
    assert paging.waits_of([limited(0.0), limited(-0.001)], COMPUTE_S) == []


def test_files_that_differ_have_their_own_time_without_a_limit() -> None:
    other = dataclasses.replace(MODEL, name="other")
    others = [dataclasses.replace(limited(0.001), model=other)] * 4
    assert paging.learn([start(), *others]) is None
    known = dataclasses.replace(start(), model=other)
    law = paging.learn([start(9.0), known, *others])
    assert law is not None
    assert law.wait_s == pytest.approx(0.001)


def test_lines_hold_for_their_machine_kernel_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.1")
    here = start()
    elsewhere = [
        start(kernel="6.2"),
        start(machine=dataclasses.replace(MACHINE, cpu="another")),
    ]
    lines = [here, *elsewhere]
    assert paging.in_same_place(lines, MACHINE, "254") == [here]
    assert paging.in_same_place(lines, MACHINE, None) == [here]
    assert paging.in_same_place(lines, MACHINE, "255") == []


@pytest.mark.parametrize(
    ("room", "token_s", "wait_s"),
    [
        (0.5, (1.25, 4.0), 0.5),
        (0.949, (1.25, 4.0), 0.5),
        (0.95, (1.0, 4.0), None),
        (1.019, (1.0, 4.0), None),
        (1.02, (1.0, 2.0), 0),
    ],
)
def test_a_token_waits_where_the_file_has_no_room(
    room: float, token_s: tuple[float, float], wait_s: float | None
) -> None:
    law = PagingLaw(wait_s=0.0005, low_s=0.00025, high_s=0.002, n_starts=4)
    assert law.token_s(FILE_BYTES, room, (1.0, 2.0)) == pytest.approx(token_s)
    assert law.wait_of(FILE_BYTES, room) == wait_s
