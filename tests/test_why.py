"""`lab why`: planted causes are found with their factors, and equal setups name none."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Settings
from lab.core.request import Asked, ServerTimings, Usage
from lab.core.script import Script
from lab.errors import LabError
from lab.features.why import pasted, reasons
from lab.features.why.reasons import Answer, why
from lab.process.wire import Outcome
from lab.process.worker import Worker
from lab.runner import builds
from lab.show import disturbances
from tests.conftest import SETTINGS, FakeWorker, make_record, make_run, run_lab, steps_of
from tests.test_request import make_request, make_request_record

pytestmark = pytest.mark.usefixtures("simulated", "undisturbed")


def ms_per_token(settings: Settings, quantization: str = "Q4_0") -> float:
    """The planted machine: threads halve the time, no flash attention costs 1.3x, a q8_0 cache 1.2x, new 1.25x."""
    if settings.lib and settings.lib.endswith("new"):
        return 12.5
    time = 10 * 2 / settings.n_threads
    time *= 1.3 if (settings.flash_attn_resolved or settings.flash_attn) == "off" else 1.0
    return time * (1.2 if settings.type_k == "q8_0" else 1.0)


PER_POSITION = 0.01


class Planted(FakeWorker):
    """A fake engine whose decode depends on settings and position."""

    def new_context(self, asked: Settings) -> Settings:
        self.settings = dataclasses.replace(
            asked, flash_attn_resolved="off" if asked.flash_attn == "off" else "on"
        )
        return self.settings

    def run(self, script: Script, watch: Any) -> Outcome:
        outcome = super().run(script, watch)
        slow = ms_per_token(self.settings) / 10
        steps = steps_of(script, 1, 10 * slow - 1, PER_POSITION * slow)
        return dataclasses.replace(outcome, steps=steps)


@pytest.fixture(autouse=True)
def planted_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "Worker", Planted)


def a_file(
    folder: Path,
    name: str,
    n_prompt: int = 64,
    n: int = 4,
    slower: float = 1.0,
    n_gen: int = 24,
    **changes: Any,
) -> str:
    """A results file of the planted machine, with these settings."""
    n_threads = {"n_threads_batch": changes.get("n_threads", SETTINGS.n_threads)}
    usual = {"flash_attn_resolved": "on", "n_batch": 2048, "n_ubatch": 512, **n_threads}
    settings = dataclasses.replace(SETTINGS, **(usual | changes))
    slow = ms_per_token(settings) / 10 * slower
    path = folder / f"{name}.jsonl"
    for i in range(n):
        run = make_run(
            n_prompt,
            n_gen,
            i,
            decode_ms=(10 * slow - 1) * (1 + 0.001 * i),
            per_position_ms=PER_POSITION * slow,
        )
        run = dataclasses.replace(run, started_at=f"2026-01-01T00:00:0{i}Z")
        results.save(path, make_record(run, session=name, settings=settings))
    return str(path)


def asked(a: str, b: str, folder: Path, **more: Any) -> Answer:
    """The answer with a trial on the planted machine."""
    one, other = pair(a, b)
    return reasons.answer(one, other, 60, model="smollm2-135m", out=folder / "out", **more)


def pair(a: str, b: str) -> tuple[pasted.Setup, pasted.Setup]:
    """The figures of two files that are compared."""
    return reasons.nearest(reasons.given(a)[0], reasons.given(b)[0], False)


def part(found: Answer, name: str) -> reasons.Part:
    return next(one for one in found.parts if one.name == name)


def test_a_rate_that_includes_the_prompt_is_arithmetic() -> None:
    a = pasted.parse(
        "llama_perf_context_print: eval time = 1000.00 ms / 100 runs ( 10.00 ms per token, 100.00 tokens per second)"
    )
    b = pasted.parse(
        "CtxLimit:1100/8152, Amt:100/512, Process:4.00s (250.00T/s), Generate:1.00s (100.00T/s), Total:5.00s (20.00T/s)"
    )
    whole = next(one for one in b if one.counts == pasted.WHOLE)
    found = reasons.answer(a[0], whole)
    assert found.letters == ("A", "B") and found.causes[0].name == reasons.COUNTED
    assert part(found, reasons.COUNTED).factor == pytest.approx(99 / 20)
    assert found.rest.factor == pytest.approx(100 / 99, rel=1e-6)
    sentence, _ = reasons.conclusion(found)
    assert (
        "B divides by prefill too: 4.00 s of 5.00 s" in sentence
        and "Its decode alone is 99" in sentence
    )


def test_whole_time_alone_uses_the_prefill_rate_of_the_other() -> None:
    webui = "Output generated in 51.24 seconds (6.67 tokens/s, 342 tokens, context 7323, seed 1)"
    log = (
        "prompt eval time = 31764.47 ms / 7318 tokens ( 4.34 ms per token, 230.38 tokens per second)\n"
        "eval time = 19447.79 ms / 342 tokens ( 56.86 ms per token, 17.59 tokens per second)\n"
    )
    (one,) = pasted.parse(webui)
    other = next(each for each in pasted.parse(log) if each.counts == pasted.DECODE)
    found = reasons.answer(other, one)
    assert part(found, reasons.COUNTED).factor == pytest.approx(2.63, rel=0.01)
    assert "prefill rate: range unknown" in part(found, reasons.COUNTED).how
    assert part(found, reasons.COUNTED).range is None and found.rest.range is None
    assert "range unknown" in reasons.conclusion(found)[0]


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
    found = asked(a_file(tmp_path, "a"), a_file(tmp_path, "b", **changes), tmp_path)
    assert [one.name for one in found.causes] == [name]
    assert part(found, name).factor == pytest.approx(factor, rel=0.02)
    assert "measured here" in part(found, name).how
    assert abs(found.rest.log) < 0.03


def test_two_causes_are_told_apart_and_the_rest_is_one(tmp_path: Path) -> None:
    found = asked(a_file(tmp_path, "a"), a_file(tmp_path, "b", 488, n_threads=1), tmp_path)
    assert [one.name for one in found.causes] == ["threads", "depth"]
    assert math.prod(one.factor for one in found.parts) == pytest.approx(found.ratio)
    assert part(found, "threads").factor == pytest.approx(2, rel=0.03)
    assert found.rest.half is not None and abs(found.rest.log) < found.rest.half
    assert (
        found.path and len({one.run.variant for one in results.read([found.path]).records}) == 4
    )  # two paths between the same ends


def test_what_is_unknown_stays_in_the_rest(tmp_path: Path) -> None:
    found = asked(a_file(tmp_path, "a"), a_file(tmp_path, "b", slower=2.0), tmp_path)
    assert not found.causes and found.rest.factor == pytest.approx(2, rel=0.01)
    assert "not explained: 2x" in reasons.conclusion(found)[0]


def test_equal_setups_name_no_cause(tmp_path: Path) -> None:
    found = asked(a_file(tmp_path, "a"), a_file(tmp_path, "b", slower=1.04), tmp_path)
    assert not found.causes and found.path is None
    assert reasons.conclusion(found)[0].startswith("B is not slower than A for certain")


def test_depth_comes_from_the_records_if_they_have_both_positions(tmp_path: Path) -> None:
    a = a_file(tmp_path, "a")
    b = a_file(tmp_path, "b", 488)
    third = results.read([a_file(tmp_path, "c"), a_file(tmp_path, "c", 488)]).records
    one, other = pair(a, b)
    found = reasons.answer(one, other, 0, others=third)
    assert part(found, "depth").how == "from the records, 1 session"
    assert part(found, "depth").factor == pytest.approx(15 / 10.76, rel=0.02)
    again = reasons.answer(one, other, 0, others=[*third, *third, *one.records])
    assert part(again, "depth").half == part(found, "depth").half  # a record counts once
    others = [
        dataclasses.replace(record, model=dataclasses.replace(record.model, name="another"))
        for record in third
    ]
    assert part(reasons.answer(one, other, 0, others=others), "depth").how == reasons.NOT_KNOWN
    folder = tmp_path / "sessions"  # its first session is A, the second one has both positions
    folder.mkdir()
    for name, n_prompt in (("a", 64), ("c", 64), ("c", 488)):
        a_file(folder, name, n_prompt)
    assert part(why(folder, b, 0), "depth").factor == pytest.approx(15 / 10.76, rel=0.02)


def test_the_command_prints_the_table_and_ends_with_a_sentence_and_a_command(
    tmp_path: Path,
) -> None:
    a = a_file(tmp_path, "a")
    b = a_file(tmp_path, "b", n_threads=1)
    code, out, err = run_lab("why", a, b, "--budget", "0", "-o", tmp_path)
    assert code == 0, err
    assert (
        "B is 2x as slow as A" in out
        and "not explained" in out
        and (tmp_path / "why-why.png").exists()
    )
    code, out, _ = run_lab("why", a, "35 tokens/s", "--budget", "0", "--json", "--no-plot")
    told = json.loads(out)
    assert (
        told["B"]["counts"] == "unknown"
        and told["slower"] == "B"
        and told["parts"][-1]["part"] == "not explained"
    )
    assert "look up tokens" in told["parts"][0]["why"]


def test_one_file_with_two_setups_and_one_with_one(tmp_path: Path) -> None:
    a = Path(a_file(tmp_path, "a"))
    b = Path(a_file(tmp_path, "b", n_threads=1))
    both = tmp_path / "both.jsonl"
    both.write_text(a.read_text() + b.read_text())
    assert why(both, budget=0).ratio == pytest.approx(2, rel=0.02)
    with pytest.raises(LabError, match="have not been measured"):
        why(a, budget=0, out=tmp_path)


def test_the_range_of_disturbed_runs_comes_from_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(a_file(tmp_path, "a", n=8), a_file(tmp_path, "b", n=8))
    assert reasons._of_state({"A": one, "B": other}).how == reasons.EQUAL
    busy = {id(record) for record in other.records[4:]}
    monkeypatch.setattr(
        disturbances,
        "disturbances",
        lambda record: {disturbances.OTHERS: 1.0} if id(record) in busy else {},
    )
    found = reasons._of_state({"A": one, "B": other})
    assert found.factor == pytest.approx(1.002, abs=0.001) and found.half and found.half < 0.01
    assert (
        found.how.startswith("from the records")
        and found.words == "B: other processes used 1 core in 4 of 8 runs"
    )
    busy |= {id(record) for record in other.records[2:]}
    assert reasons._of_state({"A": one, "B": other}).how == reasons.NOT_KNOWN


def test_what_does_not_fit_into_the_budget_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes a second per 100 tokens: threads fit, a depth of 4,000 does not, and the time is kept."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Planted):
        def run(self, script: Script, watch: Any) -> Outcome:
            outcome = super().run(script, watch)
            now[0] += sum(outcome.steps.n_tokens) / 100
            return outcome

    monkeypatch.setattr(reasons, "Worker", Slow)
    one, other = pair(a_file(tmp_path, "a"), a_file(tmp_path, "b", 4000, n_threads=1))
    found = reasons.answer(one, other, 40, model="smollm2-135m", out=tmp_path / "out")
    assert part(found, "threads").factor == pytest.approx(2, rel=0.02) and now[0] <= 41
    assert (
        part(found, "depth").how == reasons.NOT_KNOWN
        and "not measured: needs about" in part(found, "depth").words
    )
    now[0] = 0.0
    found = reasons.answer(one, other, 0.5, model="smollm2-135m", out=tmp_path / "out")
    assert found.path is None and part(found, "threads").how == reasons.NOT_KNOWN


def test_a_figure_alone_is_compared_with_the_best_of_the_machine(tmp_path: Path) -> None:
    sample = "results/sample-smollm2-135m-amd-epyc.jsonl"
    found = why(sample, budget=0, out=tmp_path)
    assert found.letters == ("best", "A") and found.ratio > 1
    assert math.prod(one.factor for one in found.parts) == pytest.approx(found.ratio)
    beyond = part(found, "kernels")
    change = part(found, "settings")
    assert (
        change.factor > 1
        and change.how.startswith("predicted")
        and "Q4_0 instead of Q4_1" in change.words
    )
    assert found.command.startswith("lab ab")
    assert (
        beyond.range is None
        and found.rest.range is None
        and found.rest.factor == pytest.approx(1, abs=0.05)
    )
    code, out, err = run_lab("why", sample, "--no-plot", "-o", tmp_path)
    assert code == 0, err
    assert "slow as best" in out and "kernels" in out


def test_both_builds_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "folder_of", lambda lib: lib)
    monkeypatch.setattr(builds, "name_of", lambda lib: lib)
    one, other = pair(a_file(tmp_path, "a"), a_file(tmp_path, "b", slower=1.25))
    more: dict[str, Any] = {"model": "smollm2-135m", "out": tmp_path / "out"}
    for a, b, libs in ((one, other, ("/x/old", "/x/new")), (other, one, ("/x/new", "/x/old"))):
        found = reasons.answer(a, b, 60, libs=libs, **more)
        assert [each.name for each in found.causes] == ["build"] and "x/new in" in part(
            found, "build"
        ).words
        assert (
            part(found, "build").factor == pytest.approx(1.25, rel=0.02)
            and abs(found.rest.log) < 0.02
        )
    with pytest.raises(LabError, match="--lib is given 1 times"):
        why("35 tokens/s", "20 tokens/s", lib=("/x/old",))


def test_a_regression_names_the_build_the_system_or_the_file(tmp_path: Path) -> None:
    one, other = pair(a_file(tmp_path, "a"), a_file(tmp_path, "b", slower=2.0))
    machine = other.records[0].machine
    model = other.records[0].model
    changes: dict[str, dict[str, Any]] = {
        "build": {"llama_cpp_commit": "another"},
        "system and driver": {"os": "another"},
        "machine state": {"power": "battery"},
    }
    for name, changed in changes.items():
        another = dataclasses.replace(machine, **changed)
        records = tuple(dataclasses.replace(record, machine=another) for record in other.records)
        found = reasons.answer(one, dataclasses.replace(other, records=records))
        sentence, command = reasons.conclusion(found)
        assert f"The only difference without a known factor is {name}." in sentence, sentence
        assert command == (
            "lab why A.jsonl B.jsonl --lib OLD --lib NEW" if name == "build" else "lab doctor"
        )
    files = [dataclasses.replace(model, sha256=sha256) for sha256 in ("a" * 64, "b" * 64)]
    a, b = (
        dataclasses.replace(
            side, records=tuple(dataclasses.replace(each, model=file) for each in side.records)
        )
        for side, file in zip((one, other), files, strict=True)
    )
    assert "the files differ" in part(reasons.answer(a, b), "model").words


def test_another_machine_is_predicted_and_marked_so(tmp_path: Path) -> None:
    text = "| test | t/s |\n| tg100 @ d100 | {} |"
    one, other = (pasted.parse(text.format(rate))[0] for rate in ("200.0", "80.0"))
    one = dataclasses.replace(one, device="RTX 4090")
    slow = dataclasses.replace(other, device="rtx-3060")
    found = part(reasons.answer(one, slow, model="llama-3.2-3b:Q4_K_M", out=tmp_path), "machine")
    assert found.how == "predicted, 90 % ranges" and found.words == "rtx-4090 in A, rtx-3060 in B"
    assert found.range and 1.3 < found.factor < 5 and found.range[0] < 1008 / 360 < found.range[1]
    assert (
        part(reasons.answer(one, other, model="llama-3.2-3b", out=tmp_path), "machine").how
        == reasons.NOT_KNOWN
    )


def test_a_server_is_taken_apart_by_its_own_times() -> None:
    timings = ServerTimings(n_gen=6, gen_ms=5 * 20e-6, prompt_ms=80e-6)
    usage = Usage(prompt_tokens=10, completion_tokens=6, cached_tokens=2)
    request = make_request(
        timings=timings, usage=usage, asked=Asked(n_prompt=10, n_gen=6, temperature=0)
    )
    for counts, name, factor in (
        (pasted.DECODE, "HTTP", 22.5 / 20),
        (pasted.PREFILL, "HTTP, template", 100 / 80),
    ):
        more: dict[str, Any] = {
            "counts": counts,
            "n_prompt": 10,
            "n_gen": 6,
            "spread": 0.0,
            "between": 0.0,
        }
        engine = pasted.Setup(source="lab", tps=1e9, records=(make_record(),), **more)
        server = pasted.Setup(
            source="server", tps=0.9e9, requests=(make_request_record(request),) * 3, **more
        )
        found = reasons.answer(engine, server)
        (http,) = (each for each in found.parts if each.name.startswith(name))
        assert http.factor == pytest.approx(factor) and http.how == "from B's own times, 3 requests"
        assert part(found, "sampling").how == reasons.EQUAL and part(
            found, "slots"
        ).words.startswith("4 in B")
        assert part(found, "cache").factor == pytest.approx(0.8 if counts == pasted.PREFILL else 1)
    few = dataclasses.replace(server, requests=server.requests[:2])
    assert any("only 2 requests" in each.words for each in reasons.answer(engine, few).parts)


def test_a_figure_alone_is_measured_here_on_the_real_engine(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons, "REPEATS", 1)
    monkeypatch.setattr(reasons, "Worker", Worker)
    (one,) = pasted.parse("| test | t/s |\n| tg24 @ d16 | 900000000.0 |")
    one = dataclasses.replace(one, settings={"prompt": "random"})  # the file has no words
    found = why(one, budget="60s", model=str(mini), out=tmp_path)
    assert (
        found.letters == ("A", "B")
        and found.slow.source == "lab"
        and list(tmp_path.glob("*.jsonl"))
    )
