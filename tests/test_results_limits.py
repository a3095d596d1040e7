"""What is read of files that are too large, with sizes in numbers; and what makes a line equal."""

import base64
import dataclasses
import errno
import gzip
import io
import os
import random
import sys
from pathlib import Path

import pytest

from lab.core import files, results
from lab.core.lines import Line, to_json
from lab.core.record import Record, Steps
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.roofline.paging import MemoryLine
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run
from tests.support.requests import make_request, make_request_record

LINE = to_json(make_record()).encode() + b"\n"
BOM = b"\xef\xbb\xbf"


def lengthened(path: Path, n_bytes: int, content: bytes = b"") -> Path:
    """A file of so many bytes: its content, and zeros that take no space on the disk."""
    path.write_bytes(content)
    os.truncate(path, n_bytes)
    return path


# Files of any kind


def test_a_file_has_up_to_64_million_bytes(tmp_path: Path) -> None:
    path = lengthened(tmp_path / "a.txt", 64_000_000)
    assert len(files.read(path, "The file", "Hint.")) == 64_000_000
    lengthened(path, 64_000_001)
    with pytest.raises(LabError, match=r"The file .* has over 64,000,000 bytes"):
        files.read(path, "The file", "Hint.")


def test_packed_files_have_that_limit_unpacked_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(64_000_000), 1))
    assert len(files.read(path, "The file", "Hint.")) == 64_000_000
    path.write_bytes(gzip.compress(bytes(64_000_001), 1))
    with pytest.raises(LabError, match=r"it has over 64,000,000 bytes when unpacked"):
        files.read(path, "The file", "Hint.")


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_piped_in_has_the_limit_of_a_file(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gzip.compress(b"12345") if is_packed else b"12345"

    def read(most_bytes: int) -> bytes:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return files.read("-", "The file", "Hint.", most_bytes)

    if not is_packed:
        assert read(5) == b"12345"
    with pytest.raises(LabError, match=r"stdin"):
        read(4)


def test_all_members_of_a_packed_file_are_read_from_their_start(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"123") + b"\0\0" + gzip.compress(b"456"))
    assert files.read(path, "The file", "Hint.") == b"123456"
    assert files.unpacked(path.read_bytes(), 6) == b"123456"
    with pytest.raises(OSError, match="over 5 bytes"):
        files.unpacked(path.read_bytes(), 5)
    path.write_bytes(b"0123456789")
    assert files.read(path, "The file", "Hint.", 10) == b"0123456789"


# Lines


def test_a_line_has_less_than_32_mib(tmp_path: Path) -> None:
    path = lengthened(tmp_path / "a.jsonl", 1 << 25)
    with path.open("ab") as file:
        file.write(b"\n" + LINE)
    contents = results.read([path])
    assert len(contents.records) == 1
    assert contents.skipped == ("a.jsonl line 1 skipped: it has over 33,554,432 bytes",)


