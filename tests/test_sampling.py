"""Chains of samplers: what is asked for, what a record holds, and what llama.cpp makes of it."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import sampling, script as scripts
from lab.core.lines import from_json, to_json
from lab.core.record import Settings
from lab.core.sampling import ORDER, Sampling, chain, keywords
from lab.errors import LabError
from lab.features.ab import parse_variant
from lab.process.worker import Worker
from lab.runner import as_options, samplers
from lab.runner.plan import make_plan
from lab.show import table
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import SETTINGS, make_record

LETTERS = 'root ::= "{" [a-z ]+ "}"\n'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_nothing_asked_is_greedy_and_one_option_is_the_whole_chain() -> None:
    assert chain({}, 1) is None
    asked = chain({"temp": 0.5}, 7)
    assert asked == Sampling(temp=0.5, seed=7)
    assert asked.top_k == 40
    assert asked.samplers == ORDER
    assert chain({"temp": 0.5}, -1) == Sampling(
        temp=0.5, seed=2**32 - 1
    )  # 32 bits, as llama.cpp


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"samplers": "top_k;foo"}, "no sampler 'foo'"),
        ({"samplers": ";"}, "names no sampler"),
        ({"temp": -0.1}, "--temp -0.1"),
        ({"temp": True}, "--temp True"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"top_k": 2.5}, "--top-k 2.5"),
        ({"mirostat": 3}, "--mirostat 3"),
        ({"presence_penalty": float("inf")}, "--presence-penalty inf"),
        ({"grammar_file": "a", "json_schema_file": "b"}, "given both"),
    ],
)
def test_impossible_chains_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        chain(asked, 1)


def test_names_of_samplers_are_those_of_llama_server() -> None:
    names = sampling.sampler_names("penalties;top-k;typical_p;temperature")
    assert names == ("penalties", "top_k", "typ_p", "temperature")


@pytest.mark.parametrize(
    "asked",
    [
        {"temp": 0.8},
        {"top_k": 0, "repeat_penalty": 1.1},
        {"samplers": "top_k;temperature"},
        {"mirostat": 2},
    ],
)
def test_keywords_ask_for_the_same_chain_again(asked: dict[str, Any]) -> None:
    first = chain(asked, 1)
    assert chain(keywords(first), 1) == first
    assert keywords(None) == {}


def test_a_record_holds_the_chain_and_old_records_are_greedy() -> None:
    settings = dataclasses.replace(SETTINGS, sampling=chain({"top_k": 0}, 3))
    assert from_json(Settings, to_json(settings)) == settings
    older = json.loads(to_json(SETTINGS))
    del older["sampling"]
    assert from_json(Settings, json.dumps(older)) == SETTINGS


def test_runs_with_another_chain_are_no_repeats_and_the_label_says_it() -> None:
    greedy = make_record()
    sampled = dataclasses.replace(
        greedy, settings=dataclasses.replace(greedy.settings, sampling=chain({"top_k": 0}, 1))
    )
    setups = table.setups(table.runs([greedy, sampled, sampled]))
    labels = [label for label, _ in setups]
    assert len(setups) == 2
    assert "greedy" in labels[0]
    assert "top_k 0" in labels[1]


def test_other_grammars_are_other_chains() -> None:
    first = Sampling(grammar=("root ::= [a]",), grammar_file="g.gbnf")
    second = Sampling(grammar=("root ::= [b]",), grammar_file="g.gbnf")
    assert first.label != second.label


def test_a_record_names_the_options_of_its_chain() -> None:
    record = make_record()
    settings = dataclasses.replace(record.settings, sampling=chain({"top_k": 0}, 1))
    options = as_options.options(dataclasses.replace(record, settings=settings))
    assert ("--top-k", "0") in options


def test_variants_and_plans_take_a_chain(fake_worker: FakeWorker) -> None:
    variant = parse_variant("--temp 0.7 --samplers top_k;temperature")
    assert variant == {"temp": 0.7, "samplers": "top_k;temperature"}
    plan = make_plan(fake_worker, "10", 4, 1, **variant)
    assert plan.settings.sampling == chain(variant, 1)
    assert make_plan(fake_worker, "10", 4, 1).settings.sampling is None


def test_a_file_that_is_no_grammar_is_refused_before_anything_runs(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gbnf"
    broken.write_text('root ::= "a" foo\n')
    out = tmp_path / "out"
    code, _, err = run_lab("measure", "-p", 4, "--grammar-file", broken, "--out", out)
    assert code == 1
    assert "Undefined rule identifier 'foo'" in err
    assert not list(out.glob("*"))


@pytest.mark.parametrize("name", ["measure", "ab", "batch", "turns"])
def test_the_commands_take_the_options_of_a_chain(name: str) -> None:
    _, out, _ = run_lab(name, "--help-all")
    for option in sampling.table():
        assert f"--{option.replace('_', '-')} " in out


@pytest.fixture(scope="module")
def worker(embedded: Path) -> Iterator[Worker]:
    with Worker() as worker:
        worker.load(embedded, SETTINGS)
        yield worker


def answer(worker: Worker, n_gen: int = 12, **asked: Any) -> tuple[int, ...]:
    """The tokens that a chain chooses after a fixed prompt."""
    chosen = samplers.planned(worker, asked, asked.pop("seed", 1))
    worker.new_context(dataclasses.replace(SETTINGS, n_ctx=128, sampling=chosen))
    prompt = worker.tokenize("The lighthouse keeper wrote a letter about")
    return worker.run(scripts.run(prompt, n_gen, 64), lambda progress: None).token_ids


def text(worker: Worker, tokens: tuple[int, ...]) -> str:
    pieces = worker.pieces()
    return b"".join(pieces[token] for token in tokens).decode(errors="replace")


def test_the_seed_decides_and_no_temperature_is_greedy(worker: Worker) -> None:
    greedy = answer(worker)
    assert answer(worker, temp=0.0) == greedy
    first = answer(worker, temp=1.5, seed=1)
    assert answer(worker, temp=1.5, seed=1) == first
    assert answer(worker, temp=1.5, seed=2) != first


def test_penalties_look_at_the_prompt(worker: Worker) -> None:
    prompt = set(worker.tokenize("The lighthouse keeper wrote a letter about"))
    chosen = answer(worker, temp=0.0, repeat_penalty=100.0)
    assert not prompt & set(chosen)
    assert len(set(chosen)) == len(chosen)


def test_a_grammar_holds_both_ways(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "letters.gbnf"
    path.write_text(LETTERS)
    chosen = samplers.planned(worker, {"grammar_file": str(path)}, 1)
    assert chosen is not None
    assert chosen.grammar_file == "letters.gbnf"
    prompt = worker.tokenize("One two")
    for is_first in (False, True):
        of_kind = dataclasses.replace(chosen, grammar_first=is_first)
        worker.new_context(dataclasses.replace(SETTINGS, n_ctx=128, sampling=of_kind))
        outcome = worker.run(scripts.run(prompt, 8, 64), lambda progress: None)
        written = text(worker, outcome.token_ids)
        assert written[0] == "{"
        assert set(written[1:]) <= set("abcdefghijklmnopqrstuvwxyz }")
        assert len(outcome.counts["built_ns"]) == 1


def test_a_schema_becomes_a_grammar(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "person.json"
    path.write_text(json.dumps(SCHEMA))
    tokens = answer(worker, 10, json_schema_file=str(path), temp=0.0)
    assert text(worker, tokens).replace(" ", "").replace("\n", "").startswith('{"name":"')


@pytest.mark.parametrize("content", ["", "{", '{"type": 5}'])
def test_a_broken_schema_is_refused(worker: Worker, tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(LabError):
        samplers.planned(worker, {"json_schema_file": str(path)}, 1)


def test_sequences_have_chains_of_their_own(worker: Worker) -> None:
    chosen = chain({"temp": 1.5}, 1)
    settings = dataclasses.replace(SETTINGS, n_ctx=512, n_seq_max=2, sampling=chosen)
    worker.new_context(settings)
    prompt = worker.tokenize("The lighthouse keeper wrote a letter about")
    parts = tuple(scripts.Part(sequence, tuple(prompt), 1) for sequence in (0, 1))
    script = [scripts.Operation("prefill", parts), *scripts.decode([0, 1], 5)]
    outcome = worker.run(script, lambda progress: None)
    assert outcome.token_ids[0::2] == outcome.token_ids[1::2]  # the same seed, as in a server
    assert len(outcome.counts["built_ns"]) == 2


def test_random_weights_have_no_grammar(mini: Path) -> None:
    chosen = Sampling(grammar=("root ::= [a]",))
    with Worker() as worker, pytest.raises(LabError, match="no vocabulary"):
        worker.load(mini, dataclasses.replace(SETTINGS, sampling=chosen))


def test_measured_runs_say_how_they_chose(tmp_path: Path, mini: Path) -> None:
    records = lab.measure(
        "8",
        gen=3,
        repeat=1,
        model=str(mini),
        prompt="random",
        top_k=1,
        out=tmp_path,
        threads=1,
    )
    assert {record.settings.sampling for record in records} == {chain({"top_k": 1}, 1)}
