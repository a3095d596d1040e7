"""`lab why`: planted causes are found with their factors, and what is not known is unknown."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lab.core import results
from lab.core.record import Record, Settings
from lab.core.request import Asked, ServerTimings, Usage
from lab.core.script import Script
from lab.errors import LabError
from lab.features.predict.ranking import predict
from lab.features.why import (
    facts,
    machines,
    measured_now,
    pairing,
    path_trial,
    permission,
    question as asking,
    section as section_of_answer,
    setups,
)
from lab.features.why.answer import Question, WhyAnswer, answer
from lab.features.why.command import each_once
from lab.features.why.conclusion import conclude
from lab.features.why.figure import DECODE, PREFILL, PROMPT, STEPS, Figure
from lab.features.why.parts import (
    CONCURRENCY,
    COUNTED,
    EQUAL,
    NOT_KNOWN,
    NOT_MEASURED,
    SAMPLING,
    SPECULATION,
    GapPart,
    Pair,
)
from lab.features.why.question import why
from lab.features.why.readers import text as reader
from lab.features.why.section import factor_cell, orders_cell
from lab.models import own_sheet
from lab.process.wire import Outcome
from lab.runner import builds, disturbances
from lab.runner.progress import Status
from lab.show import canvas
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker, died
from tests.support.pasted import PRINTED
from tests.support.records import SETTINGS, make_record, make_run, steps_of
from tests.support.requests import make_request, make_request_record

pytestmark = pytest.mark.usefixtures("simulated", "undisturbed")

PER_POSITION = 0.01
MODEL = "smollm2-135m"
TEXTS = {sample.name: sample.text for sample in PRINTED}
SAMPLE = "results/sample-smollm2-135m-amd-epyc.jsonl"


def ms_per_token(settings: Settings) -> float:
    """The planted machine: no flash attention costs 1.3x, a q8_0 cache 1.2x, new libs 1.25x."""
    if settings.lib and settings.lib.endswith("new"):
        return 12.5
    milliseconds = 10 * 2 / settings.n_threads
    if (settings.flash_attn_resolved or settings.flash_attn) == "off":
        milliseconds *= 1.3
    if settings.type_k == "q8_0":
        milliseconds *= 1.2
    return milliseconds


class Planted(FakeWorker):
    """A fake engine whose decode depends on settings and position."""

    def new_context(self, asked: Settings) -> Settings:
        resolved = "off" if asked.flash_attn == "off" else "on"
        self.settings = dataclasses.replace(asked, flash_attn_resolved=resolved)
        return self.settings

    def run(
        self,
        script: Script,
        watch: Any,
    ) -> Outcome:
        outcome = super().run(script, watch)
        slower = ms_per_token(self.settings) / 10
        steps = steps_of(script, 1, 10 * slower - 1, PER_POSITION * slower)
        return dataclasses.replace(outcome, steps=steps)


def session(
    folder: Path,
    name: str,
    n_prompt: int = 64,
    n_runs: int = 4,
    slower: float = 1.0,
    **changes: Any,
) -> str:
    """A results file of the planted machine, with these settings."""
    n_threads = changes.get("n_threads", SETTINGS.n_threads)
    usual = {
        "flash_attn_resolved": "on",
        "n_batch": 2048,
        "n_ubatch": 512,
    }
    settings = dataclasses.replace(
        SETTINGS,
        **{
            **usual,
            "n_threads_batch": n_threads,
            **changes,
        },
    )
    slower *= ms_per_token(settings) / 10
    path = folder / f"{name}.jsonl"
    for repeat in range(n_runs):
        run = make_run(
            n_prompt,
            24,
            repeat,
            decode_ms=(10 * slower - 1) * (1 + 0.001 * repeat),
            per_position_ms=PER_POSITION * slower,
        )
        run = dataclasses.replace(run, started_at=f"2026-01-01T00:00:0{repeat}Z")
        results.save(path, make_record(run, session=name, settings=settings))
    return str(path)


def figures(a: str, b: str) -> tuple[Figure, Figure]:
    """The figures of two files that are compared."""
    return pairing.nearest(pairing.figures_of(a)[0], pairing.figures_of(b)[0])


def question(folder: Path, **more: Any) -> Question:
    """A question with a trial on the planted machine."""
    usual = {
        "budget_s": 60,
        "specs": (MODEL, MODEL),
        "folder": folder / "out",
    }
    return Question(
        **{
            **usual,
            "new_worker": Planted,
            **more,
        }
    )


def answered(a: str, b: str, folder: Path, **more: Any) -> WhyAnswer:
    """The answer on two files, with a trial on the planted machine."""
    first, second = figures(a, b)
    return answer(first, second, question(folder, **more))


def part(explained: WhyAnswer, name: str) -> GapPart:
    """A part by its name."""
    return next(each for each in explained.parts if each.name == name)


def pasted(name: str, phase: str = DECODE) -> Figure:
    """The first figure of a sample in a phase."""
    return next(figure for figure in reader.parse(TEXTS[name]) if figure.phase == phase)


def with_records(figure: Figure, records: Sequence[Record]) -> Figure:
    return dataclasses.replace(figure, records=tuple(records))


def with_facts(figure: Figure, **values: Any) -> Figure:
    """The figure with these facts, or without those that are None."""
    known = {name: fact for name, fact in figure.facts.items() if name not in values}
    return dataclasses.replace(figure, facts=known | facts.stated(values))


# What is counted


def test_a_rate_that_includes_the_prompt_is_arithmetic() -> None:
    (a,) = reader.parse(
        "llama_perf_context_print: eval time = 1000.00 ms / 100 runs "
        "( 10.00 ms per token, 100.00 tokens per second)"
    )
    kobold = reader.parse(
        "CtxLimit:1100/8152, Amt:100/512, Process:4.00s (250.00T/s), "
        "Generate:1.00s (100.00T/s), Total:5.00s (20.00T/s)"
    )
    b = next(figure for figure in kobold if figure.tps == 20)
    explained = answer(a, b)
    assert explained.pair.letters == ("A", "B")
    assert explained.causes[0].name == COUNTED
    assert part(explained, COUNTED).factor == pytest.approx(99 / 20)
    assert explained.rest.factor == pytest.approx(100 / 99, rel=1e-6)
    sentence = conclude(explained).sentence
    assert "B divides by prefill too: 4.00 s of 5.00 s" in sentence
    assert "Its decode alone is 99" in sentence


def test_the_picture_names_both_sides_and_what_its_colours_mean() -> None:
    (a,) = reader.parse(
        "eval time = 1000.00 ms / 100 runs ( 10.00 ms per token, 100.00 tokens per second)"
    )
    b = dataclasses.replace(a, tps=50.0)
    explained = answer(a, b)
    figure = canvas.drawn(lambda drawing: section_of_answer.draw(explained, drawing), (11, 5))

    (ax,) = figure.axes
    title, *sides = ax.get_title().split("\n")
    assert title == "Why A is 2x as fast as B"
    assert [side[:3] for side in sides] == ["A: ", "B: "]
    assert ax.get_legend_handles_labels()[1] == ["not explained"]
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == ["A: 100 tokens/s", "not explained", "B: 50.0 tokens/s"]


def test_a_whole_answer_uses_the_prefill_rate_of_the_other_and_says_so() -> None:
    (webui,) = reader.parse(
        "Output generated in 51.24 seconds (6.67 tokens/s, 342 tokens, context 7323, seed 1)"
    )
    log = reader.parse(
        "prompt eval time = 31764.47 ms / 7318 tokens "
        "( 4.34 ms per token, 230.38 tokens per second)\n"
        "eval time = 19447.79 ms / 342 tokens ( 56.86 ms per token, 17.59 tokens per second)\n"
    )
    explained = answer(log[1], webui)
    counted = part(explained, COUNTED)
    assert counted.factor == pytest.approx(2.63, rel=0.01)
    assert "prefill rate: range unknown" in counted.how
    assert (
        "if it read its prompt as fast as the other and nothing was cached" in counted.reason
    )
    assert counted.range is None
    assert explained.rest.range is None
    assert "range unknown" in conclude(explained).sentence


def test_a_whole_answer_without_its_prefill_is_unknown_and_named_first() -> None:
    (webui,) = reader.parse("Output generated in 51.24 seconds (6.67 tokens/s, 342 tokens)")
    explained = answer(pasted("llama-cli"), webui)
    assert part(explained, COUNTED).how == NOT_KNOWN
    assert "divides by prefill too, whose time is not known" in part(explained, COUNTED).reason
    assert "may come from what is counted: B divides by" in conclude(explained).sentence


def test_a_batch_is_no_single_stream() -> None:
    single, batch = (
        figure for figure in reader.parse(TEXTS["batched"]) if figure.phase == DECODE
    )
    explained = answer(single, batch)
    assert part(explained, COUNTED).how == EQUAL
    concurrency = part(explained, CONCURRENCY)
    assert concurrency.how == NOT_KNOWN
    assert concurrency.reason == "B sums up 4 answers, 51.4 tokens/s each (205 together)"
    assert explained.ratio == pytest.approx(78.54 / 51.365)
    assert "concurrency" in conclude(explained).sentence


def test_the_sentence_names_the_side_that_explains_the_gap() -> None:
    fast = Figure(
        source="mlx_lm", tps=40, phase=DECODE, counts=pasted("mlx_lm").counts, n_gen=4, depth=9
    )
    slow = Figure(
        source="lab",
        tps=30,
        phase=DECODE,
        counts=STEPS,
        n_gen=4,
        depth=9,
    )
    sentence = conclude(answer(fast, slow)).sentence
    assert sentence.startswith("Most of it is how A counts: A counts the first token")
    assert "Its decode alone is 30.0 tokens/s" in sentence


def test_a_server_leaves_open_what_its_log_does_not_say() -> None:
    explained = answer(pasted("llama-cli"), pasted("server, speculative"))
    assert part(explained, SAMPLING).reason.startswith(
        "not given for A and B; what llama-server's"
    )
    speculation = part(explained, SPECULATION).reason
    assert speculation.startswith(
        "not given for A; B drafts tokens, 72 % of 3,320 were accepted"
    )
    assert "B counts the first token" in part(explained, COUNTED).reason
    assert part(explained, CONCURRENCY).how == NOT_KNOWN


# Depth, settings, model


def test_depth_is_unknown_where_only_processed_tokens_are_named() -> None:
    explained = answer(pasted("llama-cli"), pasted("server, old"))
    depth = part(explained, "depth")
    assert depth.how == NOT_KNOWN
    assert not depth.changes  # so nothing is measured at a wrong depth
    assert "B at least 31,293, besides cached ones" in depth.reason


def test_a_model_is_the_same_by_its_file_or_its_parameters(tmp_path: Path) -> None:
    (recorded,), (bench,) = (
        [figure for figure in side if figure.phase == DECODE and figure.depth in (64, 0)][:1]
        for side in (
            pairing.figures_of(session(tmp_path, "a"))[0],
            reader.parse(TEXTS["llama-bench, several rows"]),
        )
    )
    assert part(answer(recorded, bench), "model").how == NOT_KNOWN
    same = with_facts(recorded, parameters=134_515_008, quantization="Q4_1")
    assert part(answer(same, bench), "model").how.startswith(
        "equal by quantization and number"
    )
    named = with_facts(bench, model="Tiny", quantization="Q4_0", parameters=None)
    assert part(answer(recorded, named), "model").how == "equal by name"


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("llama-3.2-1b", "Llama-3.2-1B-Instruct-Q4_K_M.gguf", True),
        ("qwen2.5-7b", "qwen2.5-7b", True),
        ("granite", "granite-3.0-2b-instruct", False),
        ("llama 7B", "CodeLlama 7B", False),
        ("llama-1b", "tinyllama-1.1b", False),
        ("mistral 7B", "mixtral 8x7B", False),
        ("qwen2.5-7b", "qwen2.5-72b", False),
    ],
)
def test_a_name_within_another_is_the_same_model_if_it_says_the_size(
    first: str, second: str, is_same: bool
) -> None:
    plain = Figure(source="a text", tps=1, phase=DECODE, counts=STEPS)
    fast = with_facts(plain, model=first)
    slow = with_facts(plain, model=second)
    assert bool(setups.sameness(fast, slow)) == is_same
    different = with_facts(slow, parameters=8_000_000_000)
    assert not setups.sameness(with_facts(fast, parameters=1_000_000_000), different)


def test_unknown_flash_attention_of_a_record_is_no_fact() -> None:
    imported = dataclasses.replace(SETTINGS, flash_attn=None, flash_attn_resolved=None)
    assert "flash_attn" not in setups.facts_of(make_record(settings=imported), "tiny")
    assert "flash_attn" in setups.facts_of(make_record(settings=SETTINGS), "tiny")


def test_settings_of_llama_bench_need_no_measurement_where_they_are_equal(
    tmp_path: Path,
) -> None:
    mine = session(tmp_path, "a", n_threads=8)
    bench = tmp_path / "bench.json"
    row = TEXTS["llama-bench json"].replace('"flash_attn": 0', '"backends": "CPU"')
    bench.write_text(row)
    explained = answered(mine, str(bench), tmp_path, budget_s=0)
    names = [each.name for each in explained.parts]
    assert "threads" not in names
    assert "other settings" not in names


@pytest.mark.parametrize(
    ("name", "factor", "changes"),
    [
        ("threads", 2.0, {"n_threads": 1}),
        ("flash attention", 1.3, {"flash_attn": "off", "flash_attn_resolved": "off"}),
        ("cache type", 1.2, {"type_k": "q8_0"}),
        ("depth", (9 + 5 + 1) / (9 + 0.76 + 1), {"n_prompt": 488}),
    ],
)
def test_a_planted_cause_is_named_with_its_factor(
    tmp_path: Path, name: str, factor: float, changes: dict[str, Any]
) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", **changes)
    explained = answered(a, b, tmp_path)
    assert [cause.name for cause in explained.causes] == [name]
    assert part(explained, name).factor == pytest.approx(factor, rel=0.02)
    assert "measured here" in part(explained, name).how
    assert abs(explained.rest.log) < 0.03
    assert explained.causes[0].name in conclude(explained).sentence


def test_a_difference_that_was_not_measured_is_not_called_unknown(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    asked = ("why", a, b)
    explained = answered(a, b, tmp_path, budget_s=0, asked_again=asked[1:])
    threads = part(explained, "threads")
    assert threads.how == "not measured"
    assert not threads.has_factor
    assert not threads.is_cause
    assert threads.reason.endswith("; not measured: --budget 0")
    assert conclude(explained).command == f"lab why {a} {b}"


def test_settings_that_one_side_does_not_give_are_named_with_the_side(tmp_path: Path) -> None:
    mine = session(tmp_path, "a", n_threads=8)
    bench = tmp_path / "bench.txt"
    bench.write_text("| model | test | t/s |\n| smollm2 135m | tg24 @ d64 | 50 |")
    more = part(answered(mine, str(bench), tmp_path, budget_s=0), "more settings")
    assert more.how == NOT_KNOWN
    assert more.reason.startswith("threads, threads_batch 8 in A, not given for B; ")
    assert "for A" not in more.reason


def test_two_causes_are_told_apart_and_the_rest_is_one(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", 488, n_threads=1)
    explained = answered(a, b, tmp_path)
    assert [cause.name for cause in explained.causes] == ["threads", "depth"]
    assert math.prod(each.factor for each in explained.parts) == pytest.approx(explained.ratio)
    assert part(explained, "threads").factor == pytest.approx(2, rel=0.03)
    assert explained.rest.half is not None
    assert abs(explained.rest.log) < explained.rest.half
    assert explained.path is not None
    variants = {record.run.variant for record in results.read([explained.path]).records}
    assert len(variants) == 4  # two ways between the same ends


def test_what_is_unknown_stays_in_the_rest(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", slower=2.0)
    explained = answered(a, b, tmp_path)
    assert not explained.causes
    assert explained.rest.factor == pytest.approx(2, rel=0.01)
    assert "not explained: 2x" in conclude(explained).sentence


def test_equal_setups_name_no_cause(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", slower=1.04)
    explained = answered(a, b, tmp_path)
    assert not explained.causes
    assert explained.path is None
    assert conclude(explained).sentence.startswith("B is not slower than A for certain")


def test_depth_comes_from_the_records_if_they_have_both_positions(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", 488)
    session(tmp_path, "c")
    records = results.read([session(tmp_path, "c", 488)]).records
    first, second = figures(a, b)
    depth = part(answer(first, second, Question(records=records)), "depth")
    assert depth.how == "from the records, 1 session"
    assert depth.factor == pytest.approx(15 / 10.76, rel=0.02)
    twice = Question(records=[*records, *records, *first.records])
    assert (
        part(answer(first, second, twice), "depth").half == depth.half
    )  # a record counts once
    another = [
        dataclasses.replace(record, model=dataclasses.replace(record.model, name="another"))
        for record in records
    ]
    of_another = answer(first, second, Question(records=another))
    assert part(of_another, "depth").how == NOT_MEASURED


def test_two_texts_without_a_machine_say_so_once() -> None:
    explained = answer(pasted("ollama"), pasted("llama-cli"))
    machine = part(explained, "machine")
    assert machine.how == NOT_KNOWN
    assert machine.reason == "not given for A and B (--device)"


# The trial


def test_disturbed_trials_are_said_and_are_no_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disturbances, "disturbances", lambda record: {disturbances.OTHERS: 1.0}
    )
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    explained = answered(a, b, tmp_path)
    threads = part(explained, "threads")
    assert threads.n_disturbed == threads.n_runs > 0
    assert (
        f"{threads.n_runs} of {threads.n_runs} runs of the trial were disturbed"
        in threads.reason
    )
    assert factor_cell(threads).endswith("!!")
    assert "threads" not in [cause.name for cause in explained.causes]
    sentence = conclude(explained).sentence
    assert sentence.startswith("The main cause may be threads (2x, ")


def test_a_factor_whose_range_says_nothing_is_no_cause() -> None:
    wide = GapPart("threads", math.log(14.4), math.log(7), "measured here")
    narrow = GapPart("threads", math.log(14.4), math.log(1.2), "measured here")
    assert not wide.is_cause
    assert narrow.is_cause


def test_both_orders_are_shown_if_they_differ() -> None:
    same = GapPart("threads", 0.5, 0.01, "measured here", orders=(0.5, 0.52))
    apart = GapPart("threads", 0.5, 0.01, "measured here", orders=(0.4, 0.6))
    assert not same.depends_on_order
    assert apart.depends_on_order
    assert orders_cell(same) == ""
    assert orders_cell(apart) == "1.49x or 1.82x"


class Unlucky(Planted):
    """The planted machine. On one thread the runs with these numbers end in an error."""

    errors: ClassVar[dict[int, LabError]] = {}
    n_runs = 0

    def run(self, script: Script, watch: Any) -> Outcome:
        n_earlier = len(self.scripts)
        outcome = super().run(script, watch)
        is_counted = len(self.scripts) > n_earlier and len(outcome.token_ids) > 2
        if is_counted and self.settings.n_threads == 1:
            cls = type(self)
            cls.n_runs += 1
            if cls.n_runs in cls.errors:
                raise cls.errors[cls.n_runs]
        return outcome


def unlucky(errors: dict[int, LabError]) -> type[Unlucky]:
    return type("OnceUnlucky", (Unlucky,), {"errors": errors})


def test_a_variant_that_fails_late_leaves_the_earlier_blocks(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    full = LabError("There is no memory left.", "")
    explained = answered(a, b, tmp_path, new_worker=unlucky({8: full}))
    threads = part(explained, "threads")
    assert threads.factor == pytest.approx(2, rel=0.02)
    assert threads.how.startswith("measured here, ")
    assert explained.path is not None
    assert explained.path.exists()
    assert explained.notes[0].startswith("The trial ended early. B: ")
    assert "no memory left" in explained.notes[0]


def test_a_variant_that_fails_at_once_leaves_the_file_and_its_reason(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    full = LabError("There is no memory left.", "")
    explained = answered(a, b, tmp_path, new_worker=unlucky({2: full}))
    threads = part(explained, "threads")
    assert threads.how == NOT_MEASURED
    assert "no memory left" in threads.reason
    assert explained.path is not None
    assert any(not record.run.is_timed for record in results.read([explained.path]).records)


@pytest.mark.parametrize("crashed", [2, 4, 6])
def test_a_crash_mixes_no_blocks(tmp_path: Path, crashed: int) -> None:
    """The machine is ten times slower from the crash on: a mixed block would show it."""

    class Slower(Unlucky):
        def run(self, script: Script, watch: Any) -> Outcome:
            outcome = super().run(script, watch)
            if type(self).n_runs < crashed:
                return outcome
            steps = {
                name: tuple(10 * ns for ns in getattr(outcome.steps, name))
                for name in ("start_ns", "ready_ns", "end_ns")
            }
            return dataclasses.replace(
                outcome, steps=dataclasses.replace(outcome.steps, **steps)
            )

    Slower.errors = {crashed: died()}
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    explained = answered(a, b, tmp_path, new_worker=Slower)
    threads = part(explained, "threads")
    assert threads.half is not None
    assert threads.half < 0.02
    assert threads.factor == pytest.approx(2, rel=0.02)


def test_the_cheapest_changes_are_measured_not_the_first(tmp_path: Path) -> None:
    """Seven settings, a model and a depth differ: the six settings are the cheapest."""
    changes: dict[str, dict[str, Any]] = {
        "depth": {"prompt_len": 4000},
        "model": {"model": "llama-3.2-1b"},
        **{f"setting {number}": {"threads": number} for number in range(1, 8)},
    }
    parts = [GapPart(name, reason="", changes=change) for name, change in changes.items()]
    asked = path_trial.PathTrial(
        {"prompt_len": 64}, parts, False, 0, tmp_path, lambda status: None
    )
    measured = path_trial.run(asked)
    assert set(measured.parts) == set(changes)
    left_out = {name for name, part in measured.parts.items() if "6 changes" in part.reason}
    assert left_out == {"depth", "model", "setting 7"}


def test_what_does_not_fit_into_the_budget_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes a second per 100 tokens: threads fit, and a depth of 4,000 does not."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Planted):
        def run(
            self,
            script: Script,
            watch: Any,
        ) -> Outcome:
            outcome = super().run(script, watch)
            now[0] += sum(outcome.steps.n_tokens) / 100
            return outcome

    first, second = figures(
        session(tmp_path, "a"),
        session(tmp_path, "b", 4000, n_threads=1),
    )
    asked = question(tmp_path, budget_s=40, new_worker=Slow)
    explained = answer(first, second, asked)
    assert part(explained, "threads").factor == pytest.approx(2, rel=0.02)
    assert now[0] <= 41
    assert part(explained, "depth").how == NOT_MEASURED
    assert "not measured: needs about" in part(explained, "depth").reason
    now[0] = 0.0
    explained = answer(first, second, dataclasses.replace(asked, budget_s=0.5))
    assert explained.path is None
    assert part(explained, "threads").how == NOT_MEASURED


def test_both_builds_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "folder_of", lambda lib: lib)
    monkeypatch.setattr(builds, "name_of", lambda lib: lib)
    quick, slow = figures(
        session(tmp_path, "a"),
        session(tmp_path, "b", slower=1.25),
    )
    cases = [
        (quick, slow, ("/x/old", "/x/new")),
        (slow, quick, ("/x/new", "/x/old")),
    ]
    for a, b, libs in cases:
        explained = answer(a, b, question(tmp_path, libs=libs))
        assert [cause.name for cause in explained.causes] == ["build"]
        build = part(explained, "build")
        assert "x/new in" in build.reason
        assert build.factor == pytest.approx(1.25, rel=0.02)
        assert abs(explained.rest.log) < 0.02
    with pytest.raises(LabError, match="--lib is given 1 times"):
        why("35 tokens/s", "20 tokens/s", lib=("/x/old",))


# Machines and servers


@pytest.mark.parametrize(
    ("name", "changes", "command"),
    [
        (
            "build",
            {"llama_cpp_commit": "another"},
            "lab why A.jsonl B.jsonl --lib OLD --lib NEW",
        ),
        ("system and driver", {"os": "another"}, "lab doctor"),
        ("machine state (B: it ran on battery)", {"power": "battery"}, "lab doctor"),
    ],
)
def test_a_regression_names_the_build_or_the_system(
    tmp_path: Path, name: str, changes: dict[str, Any], command: str
) -> None:
    quick, slow = figures(
        session(tmp_path, "a"),
        session(tmp_path, "b", slower=2.0),
    )
    another = dataclasses.replace(slow.records[0].machine, **changes)
    records = [dataclasses.replace(record, machine=another) for record in slow.records]
    conclusion = conclude(answer(quick, with_records(slow, records)))
    assert f"The only difference without a known factor is {name}" in conclusion.sentence
    assert conclusion.command == command


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    sides = figures(
        session(tmp_path, "a"),
        session(tmp_path, "b", slower=2.0),
    )
    changed = list[Figure]()
    for figure, letter in zip(sides, "ab", strict=True):
        file = dataclasses.replace(figure.records[0].model, sha256=64 * letter)
        records = [dataclasses.replace(record, model=file) for record in figure.records]
        changed.append(with_records(figure, records))
    assert "the files differ" in part(answer(changed[0], changed[1]), "model").reason


def test_the_range_of_disturbed_runs_comes_from_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = figures(
        session(tmp_path, "a", n_runs=8),
        session(tmp_path, "b", n_runs=8),
    )
    assert machines.of_state(Pair(quick, slow)).how == EQUAL
    disturbed = {id(record) for record in slow.records[4:]}

    def amounts(record: Record) -> dict[str, float]:
        return {disturbances.OTHERS: 1.0} if id(record) in disturbed else {}

    monkeypatch.setattr(disturbances, "disturbances", amounts)
    state = machines.of_state(Pair(quick, slow))
    assert state.factor == pytest.approx(1.002, abs=0.001)
    assert state.half is not None
    assert 0 < state.half < 0.01
    assert state.how.startswith("from the records")
    assert state.reason == "B: other processes used 1 core in 4 of 8 runs"
    disturbed |= {id(record) for record in slow.records[2:]}
    assert machines.of_state(Pair(quick, slow)).how == NOT_KNOWN


def test_another_machine_is_predicted_and_marked_so(tmp_path: Path) -> None:
    text = "| test | t/s |\n| tg100 @ d100 | {} |"
    quick, slow = (reader.parse(text.format(rate))[0] for rate in ("200.0", "80.0"))
    spec = "llama-3.2-3b:Q4_K_M"
    asked = Question(specs=(spec, spec), folder=tmp_path)
    a, b = asking.with_devices((quick, slow), "RTX 4090,rtx-3060", None)
    machine = part(answer(a, b, asked), "machine")
    assert machine.how == "predicted, 90 % ranges"
    assert machine.reason == "rtx-4090 in A, rtx-3060 in B"
    assert machine.range is not None
    assert 1.3 < machine.factor < 5
    assert machine.range[0] < 1008 / 360 < machine.range[1]
    assert part(answer(quick, slow, asked), "machine").how == NOT_KNOWN


@pytest.mark.parametrize("form", ["datasheet", "words"])
def test_a_device_is_what_predict_takes(form: str, tmp_path: Path) -> None:
    row = own_sheet.SheetRow(2, own_sheet.READ_RATE, 51.2)
    sheet = own_sheet.OwnSheet("a machine", "cores=8 simd=avx2", "smollm2-135m:Q4_1", (row,))
    path = tmp_path / "datasheet.toml"
    path.write_text(own_sheet.text_of_sheet(sheet), encoding="utf-8")
    asked = str(path) if form == "datasheet" else "gbps=51.2 cores=8 avx2"
    text = "| test | t/s |\n| tg100 @ d100 | {} |"
    quick, slow = (reader.parse(text.format(rate))[0] for rate in ("200.0", "30.0"))
    a, b = asking.with_devices((quick, slow), f"{asked},rtx-4090", None)
    question = Question(specs=("llama-3.2-3b:Q4_K_M",) * 2, folder=tmp_path)
    machine = part(answer(a, b, question), "machine")
    assert machine.how == "predicted, 90 % ranges"
    assert machine.reason == f"{asked.rpartition('/')[2]} in A, rtx-4090 in B"
    by_predict = [
        predict("100", 100, "llama-3.2-3b:Q4_K_M", device)[0] for device in (asked, "rtx-4090")
    ]
    middles = [math.sqrt(row.tpot_s[0] * row.tpot_s[1]) for row in by_predict]
    assert machine.factor == pytest.approx(middles[1] / middles[0])


def test_a_title_has_no_folders_of_a_path() -> None:
    text = "| model | test | t/s |\n| /models/folder/tiny.gguf | tg100 | 200.0 |"
    (figure,) = reader.parse(text)
    (named, _) = asking.with_devices((figure, figure), None, None)
    assert "tiny.gguf" in named.label
    assert "folder" not in named.label


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(LabError, match="no device named 'rtx-99'"):
        why(
            "35 tokens/s",
            "20 tokens/s",
            budget=0,
            device="rtx-99",
        )


@pytest.mark.parametrize(
    ("phase", "name", "factor", "cached"),
    [
        (DECODE, "HTTP", 22.5 / 20, 1.0),
        (PREFILL, "HTTP, template and tokenizing", 100 / 80, 0.8),
    ],
)
def test_a_server_is_taken_apart_by_its_own_times(
    phase: str, name: str, factor: float, cached: float
) -> None:
    request = make_request(
        timings=ServerTimings(
            n_gen=6,
            gen_ms=5 * 20e-6,
            prompt_ms=80e-6,
        ),
        usage=Usage(
            prompt_tokens=10,
            completion_tokens=6,
            cached_tokens=2,
        ),
        asked=Asked(n_prompt=10, n_gen=6, temperature=0),
    )
    counts = PROMPT if phase == PREFILL else STEPS
    depth = 0 if phase == PREFILL else 10
    shared: dict[str, Any] = {
        "phase": phase,
        "counts": counts,
        "depth": depth,
    }
    shared |= {
        "n_prompt": 10,
        "n_gen": 6,
        "spread": 0.0,
        "between": 0.0,
    }
    engine = Figure(
        source="lab",
        tps=1e9,
        records=(make_record(),),
        **shared,
    )
    requests = 3 * (make_request_record(request),)
    server = Figure(
        source="server",
        tps=0.9e9,
        requests=requests,
        **shared,
    )
    explained = answer(engine, server)
    http = part(explained, name)
    assert http.factor == pytest.approx(factor)
    assert http.how == "from B's own times, 3 requests"
    assert part(explained, "sampling").how == EQUAL
    assert part(explained, "slots").reason.startswith("4 in B")
    assert part(explained, "cache").factor == pytest.approx(cached)
    few = answer(engine, dataclasses.replace(server, requests=requests[:2]))
    assert "only 2 requests" in part(few, name).reason


# A stranger's model, and the command


def test_a_model_that_a_file_names_is_not_loaded(tmp_path: Path) -> None:
    quick, slow = figures(
        session(tmp_path, "a"),
        session(tmp_path, "b", n_threads=1),
    )
    stranger = dataclasses.replace(
        slow.records[0].model,
        source="hub",
        repo="attacker/repo",
        file="evil.gguf",
        revision="main",
    )
    sides = list[Figure]()
    for figure in (quick, slow):
        records = [dataclasses.replace(record, model=stranger) for record in figure.records]
        sides.append(with_records(figure, records))
    assert permission.allowed_spec(sides[0]) is None
    explained = answer(sides[0], sides[1], question(tmp_path, specs=(None, None)))
    reason = part(explained, "threads").reason
    assert "hf:attacker/repo/evil.gguf@main is named by a file" in reason
    assert "--model hf:attacker/repo/evil.gguf@main" in reason
    assert explained.path is None


def test_the_model_of_the_package_is_loaded_without_asking() -> None:
    (records,) = {record.model.name for record in results.read([SAMPLE]).records}
    figure = pairing.figures_of(SAMPLE)[0][0]
    assert permission.allowed_spec(figure) == records == MODEL


def test_the_command_prints_the_table_and_ends_with_a_sentence_and_a_command(
    tmp_path: Path,
) -> None:
    a = session(tmp_path, "a")
    b = session(tmp_path, "b", n_threads=1)
    code, out, err = run_lab("why", a, b, "--budget", "0", "-o", tmp_path)
    assert code == 0, err
    assert "A is 2x as fast as B" in out
    assert "not explained" in out
    assert (tmp_path / "a-and-b-why.png").exists()
    run_lab("why", a, b, "--budget", "0", "-o", tmp_path)
    assert (tmp_path / "a-and-b-2-why.png").exists()  # the first one is not overwritten


def test_json_has_what_the_table_has(tmp_path: Path) -> None:
    a = session(tmp_path, "a")
    code, out, _ = run_lab("why", a, "35 tokens/s", "--budget", "0", "--json", "--no-plot")
    document = json.loads(out)
    assert code == 0
    assert document["B"]["counts"] == "unknown"
    assert document["slower"] == "B"
    assert document["parts"][-1]["part"] == "not explained"
    assert "look up tokens" in document["parts"][0]["why"]
    assert document["parts"][0]["factor"] is None


def test_output_that_is_no_terminal_has_every_sentence_once() -> None:
    printed = list[str]()
    watch = each_once(lambda status: printed.append(status.doing))
    for sentence in ("loading", "warming up", "loading", "warming up"):
        watch(Status(sentence))
    assert printed == ["loading", "warming up"]


def test_a_deviation_gives_a_range() -> None:
    text = "| test | t/s |\n| tg100 @ d100 | {} \u00b1 1.0 |"
    quick, slow = (reader.parse(text.format(rate))[0] for rate in ("100.0", "80.0"))
    explained = answer(quick, slow)
    assert explained.rest.range is not None
    low, high = explained.rest.range
    assert low < 1.25 < high


def test_an_automatic_setting_is_no_difference() -> None:
    quick, slow = (
        with_facts(pasted("llama-bench json"), flash_attn=value) for value in ("auto", "on")
    )
    parts = answer(quick, slow).parts
    assert "flash attention" not in [each.name for each in parts]
    assert "flash_attn auto in A" in next(
        each.reason for each in parts if each.name == "more settings"
    )


def test_models_of_both_sides_are_named_with_a_comma() -> None:
    assert asking.pair_of_words("first,second:Q8_0") == ("first", "second:Q8_0")
    assert asking.pair_of_words("first") == ("first", "first")


def test_other_rows_are_named(tmp_path: Path) -> None:
    bench = tmp_path / "bench.md"
    bench.write_text(TEXTS["llama-bench, several rows"])
    log = tmp_path / "server.log"
    log.write_text(TEXTS["server, cached"])
    code, out, _ = run_lab("why", bench, log, "--budget", "0", "--no-plot")
    assert code == 0
    assert "32 tokens after 872" in out
    assert (
        "other figures of A, not compared: 120 tokens/s (32 tokens after 0, line 4)"
        in " ".join(out.split())
    )


def test_one_file_with_two_setups_is_enough(tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    sessions = [
        session(tmp_path, "a"),
        session(tmp_path, "b", n_threads=1),
    ]
    both.write_text("".join(Path(name).read_text() for name in sessions))
    assert why(both, budget=0).ratio == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("columns", [("start_ns", "ready_ns", "end_ns"), ("ready_ns",)])
def test_damaged_times_end_with_a_sentence_or_an_answer(
    tmp_path: Path, columns: tuple[str, ...]
) -> None:
    run = make_run()
    zeros: dict[str, Any] = dict.fromkeys(columns, len(run.steps.kind) * (0,))
    steps = dataclasses.replace(run.steps, **zeros)
    damaged = tmp_path / "damaged.jsonl"
    results.save(damaged, make_record(dataclasses.replace(run, steps=steps)))
    code, _, err = run_lab("why", damaged, "35 tokens/s", "--no-plot", "--budget", "0")
    assert code in (0, 1)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((SAMPLE,), "What limits one: lab explain"),
        (("35 tokens/s",), "--model SPEC"),
        ((), "Give two"),
        (("1 t/s", "2 t/s", "3 t/s"), "too many"),
        (("/proc/self/mem", "1 t/s"), "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    code, _, err = run_lab("why", *arguments, "--no-plot", "--budget", "0")
    assert code == 1
    assert sentence in err
    assert "Traceback" not in err


def test_a_figure_alone_is_measured_here_on_the_real_engine(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_now, "REPEATS", 1)
    (bench,) = reader.parse("| test | t/s |\n| tg24 @ d16 | 900000000.0 |")
    monkeypatch.setattr(facts, "MEASURABLE", (*facts.MEASURABLE, "prompt"))
    bench = with_facts(bench, prompt="random")  # the file has no words
    explained = why(
        bench,
        budget="60s",
        model=str(mini),
        out=tmp_path,
    )
    assert explained.pair.letters == ("A", "B")
    assert explained.pair.slow.source == "lab"
    assert list(tmp_path.glob("*.jsonl"))
