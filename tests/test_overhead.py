"""A model in process and through a server: the parts of the way, from times that are known exactly, and as asked for.

The whole measurement runs against a null server, which sends nothing early: its times have one bound.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lab
from lab.core.lines import parse_line, to_json
from lab.core.record import Record
from lab.core.request import (
    CHAT,
    ROLE,
    TEXT,
    YES,
    Asked,
    Endpoint,
    Events,
    Pieces,
    Request,
    RequestRecord,
    ServerSettings,
    ServerTimings,
    Usage,
)
from lab.core.results import read
from lab.drawing import canvas
from lab.endpoints.access import JsonReply
from lab.errors import LabError
from lab.experiments import overhead_blocks, overhead_parts
from lab.process.wire import Vocabulary
from lab.process.worker import Worker
from lab.runner.servers import connect
from lab.show import console, overhead_views, page
from lab.show.section import print_sections
from tests.conftest import MACHINE, MODEL, MS, FakeWorker, make_record, make_run, run_lab
from tests.conftest import SETTINGS as SETTINGS_OF_RUNS
from tests.null_server import Behaviour, NullSettings, null_server

N_PROMPT, N_GEN = 40, 9
PLANTED = Behaviour(
    first_ms=275.0, gap_ms=10.0, timings=True, prompt_ms=200.0, gen_ms=76.0, whole_gen_ms=68.0, slot_ms=65.0
)
SETTINGS = NullSettings(models={"null": PLANTED}, template_ms=30.0, tokenize_ms=20.0)
ENDPOINT = Endpoint(
    url="http://127.0.0.1:1/v1",
    api=CHAT,
    server="llama-server",
    settings=ServerSettings(n_slots=4, n_ctx=4096, model_file="tiny.gguf", quantization="Q4_0", build="b1-0c1e570"),
)


class SamplingWorker(FakeWorker):
    """Takes 3 ms to choose a token as servers do; any number is a token."""

    def load(self, *_: object) -> Vocabulary:
        return dataclasses.replace(super().load(), n_vocab=100_000)

    def time_sampling(self, samplers: Any, n_times: int) -> tuple[int, ...]:
        return (3 * MS,) * n_times


def make_request(
    block: int = 0,
    ttft_ms: float = 100.0,
    tpot_ms: float = 14.0,
    head_ms: float = 30.0,
    timings: ServerTimings | None = None,
    pieces: Pieces | None = None,
    **changes: Any,
) -> RequestRecord:
    """A request of 20 and 5 tokens, whose pieces are known."""
    arrivals = [round((ttft_ms + i * tpot_ms) * MS) for i in range(5)]
    request = Request(
        asked=Asked(n_prompt=20, n_prompt_counted=20, n_gen=5, repeat=block),
        started_at="2026-01-01T00:00:00Z",
        sent_ns=0,
        headers_ns=round(head_ms * MS),
        status="ok",
        http_status=200,
        events=Events((arrivals[0], *arrivals), (10,) * 6, (ROLE, *[TEXT] * 5), (0, *[1] * 5)),
        usage=Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=0),
        timings=timings or ServerTimings(n_prompt=20, prompt_ms=68.0, n_gen=5, gen_ms=4 * 13.5),
        pieces=pieces
        or Pieces(
            http_ns=(1 * MS, 2 * MS, 50 * MS),
            template_ns=(5 * MS,) * 3,
            tokenize_ns=(9 * MS,) * 3,
            whole=ServerTimings(n_gen=5, gen_ms=4 * 12.75),
            sampling_ns=(3 * MS,) * 4,
        ),
    )
    request = dataclasses.replace(request, **changes)
    return RequestRecord(session="a-session", machine=MACHINE, endpoint=ENDPOINT, model="tiny", request=request)


def run_of(block: int, decode_ms: float = 10.0) -> Record:
    """In process: 20 ms to prefill 20 tokens and 1 ms to choose; then decode_ms and 1 ms for each token."""
    return make_record(make_run(20, 5, block, block=block, decode_ms=decode_ms))


def phases_of(records: list[Record], requests: list[RequestRecord]) -> dict[str, overhead_parts.Phase]:
    (row,) = overhead_parts.rows(records, requests)
    return {phase.name: phase for phase in row.phases}


def test_the_parts_are_the_planted_ones_and_add_up() -> None:
    phases = phases_of([run_of(0)], [make_request(0)])
    ttft, tpot = phases["TTFT"], phases["TPOT"]
    assert {part.name: round(part.ms, 6) for part in ttft.parts} == {
        overhead_parts.ENGINE: 21.0,
        overhead_parts.OTHERWISE: 47.0,
        overhead_parts.HTTP: 2.0,
        overhead_parts.TEMPLATE: 3.0,
        overhead_parts.TOKENIZE: 7.0,
        overhead_parts.SLOT: 18.0,
    }
    assert (ttft.in_process_ms, ttft.server_ms) == (21.0, 100.0)
    assert ttft.unexplained_ms == pytest.approx(2.0)
    assert {part.name: round(part.ms, 6) for part in tpot.parts} == {
        overhead_parts.ENGINE: 11.0,
        overhead_parts.SAMPLING: 2.0,
        overhead_parts.OTHERWISE: -0.25,
        overhead_parts.STREAM: 0.75,
    }
    assert tpot.unexplained_ms == pytest.approx(0.5)
    assert not ttft.hidden and not tpot.hidden


def test_each_part_is_the_mean_over_blocks_and_only_pairs_count() -> None:
    requests = [make_request(block, head_ms=30.0 + block) for block in range(4)]
    requests.append(make_request(0, asked=Asked(n_prompt=20, n_prompt_counted=20, n_gen=5, warmup=True)))
    runs = [run_of(block, 10.0 + block) for block in (0, 1, 2, 7)]
    (row,) = overhead_parts.rows(runs, requests)
    slot = next(part for part in row.phases[0].parts if part.name == overhead_parts.SLOT)
    assert (row.n_blocks, slot.ms, slot.low_ms, slot.high_ms) == (3, 19.0, 18.0, 20.0)
    assert row.phases[1].spread == pytest.approx(2 / 12)


def test_the_outer_blocks_are_in_the_ranges_only_and_the_parts_add_up_to_what_is_left() -> None:
    late = (100.0, 90.0, 500.0, 100.0)
    requests = [make_request(block, ttft_ms=ms) for block, ms in enumerate(late)]
    (row,) = overhead_parts.rows([run_of(block) for block in range(4)], requests)
    ttft = row.phases[0]
    assert (row.n_blocks, row.n_middle, ttft.server_ms) == (4, 2, 100.0)
    assert ttft.unexplained_ms == pytest.approx(2.0)


def test_a_prompt_from_a_cache_and_a_short_answer_do_not_count_and_are_named() -> None:
    warm = make_request(0, usage=Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=7))
    short = make_request(1, usage=Usage(prompt_tokens=20, completion_tokens=3, cached_tokens=0))
    assert not overhead_parts.pairs([run_of(0), run_of(1)], [warm, short])
    words = overhead_views.failures([], [warm, short])
    assert "7 tokens of the prompt came from a cache" in words[0] and "ended after 3 tokens" in words[1]


def test_without_times_of_the_server_the_rest_is_not_explained_and_said_so() -> None:
    bare = make_request(pieces=Pieces(http_ns=(2 * MS,)))
    bare = dataclasses.replace(bare, request=dataclasses.replace(bare.request, timings=None))
    phases = phases_of([run_of(0)], [bare])
    assert phases["TTFT"].unexplained_ms == pytest.approx(100 - 21 - 2)
    assert set(phases["TTFT"].hidden) == {
        overhead_parts.OTHERWISE,
        overhead_parts.TEMPLATE,
        overhead_parts.TOKENIZE,
        overhead_parts.SLOT,
    }
    assert phases["TPOT"].unexplained_ms == pytest.approx(3.0)
    (row,) = overhead_parts.rows([run_of(0)], [bare])
    assert any("cannot be measured on this server" in words for words in overhead_parts.sentences([row]))
    other = dataclasses.replace(ENDPOINT, server="vLLM")
    assert len(overhead_views.cannot(other)) == 3 and not overhead_views.cannot(ENDPOINT)


def test_a_head_that_comes_with_the_first_token_does_not_say_when_the_slot_began() -> None:
    phases = phases_of([run_of(0)], [make_request(head_ms=99.0)])
    assert phases["TTFT"].hidden == (overhead_parts.SLOT,)
    assert phases["TTFT"].unexplained_ms == pytest.approx(20.0)


def test_settings_say_what_differs_and_what_is_not_known() -> None:
    machine = dataclasses.replace(MACHINE, llama_cpp_commit="0c1e570-dirty")
    record = make_record(machine=machine, model=dataclasses.replace(MODEL, quantization="Q8_0"))
    answers = {one.name: one.same for one in overhead_parts.settings(record, make_request())}
    assert answers["model file"] == answers["llama.cpp"] == YES
    assert answers["quantization"] == "no"
    assert answers["threads"] == answers["cache types"] == "unknown"


def test_sentences_name_the_largest_parts_and_whether_processes_differ_as_much() -> None:
    (row,) = overhead_parts.rows([run_of(0)], [make_request(0)])
    first, why, *_ = overhead_parts.sentences([row])
    assert "376.2 % slower to the first token of 20 prompt tokens" in first
    assert first.index("engine difference +47.0") < first.index("scheduling +18.0") < first.index("tokenising +7.0")
    assert "compare the server's threads, ubatch, flash attention and cache types" in why
    varied = [run_of(0), run_of(1, 30.0)]
    (row,) = overhead_parts.rows(varied, [make_request(0), make_request(1)])
    assert any("variation between processes" in words for words in overhead_parts.sentences([row]))


def test_the_table_the_json_and_the_picture_have_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, requests = [run_of(0)], [make_request(0)]
    print_sections(overhead_views.sections(runs, requests), console.console())
    shown = capsys.readouterr().out
    for name in (*overhead_parts.ORDER, overhead_parts.UNEXPLAINED, "not reported"):
        assert name in shown
    (document,) = overhead_views.as_rows(runs, requests)
    ttft = document["rows"][0]["phases"][0]
    assert ttft["unexplained_ms"] == pytest.approx(ttft["server_ms"] - sum(part["ms"] for part in ttft["parts"]))
    (draw,) = overhead_views.drawings([*runs, *requests]).values()
    figure = canvas.drawn(draw, (8, 5))
    ttft_ax = figure.axes[0]
    ends = {round(bar.get_x() + bar.get_width(), 6) for bar in ttft_ax.patches}  # type: ignore[attr-defined]
    assert {21.0, 98.0, 100.0} <= ends
    assert all(path.exists() for path in canvas.write(draw, tmp_path, "ways"))
    text = page.html([*runs, *requests], [])
    assert "<h2>In process and through a server</h2>" in text and "prompts of 20 tokens" in text
    assert overhead_views.CAPTION in text


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No llama-server is here whose threads could spin."""
    monkeypatch.setattr(overhead_blocks, "SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def planted() -> Iterator[str]:
    with null_server(SETTINGS) as server:
        yield server.url


def measured(url: str, tmp_path: Path, worker: FakeWorker, n_blocks: int = 2) -> list[Record | RequestRecord]:
    with connect(url) as server:
        turns = overhead_blocks.prepare(server, worker, [N_PROMPT], N_GEN, n_blocks, threads=2)  # type: ignore[arg-type]
        turns = dataclasses.replace(turns, samplers=(("top_k", 40.0),), new_worker=lambda: worker)  # type: ignore[arg-type,return-value]
        path = overhead_blocks.new_file(turns, tmp_path)
        return list(overhead_blocks.execute(turns, path, lambda status: None))


def test_overhead_of_a_null_server(planted: str, tmp_path: Path) -> None:
    worker = SamplingWorker()
    worker.model = dataclasses.replace(MODEL, n_vocab=100_000)
    lines = measured(planted, tmp_path, worker)
    (path,) = tmp_path.glob("*.jsonl")
    contents = read([path])
    assert [*contents.records, *contents.requests] == sorted(lines, key=lambda line: isinstance(line, RequestRecord))
    assert list(range(N_PROMPT)) in worker.prompts  # the tokens that the server made of the prompt
    requests = [record.request for record in contents.requests if not record.request.asked.warmup]
    assert [request.asked.repeat for request in requests] == [0, 1]
    for request in requests:
        pieces = request.pieces
        assert pieces is not None and pieces.template_ns is not None and pieces.tokenize_ns is not None
        assert len(pieces.http_ns) == len(pieces.tokenize_ns) == overhead_blocks.N_QUESTIONS
        assert min(pieces.template_ns) >= 30 * MS and min(pieces.tokenize_ns) >= 20 * MS
        assert request.headers_ns is not None and request.headers_ns >= 65 * MS
        assert pieces.whole is not None and pieces.whole.gen_ms == 68.0
    (row,) = overhead_parts.rows(contents.records, contents.requests)
    ttft, tpot = row.phases
    assert (row.n_prompt, row.n_gen, row.n_blocks) == (N_PROMPT, N_GEN, 2)
    assert (ttft.in_process_ms, tpot.in_process_ms) == (N_PROMPT + 1, 11)
    assert tpot.ms(overhead_parts.STREAM) == pytest.approx(1.0)
    assert tpot.ms(overhead_parts.SAMPLING) == pytest.approx(2.0)
    assert ttft.ms(overhead_parts.OTHERWISE) == pytest.approx(200 - N_PROMPT - 1)
    code, shown, _ = run_lab("show", path)
    assert code == 0 and "means of 2 blocks" in shown and overhead_parts.UNEXPLAINED in shown
    code, shown, _ = run_lab("show", "--json", path)
    assert code == 0 and len(json.loads(shown)["overhead"][0]["rows"][0]["phases"]) == 2
    code, shown, _ = run_lab("plot", path)
    assert code == 0 and "-ways.png" in shown


def test_a_server_with_another_model_is_refused(planted: str, tmp_path: Path) -> None:
    worker = SamplingWorker()
    worker.model = dataclasses.replace(MODEL, n_vocab=N_PROMPT - 1)
    with pytest.raises(LabError, match="not those of tiny"):
        measured(planted, tmp_path, worker)


def test_what_cannot_be_is_said_before(planted: str, fake_worker: FakeWorker) -> None:
    with connect(planted) as server:
        for asked, words in (
            ({"blocks": 0}, "--blocks 0"),
            ({"gen": 1}, "--gen 1"),
            ({"prompt": "random"}, "random tokens"),
            ({"prompt_len": "100000"}, "do not fit into the server's context of 100,000 tokens"),
        ):
            with pytest.raises(LabError, match=words):
                overhead_blocks.prepare(server, fake_worker, **asked)  # type: ignore[arg-type]
    code, _, error = run_lab("overhead")
    assert code == 1 and "No server is given" in error
    code, _, error = run_lab("overhead", "--url", planted, "--timeout", 0)
    assert code == 1 and "--timeout 0 is not possible" in error


def test_samplers_are_those_that_the_server_names(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {
        "samplers": ["penalties", "top_k", "min_p", "temperature"],
        "top_k": 40,
        "min_p": 0.05,
        "temperature": 0.8,
    }

    server: Any = SimpleNamespace(temperature=0.0, access=SimpleNamespace(root="http://127.0.0.1:1"))

    def answer(given: dict[str, Any]) -> Any:
        return lambda *_: JsonReply(200, {"default_generation_settings": {"params": given}}, None)

    monkeypatch.setattr(overhead_blocks, "ask", answer(params))
    assert overhead_blocks.samplers(server) == (("top_k", 40.0), ("min_p", 0.05), ("temperature", 0.0))
    monkeypatch.setattr(overhead_blocks, "ask", answer({**params, "repeat_penalty": 1.1}))
    assert overhead_blocks.samplers(server) is None


def test_pieces_are_read_back_as_written() -> None:
    record = make_request()
    assert parse_line(f"{to_json(record)}\n".encode()) == record
    assert json.loads(to_json(record))["request"]["pieces"]["http_ns"] == [MS, 2 * MS, 50 * MS]
    assert lab.overhead is overhead_blocks.overhead


def test_the_engine_times_the_samplers_of_a_server(mini: Path) -> None:
    settings = dataclasses.replace(SETTINGS_OF_RUNS, n_ctx=64, n_threads=1, n_threads_batch=1)
    with Worker() as worker:
        worker.load(mini, settings)
        worker.new_context(settings)
        chain = (("top_k", 40.0), ("typ_p", 1.0), ("top_p", 0.95), ("min_p", 0.05), ("temperature", 0.0))
        spent = worker.time_sampling(chain, 5)
        assert len(spent) == 5 and min(spent) > 0
        with pytest.raises(LabError, match="does not know the sampler dry"):
            worker.time_sampling((("dry", 1.0),), 1)


def test_a_server_without_times_and_tokenizer_gets_a_prompt_of_as_many_tokens(tmp_path: Path) -> None:
    settings = NullSettings(models={"null": Behaviour(first_ms=5.0, gap_ms=1.0)}, has_tokenize=False, n_slots=None)
    worker = SamplingWorker()
    with null_server(settings) as server:
        lines = measured(server.url, tmp_path, worker, n_blocks=1)
    contents = read(tmp_path.glob("*.jsonl"))
    assert len(lines) == len(contents.records) + len(contents.requests)
    (request,) = [record.request for record in contents.requests if not record.request.asked.warmup]
    assert request.pieces is not None and len(request.pieces.http_ns) == overhead_blocks.N_QUESTIONS
    assert request.pieces.template_ns is None and request.pieces.whole is None
    assert len(worker.prompts[-1]) == N_PROMPT
    (row,) = overhead_parts.rows(contents.records, contents.requests)
    assert [part.name for part in row.phases[0].parts] == [overhead_parts.ENGINE, overhead_parts.HTTP]
    assert overhead_parts.STREAM in row.phases[1].hidden


def test_the_command_measures_both_sides(planted: str, embedded: Path, tmp_path: Path) -> None:
    options = ("-m", embedded, "-p", N_PROMPT, "-n", 4, "--blocks", 1, "-t", 1, "-o", tmp_path)
    code, shown, error = run_lab("overhead", "--url", planted, *options, "--json")
    assert code == 0, error
    document = json.loads(shown)
    (session,) = document["sessions"]
    assert [phase["name"] for phase in session["rows"][0]["phases"]] == ["TTFT", "TPOT"]
    assert Path(document["results"]).exists() and all(Path(plot).exists() for plot in document["plots"])
    (run,) = [record.run for record in read([document["results"]]).records if not record.run.warmup]
    assert (run.n_prompt, run.n_gen, run.block, run.prompt_offset) == (N_PROMPT, 4, 0, None)
    assert sum(run.steps.n_tokens) == N_PROMPT + 3