@pytest.mark.parametrize(("n_letters", "is_read_on"), [(499, True), (500, False)])
def test_a_long_line_is_skipped_up_to_five_times_the_limit(
    n_letters: int, is_read_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MOST_LINE` bytes of it, and four pieces as long."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * n_letters + b"\n[1]\n")
    monkeypatch.setattr(results, "MOST_LINE", 100)
    skipped = results.read([path]).skipped
    assert skipped[0] == "a.jsonl line 1 skipped: it has over 100 bytes"
    assert (len(skipped) == 2) == is_read_on


def test_only_the_first_line_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    other = to_json(make_record(session="b")).encode() + b"\n"
    path.write_bytes(BOM + LINE + b" \n" + BOM + other)
    contents = results.read([path])
    assert [record.session for record in contents.records] == ["a-session"]
    assert len(contents.skipped) == 1
    assert contents.skipped[0].startswith("a.jsonl line 3 skipped: ")


def test_a_file_is_not_read_any_further_after_10_000_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[1]\n" * 9_999 + LINE)
    contents = results.read([path])
    assert len(contents.records) == 1
    assert [sentence.partition(" skipped")[0] for sentence in contents.skipped] == [
        "a.jsonl line 1 and 9,998 more"
    ]
    path.write_bytes(b"[1]\n" * 10_000 + LINE)
    contents = results.read([path])
    assert not contents.records
    assert contents.skipped[-1] == "a.jsonl is not read any further: 10,000 lines were skipped"


def test_20_reasons_are_listed_with_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    kinds = [*range(21), 0, 20, 5]
    path.write_text("".join(f'{{"schema": 4, "kind": "k{kind}"}}\n' for kind in kinds))
    skipped = results.read([path]).skipped
    assert len(skipped) == 21
    assert skipped[0].startswith("a.jsonl line 1 and 1 more skipped: ")
    assert skipped[1].startswith("a.jsonl line 2 skipped: ")
    assert skipped[20] == "a.jsonl line 21 and 1 more skipped: for other reasons"


def test_the_first_note_is_a_warning_that_counts_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"[1]\n")
    with pytest.warns(UserWarning, match=r"no schema number\)$"):
        results.contents_of(path)
    path.write_bytes(LINE + b"[1]\nx\n")
    with pytest.warns(UserWarning, match=r"\(and 1 more note: see skipped\)$"):
        results.contents_of(path)


def test_three_of_the_files_without_results_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    for path in paths:
        path.touch()
    with pytest.raises(LabError) as raised:
        results.contents_of(paths)
    named = [path.name for path in paths if str(path) in str(raised.value)]
    assert named == ["a.jsonl", "b.jsonl", "c.jsonl"]


# Pages


def page(path: Path, content: bytes) -> Path:
    packed = base64.b64encode(gzip.compress(content, 1))
    path.write_bytes(b'<script id="mini-lab-records">' + packed + b"</script>")
    return path


def n_read(path: Path) -> int:
    return len(results.read([path]).records)


def test_a_page_unpacks_to_one_mib_at_least(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    assert n_read(page(path, LINE.ljust(1_048_576, b"\n"))) == 1
    with pytest.raises(LabError, match="too large"):
        results.read([page(path, LINE.ljust(1_048_577, b"\n"))])


@pytest.mark.parametrize(("ratio", "is_read"), [(39.9, True), (40.1, False)])
def test_a_page_unpacks_to_40_times_its_bytes(
    ratio: float, is_read: bool, tmp_path: Path
) -> None:
    noise = LINE + random.Random(1).randbytes(100_000).replace(b"\n", b"") + b"\n"
    content = noise
    for _ in range(5):  # the zeros are packed too
        n_packed = len(gzip.compress(content, 1))
        content = noise.ljust(round(ratio * n_packed), b"\n")
    assert len(content) / len(gzip.compress(content, 1)) == pytest.approx(ratio, abs=0.05)
    path = page(tmp_path / "a.html", content)
    if is_read:
        assert n_read(path) == 1
    else:
        with pytest.raises(LabError, match="too large"):
            results.read([path])


def test_a_page_unpacks_to_64_mib_at_most(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(1_700_000).replace(b"\n", b"")
    content = LINE + noise + b"\n"
    path = tmp_path / "a.html"
    assert n_read(page(path, content.ljust(67_108_864, b" "))) == 1
    with pytest.raises(LabError, match="too large"):
        results.read([page(path, content.ljust(67_108_865, b" "))])


def test_a_page_has_up_to_128_mib(tmp_path: Path) -> None:
    path = page(tmp_path / "a.html", LINE)
    assert n_read(lengthened(path, 134_217_728, path.read_bytes())) == 1
    with pytest.raises(LabError, match="has over 134,217,728 bytes"):
        results.read([lengthened(path, 134_217_729, path.read_bytes())])


# Other sessions


def test_50_million_bytes_of_other_sessions_are_read(tmp_path: Path) -> None:
    older = to_json(make_record(session="older")).encode() + b"\n"
    (tmp_path / "1.jsonl").write_bytes(older)
    newest = tmp_path / "2.jsonl"

    def sessions() -> list[str]:
        return [record.session for record in results.nearby([tmp_path]).records]

    lengthened(newest, 50_000_000 - len(older), LINE)
    assert sessions() == ["a-session", "older"]
    lengthened(newest, 50_000_000 - len(older) + 1, LINE)
    assert sessions() == ["a-session"]
    lengthened(newest, 50_000_001, LINE)
    assert sessions() == []


def test_the_measured_sessions_are_not_nearby(tmp_path: Path) -> None:
    mine = make_record()
    request = dataclasses.replace(make_request_record(), session="b")
    results.save(tmp_path / "1.jsonl", mine, make_record(session="other"), request)
    nearby = results.nearby([tmp_path], [mine])
    assert [record.session for record in nearby.records] == ["other"]
    assert nearby.requests == (request,)
    assert results.nearby([tmp_path], [request]).requests == ()


def test_findings_of_other_sessions_are_nearby_too(tmp_path: Path) -> None:
    line = MemoryLine(
        session="a-session",
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        kernel=None,
        disk=None,
        round=0,
        file_bytes=1,
        limit_bytes=None,
        own_bytes=None,
        resident=None,
        n_tokens=1,
        decode_s=1.0,
        read_bytes=None,
        n_faults=None,
        disk_s=None,
    )
    results.save(tmp_path / "1.jsonl", line)
    assert results.nearby([tmp_path]).findings == (line,)
    assert results.nearby([tmp_path], [make_record()]).findings == ()


# What functions of records are given


def test_records_paths_and_lists_of_them_are_read_together(tmp_path: Path) -> None:
    saved = make_record(session="saved")
    results.save(tmp_path / "a.jsonl", saved)
    given = make_record()
    request = make_request_record()
    assert results.lines_of([given, [request], tmp_path]) == [given, request, saved]
    assert results.lines_of([given]) == [given]
    assert results.lines_of(tmp_path) == [saved]
    for wrong in (7, {"a": 1}, [7], [Record]):
        with pytest.raises(LabError, match="Records are needed"):
            results.lines_of(wrong)  # type: ignore[arg-type]


def test_the_first_reason_is_told_where_there_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[1]\nx\n")
    with pytest.raises(LabError, match=r"no results of the lab: a\.jsonl line 1 "):
        results.contents_of(path)


def test_a_line_that_cannot_be_synced_leaves_the_file_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    path = tmp_path / "a.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(results.NotSaved, match=r"cannot be written: No space left"):
            results.save(path, make_record())
    assert path.read_bytes() == b""
    results.save(path, make_record())
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(results.NotSaved, match=r"cannot be written any more: No space left"):
        results.save(path, make_record(session="b"))
    assert path.read_bytes() == before


def test_a_file_that_exists_has_the_next_number_from_2(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a-2.jsonl", "a-3.jsonl"):
        path = results.free_path(tmp_path, "a")
        assert path.name == name
        path.touch()


def test_a_link_and_a_pipe_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A pipe stands for a device: a fault would replace it, and the machine's stay."""
    target = tmp_path / "target.txt"
    target.write_text("before")
    link = tmp_path / "link.txt"
    link.symlink_to(target)
    results.write_whole(link, b"after", "The page")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        results.write_whole(pipe, b"piped", "The page")
        assert pipe.is_fifo()
        assert os.read(reader, 100) == b"piped"
    finally:
        os.close(reader)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.txt"
    results.write_whole(path, b"before", "The page")
    same_file = tmp_path / "b.txt"
    same_file.hardlink_to(path)
    results.write_whole(path, b"after", "The page")
    assert path.read_bytes() == b"after"
    assert same_file.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


# What makes lines equal


def both(tmp_path: Path, first: Line, second: Line) -> list[Record]:
    path = tmp_path / "a.jsonl"
    path.unlink(missing_ok=True)
    results.save(path, first, second)
    contents = results.read([path])
    return [*contents.records, *contents.requests]  # type: ignore[list-item]


def test_a_run_is_the_same_with_what_another_version_knows_of_its_machine(
    tmp_path: Path,
) -> None:
    other_machine = dataclasses.replace(MACHINE, cpu="another")
    run = make_run()
    first = make_record(run)
    assert len(both(tmp_path, first, make_record(run, machine=other_machine))) == 1
    assert len(both(tmp_path, first, make_record(run, session="another"))) == 2
    assert len(both(tmp_path, first, make_record(make_run(repeat=1)))) == 2
    one_step = Steps(("prefill",), (20,), (0,), (0,), (9,), (9,), (1,), (1,))
    imported = dataclasses.replace(
        run, n_gen=1, steps=one_step, token_ids=(), imported_from="llama-bench"
    )
    first = make_record(imported)
    assert len(both(tmp_path, first, first)) == 1
    assert len(both(tmp_path, first, make_record(imported, machine=other_machine))) == 2
    other_model = dataclasses.replace(MODEL, quantization="Q8_0")
    assert len(both(tmp_path, first, make_record(imported, model=other_model))) == 2


def test_requests_are_the_same_if_they_begin_and_end_alike(tmp_path: Path) -> None:
    request = make_request()
    first = make_request_record(request)
    assert len(both(tmp_path, first, first)) == 1
    later = dataclasses.replace(request, sent_ns=(request.sent_ns or 0) + 1)
    assert len(both(tmp_path, first, make_request_record(later))) == 2

    def arriving(*last_ns: int) -> RequestRecord:
        stamps = (*request.events.arrive_ns[: -len(last_ns)], *last_ns)
        events = dataclasses.replace(request.events, arrive_ns=stamps)
        return make_request_record(dataclasses.replace(request, events=events))

    assert len(both(tmp_path, first, arriving(193))) == 1
    assert len(both(tmp_path, first, arriving(101, 130, 190, 191, 191, 192))) == 1
    assert len(both(tmp_path, first, arriving(6, 100, 130, 190, 191, 191, 192))) == 2
