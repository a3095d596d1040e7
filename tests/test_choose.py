"""What choosing a token costs: exact on made-up runs, and once with the real engine."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.core import experiments, script
from lab.core.record import Record, Steps
from lab.core.sampling import Sampling, chain
from lab.errors import LabError
from lab.features.choose import chains, planning, vocabularies
from lab.features.choose.chains import NamedChain
from lab.features.choose.command import sections
from lab.features.choose.figures import figures
from lab.features.choose.sentences import most_expensive, sentences
from lab.roofline import choosing
from lab.roofline.choosing import Choosing
from lab.runner import placement
from lab.show import canvas
from lab.show.section import Context
from tests.bench.choose import penalty_law
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import MODEL, make_record, make_run
from tests.support.requests import noise_of
from tests.support.tables import lines_of

N_STEPS = 4
COMPUTE_NS = 10_000_000
BETWEEN_NS = 5_000
PLAIN = [
    NamedChain("greedy", None),
    NamedChain("default", chain({"temp": 0.8}, 1)),
    NamedChain("penalties 64", chain({"repeat_penalty": 1.1}, 1)),
    NamedChain("penalties 1024", chain({"repeat_penalty": 1.1, "repeat_last_n": 1024}, 1)),
]


def cost_ns(name: str, n_vocab: int) -> int:
    """A planted law: a fixed part, and one for each token of the vocabulary."""
    per_token = {"greedy": 0.3, "default": 2, "penalties 64": 6, "penalties 1024": 8}
    return round(3000 + per_token.get(name, 20) * n_vocab)


def made_run(
    n_seq: int = 1,
    n_vocab: int = 49152,
    named: list[NamedChain] = PLAIN,
    cost: Callable[[str, int], int] = cost_ns,
    name: str = "tiny",
    repeat: int = 0,
) -> Record:
    """A run whose steps take exactly what a law says."""
    case = planning.case(20, n_seq, N_STEPS, named)
    operations = planning.write(named, case, lambda i, n: [1] * n, make_record().settings)
    shapes = list(script.shapes(operations))
    names = [named[number].name for number in case.setup.order]
    starts: list[int] = []
    readies: list[int] = []
    ends: list[int] = []
    now = 0
    block = -1
    for shape in shapes:
        block += shape.kind == "prefill" and shape.n_outputs > 0
        starts.append(now)
        ready = now + (COMPUTE_NS if shape.n_tokens else 1000)
        readies.append(ready)
        now = ready
        if shape.n_outputs:
            now += cost(names[block], n_vocab) * shape.n_outputs
        ends.append(now)
        now += BETWEEN_NS
    columns = dict(zip(script.Shape._fields, zip(*shapes, strict=True), strict=True))
    steps = Steps(
        start_ns=tuple(starts), ready_ns=tuple(readies), end_ns=tuple(ends), **columns
    )
    n_chains = 2 * sum(chain.sampling is not None for chain in named)
    run = make_run(
        20,
        N_STEPS + 1,
        repeat,
        steps=steps,
        token_ids=tuple(range(script.n_chosen(operations))),
        experiment="choose",
        case=case.values,
        counts={"built_ns": (2_000_000,) * (n_chains * n_seq)},
    )
    model = dataclasses.replace(MODEL, n_vocab=n_vocab, name=name)
    return make_record(run, model=model)


def made_sizes(sizes: tuple[int, ...]) -> list[Record]:
    return [
        made_run(n_vocab=size, name=f"{vocabularies.STEM}{size}", repeat=repeat)
        for size in sizes
        for repeat in range(2)
    ]


def test_the_time_of_each_chain_is_found() -> None:
    measured = figures([made_run(), made_run(8, repeat=1)], [])
    assert measured is not None
    table = measured.chains.set_index(["name", "n_seq"])
    for named in PLAIN:
        for n_seq in (1, 8):
            row = table.loc[named.name, n_seq]
            expected_s = cost_ns(named.name, 49152) / 1e9
            assert row.choose_s == pytest.approx(expected_s)
            assert row.step_choose_s == pytest.approx(n_seq * expected_s)
            assert row.expected_s == pytest.approx(n_seq * expected_s)
            assert row.compute_s == pytest.approx(COMPUTE_NS / 1e9)
            assert row.between_s == pytest.approx(BETWEEN_NS / 1e9)
    row = table.loc["default", 1]
    total_ns = COMPUTE_NS + BETWEEN_NS + cost_ns("default", 49152)
    assert row.share == pytest.approx(cost_ns("default", 49152) / total_ns)
    assert row.built_s == pytest.approx(0.002)
    assert table.loc["greedy", 1].built_s is None or math.isnan(table.loc["greedy", 1].built_s)


def test_the_law_predicts_other_vocabularies_and_windows() -> None:
    times = choosing.chain_times(made_sizes((32000, 65536, 131072, 262144)))
    law = choosing.laws(times)["default"]
    for size in (40000, 100000, 200000):
        assert law.seconds(size) == pytest.approx(cost_ns("default", size) / 1e9, rel=0.01)
        low, high = law.range(size)
        assert low < law.seconds(size) < high
    penalties = penalty_law(times)
    assert penalties is not None
    assert [window for window, _ in penalties.by_window] == [64, 1024]
    middle = penalties.seconds(65536, 256)
    assert cost_ns("penalties 64", 65536) < middle * 1e9 < cost_ns("penalties 1024", 65536)


def test_steps_after_the_end_of_a_grammar_do_not_count() -> None:
    grammar = dataclasses.replace(PLAIN[1], name="JSON grammar", sampling=GRAMMAR)
    record = made_run(named=[PLAIN[0], grammar])
    n_answer = N_STEPS + 1
    tokens = list(record.run.token_ids)
    tokens[n_answer : 2 * n_answer] = [7, 8, 9, 9, 9]  # of the first block with the grammar
    run = dataclasses.replace(record.run, token_ids=tuple(tokens))
    steps = choosing.blocks(dataclasses.replace(record, run=run))
    assert steps is not None
    by_block = steps.groupby("block").size()
    assert list(by_block) == [5, 3, 5, 5]


def test_two_equal_tokens_at_the_begin_are_not_the_end_of_a_grammar() -> None:
    grammar = dataclasses.replace(PLAIN[1], name="JSON grammar", sampling=GRAMMAR)
    record = made_run(named=[grammar])
    run = dataclasses.replace(record.run, token_ids=(9,) * 10)
    steps = choosing.blocks(dataclasses.replace(record, run=run))
    assert steps is not None
    assert list(steps["at"]) == [0, 1, 0, 1]
    lacking = dataclasses.replace(run, token_ids=(9,) * 9)
    steps = choosing.blocks(dataclasses.replace(record, run=lacking))
    assert steps is not None
    assert list(steps["at"]) == [*range(5), *range(5)]


def test_times_along_an_answer_have_a_middle_and_percentiles() -> None:
    """Of 8 sorted values the 5th percentile is 0.35 of the way from the first to the second."""
    planted = iter([100, 10, 20, 30, 40, 300, 50, 60, 70, 80])
    record = made_run(named=[PLAIN[1]], cost=lambda name, n_vocab: 10**9 * next(planted))
    (row,) = choosing.chain_times([record]).itertuples()
    assert (row.choose_s, row.low_s, row.high_s) == pytest.approx((45, 13.5, 76.5))
    assert row.first_s == pytest.approx(200)


def test_a_chain_is_built_once_for_each_sequence_and_the_first_counts() -> None:
    record = made_run(2, named=PLAIN[:2])
    counts: dict[str, tuple[int, ...]] = {"built_ns": (10**9, 9, 4 * 10**9, 9)}
    run = dataclasses.replace(record.run, counts=counts)
    times = choosing.chain_times([dataclasses.replace(record, run=run)]).set_index("name")
    assert times.built_s["default"] == 2.5
    assert math.isnan(times.built_s["greedy"])
    few = dataclasses.replace(record.run, counts={"built_ns": (1_000_000_000, 9)})
    times = choosing.chain_times([dataclasses.replace(record, run=few)]).set_index("name")
    assert times.built_s["default"] == 1


GRAMMAR = Sampling(grammar=("root ::= [a-z]*",), grammar_file="letters")


def test_steps_that_do_not_fit_the_case_have_no_figures() -> None:
    record = made_run()
    case = {**record.run.case, "n_steps": N_STEPS + 1}
    broken = dataclasses.replace(record, run=dataclasses.replace(record.run, case=case))
    assert choosing.blocks(broken) is None
    failed = dataclasses.replace(record, run=dataclasses.replace(record.run, status="failed"))
    assert choosing.blocks(failed) is None
    assert sections([broken], Context()) == []


@pytest.mark.parametrize(
    "change", [{"n_seq": 0}, {"n_steps": 1}, {"chains": ""}, {"more": 1}, {"n_seq": "1"}]
)
def test_impossible_cases_are_refused(change: dict[str, Any]) -> None:
    case = {"n_seq": 1, "n_steps": 4, "chains": "a: b", **change}
    with pytest.raises(ValueError, match=r".+"):
        experiments.check("choose", case)


def test_chains_run_forth_and_back() -> None:
    setup = Choosing(1, 2, "a: x | b: y | c: z")
    assert setup.names == ["a", "b", "c"]
    assert setup.order == [0, 1, 2, 2, 1, 0]


@pytest.mark.usefixtures("undisturbed")
def test_the_answer_comes_first_and_says_what_choosing_takes() -> None:
    records = [*(made_run(n_seq) for n_seq in (1, 32)), *made_sizes((32000, 262144))]
    (section,) = sections(records, Context())
    (part,) = section.parts
    assert part.answer == (
        "llama-server's default chain takes 101 us a token here, 1 % of a step; with 32 "
        "sequences 24.5 % of every step."
    )
    assert len(lines_of(part)) == 2 * len(PLAIN)
    assert "differs by 0 % from the measured time of all" in " ".join(part.sentences)


def test_a_disturbed_number_of_sequences_leaves_no_conclusions() -> None:
    quiet = [made_run(repeat=repeat) for repeat in range(3)]
    together = made_run(32)
    run = dataclasses.replace(together.run, noise=noise_of(4000))
    busy = dataclasses.replace(together, run=run)

    (section,) = sections([*quiet, busy], Context())

    (part,) = section.parts
    assert part.title.endswith("(! 1 of 4 runs disturbed)")
    assert part.answer == "No conclusions: 1 of 4 runs were disturbed. Measure again."


def test_a_grammar_is_compared_both_ways() -> None:
    masked = dataclasses.replace(GRAMMAR, grammar_first=True)
    named = [
        *PLAIN[:2],
        NamedChain(chains.JSON, GRAMMAR),
        NamedChain(f"{chains.JSON} {chains.MASKED}", masked),
    ]
    measured = figures([made_run(named=named)], [])
    assert measured is not None
    text = " ".join(sentences(measured))
    assert (
        "With 1 sequence a JSON grammar adds 885 us a token if it checks each choice" in text
    )
    assert "Building it takes 2.00 ms" in text
    assert "The most expensive chain with 1 sequence is " in text


def test_the_pictures_name_their_findings_and_all_that_they_draw() -> None:
    records = [*(made_run(n_seq) for n_seq in (1, 8)), *made_sizes((32000, 262144))]
    (section,) = sections(records, Context())
    steps, vocabulary = section.all_pictures

    figure = canvas.drawn(steps.draw, steps.file_size)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    bars: list[Any] = list(ax.patches)
    assert len({bar.get_facecolor() for bar in bars}) == 2  # compute, choose
    frame = ax.get_window_extent()
    assert all(text.get_window_extent().y1 < frame.y1 for text in ax.texts)
    assert ax.get_title().startswith("Choosing takes up to ")
    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert labels == ["1\ndefault", "8\ndefault"]

    (ax,) = canvas.drawn(vocabulary.draw, vocabulary.file_size).axes
    assert ax.get_title().startswith("Choosing one of 262,144 tokens takes ")
    handles: list[Any] = ax.get_legend_handles_labels()[0]
    lines: list[Any] = list(ax.lines)
    assert {line.get_marker() for line in lines} <= {
        "None",
        *(handle.get_marker() for handle in handles),
    }


def test_equal_chains_do_not_differ_and_slower_ones_do() -> None:
    records = [made_run(repeat=repeat) for repeat in range(6)]
    times = choosing.chain_times(records)
    times = times.assign(name=times.name.replace("penalties 1024", "default too"))
    times.loc[times.name == "default too", "choose_s"] = times[
        times.name == "default"
    ].choose_s.iloc[0]
    assert not choosing.differs(choosing.ratio(times, "default", "default too"))
    assert choosing.differs(choosing.ratio(times, "default", "penalties 64"))
    assert choosing.ratio(times, "default", "unknown") is None


def test_the_default_cost_is_that_of_the_law() -> None:
    records = made_sizes((32000, 65536, 131072))
    cost_s = choosing.default_cost_s(records, 65536)
    assert cost_s == pytest.approx(cost_ns("default", 65536) / 1e9)
    assert choosing.default_cost_s([], 65536) is None
    assert choosing.default_cost_s(records, None) is None


def test_the_plan_has_every_number_of_sequences(fake_worker: FakeWorker) -> None:
    planned = planning.plan(fake_worker, "1,8", ["--top-k 0"], 64, 8)
    assert [case.setup.n_seq for case in planned.cases] == [1, 8]
    assert [case.setup.n_steps for case in planned.cases] == [8, planning.FEWEST_STEPS]
    assert planned.cases[0].setup.names == ["greedy", "default", "--top-k 0"]
    assert planned.settings.kv_unified


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("1", ["--tmp 1"]), "is not understood"),
        (("1", ["--samplers foo"]), "no sampler 'foo'"),
        (("1", ['--temp "0.8']), "is not understood"),
        (("1", [" "]), "--chain is empty"),
        (("1", ["--top-k 0", "--top-k 0"]), "given twice"),
        (("99", []), "--sequences"),
    ],
)
def test_impossible_plans_are_refused(
    fake_worker: FakeWorker, asked: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        planning.plan(fake_worker, *asked)


def test_chains_that_do_not_fit_into_memory_are_refused(
    fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("1,32", ["--top-k 0"], 64, 8)
    planned = planning.plan(fake_worker, *asked)
    n_vocab = planned.model.n_vocab
    assert n_vocab is not None
    together = planned.cases[1]
    # a list of candidates and a sorted copy, of three chains forth and back, and logits
    kept = 32 * n_vocab * (2 * 3 * 2 * 12 + 4)
    assert planning.chain_bytes(together.setup, n_vocab) == kept
    fits = planned.memory(together).total_bytes + kept
    monkeypatch.setattr(placement, "memory_for", lambda plan: fits)
    planning.plan(fake_worker, *asked)
    monkeypatch.setattr(placement, "memory_for", lambda plan: fits - 1)
    with pytest.raises(LabError, match="32 sequences, 3 chains and a vocabulary of"):
        planning.plan(fake_worker, *asked)


def test_without_top_k_no_law_is_told() -> None:
    named = [*PLAIN, NamedChain("no top-k", chain({"top_k": 0}, 1))]
    sizes: list[Record] = []
    for size in (32000, 262144):
        name = f"{vocabularies.STEM}{size}"
        sizes += [made_run(n_vocab=size, name=name, named=named, repeat=i) for i in range(2)]
    measured = figures([made_run(named=named)], sizes)
    assert measured is not None
    laws = measured.chains.set_index("name").law_s
    assert laws["no top-k"] is None or math.isnan(laws["no top-k"])
    assert laws["default"] == pytest.approx(cost_ns("default", 49152) / 1e9, rel=0.1)
    text = " ".join(sentences(measured))
    assert "Without top-k a token takes 986 us to 986 us" in text


def test_sizes_of_vocabularies() -> None:
    assert planning.sizes("0") == []
    assert planning.sizes("32000,50257") == [32000, 50240]
    with pytest.raises(LabError, match="too small"):
        planning.sizes("100")


@pytest.mark.usefixtures("undisturbed")
def test_the_real_engine_measures_chains_and_vocabularies(tmp_path: Path) -> None:
    code, out, err = run_lab(
        *("choose", "--sequences", "1,2", "--chain", "--top-k 0", "--prompt-len", 16),
        *("--gen", 4, "--repeat", 1, "--threads", 1, "--out", tmp_path, "--no-plot"),
    )
    assert code == 0, err
    assert "1 model, 2 runs in all: about " in err
    assert "llama-server's default chain takes" in out
    assert "--top-k 0" in out


def test_a_vocabulary_of_any_size_is_a_model(tmp_path: Path) -> None:
    from lab.process.worker import Worker

    with Worker() as worker:
        plan = planning.plan_of_size(worker, 4096, tmp_path, 4, 1, threads=1)
    assert plan.model.n_vocab == 4096
    assert vocabularies.is_random(plan.file.path)
    assert [case.setup.n_seq for case in plan.cases] == [1]


def test_chains_that_take_nearly_as_long_as_the_slowest_are_named_beside_it() -> None:
    def timed(name: str, choose_s: float) -> Any:
        return SimpleNamespace(name=name, choose_s=choose_s, n_seq=1)

    default = timed(choosing.DEFAULT, 1e-4)
    rows = [default, timed("mirostat", 4.30e-3), timed(chains.JSON, 6.02e-3)]
    masked = timed("JSON schema masked", 6.04e-3)
    (both,) = most_expensive([*rows, masked], default)
    assert "with 1 sequence is JSON schema masked: 6.04 ms a token, 60.4x" in both
    assert both.endswith(" JSON grammar took within 10 % of that.")
    assert most_expensive([default, timed("greedy", 2e-5)], default) == []
