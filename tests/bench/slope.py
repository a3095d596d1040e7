"""Does the lab tell a slope, a slow kernel and a cliff apart?

    python3 -m uv run python -m tests.bench.slope [SEED]

Sessions of a fake engine, whose steps take what weights and attention need at the rates of a made
machine, with noise: each process has luck of its own, each step varies, and some stall. 20 have a
plant (5 of each kind below), 40 are honest: sample files, and models of other shapes, mixtures and
windows among them. Wanted: 19 of 20 named right (a cliff within 10 % of its place and 20 % of its
factor), and no "kernel" in 40. No quiet machine is needed; about a minute.

The rates of a slow kernel are those of flash attention for heads of 64 on a CPU with AVX512-FP16:
0.03 to 0.055 of the rate of the weights. A kernel that stays above an eighth is not named.
"""

from __future__ import annotations

import csv
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import cost, growth, results, script as scripts
from lab.core.files import data_file
from lab.core.growth import KERNEL, SLOPE
from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL, Model, Record, Steps
from lab.core.script import Script, Shape
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.show import summaries, table, text_findings, text_growth
from tests.support.records import MODEL, SETTINGS, make_record, make_run

SAMPLES = Path(__file__).parents[2] / "results"
CLIFF = "cliff"
UBATCH = 512
PLACE_ERROR = 0.1
FACTOR_ERROR = 0.2
SETUP = ("device", "backend", "model", "quantization", "flash_attn", "commit")
MOST_SHORT = 600  # positions of the shorter of two published decodes
HONEST_MODELS = (
    *("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b"),
    *("qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-1b", "phi-3-mini", MODEL.name),
)


class Plant(NamedTuple):
    """What is wrong with attention: its work takes `factor` times as long.

    From position `place` on: of the positions beyond it, or with `is_whole` of the whole attention.
    """

    kind: str = SLOPE
    phase: str = DECODE
    place: int = 0
    factor: float = 1.0
    is_whole: bool = False


class Rates(NamedTuple):
    """A made machine: what it does with weights, and attention's share of those rates."""

    bytes_per_s: float
    flops_per_s: float
    share: float
    share_of_flops: float
    noise: float
    overhead_s: float = 0.0  # of each step


def seconds(model: Model, shape: Shape, rates: Rates, plant: Plant) -> float:
    """What a step takes without noise."""
    step = cost.step(model, shape.n_tokens, shape.n_past, shape.n_outputs)
    assert step is not None
    if shape.kind == DECODE:
        weights_s = step.weight_bytes / rates.bytes_per_s
        attention_s = step.kv_read_bytes / rates.bytes_per_s / rates.share
    else:
        weights_s = max(
            step.weight_bytes / rates.bytes_per_s, step.layer_flops / rates.flops_per_s
        )
        attention_s = step.attention_flops / rates.flops_per_s / rates.share_of_flops
    if plant.phase == shape.kind and shape.n_past >= plant.place:
        slow = 1.0 if plant.is_whole else 1 - plant.place / (shape.n_past + shape.n_tokens)
        attention_s *= 1 + (plant.factor - 1) * slow
    return rates.overhead_s + weights_s + attention_s


def steps(
    script: Script, model: Model, rates: Rates, plant: Plant, chance: random.Random
) -> Steps:
    """The steps of a run: its luck, the noise of each step, and now and then a stall."""
    luck = chance.gauss(1, rates.noise)
    columns: dict[str, list[int]] = {"start_ns": [], "ready_ns": [], "end_ns": []}
    now = 0
    shapes = list(scripts.shapes(script))
    for shape in shapes:
        taken = 0.0
        if shape.n_tokens:
            taken = seconds(model, shape, rates, plant) * luck
            taken *= 1 + abs(chance.gauss(0, 2 * rates.noise))
            if chance.random() < 0.01:
                taken *= 1 + chance.expovariate(1)
        columns["start_ns"].append(now)
        now += round(1e9 * taken)
        columns["ready_ns"].append(now)
        columns["end_ns"].append(now)
    of_shapes: dict[str, Any] = dict(
        zip(Shape._fields, zip(*shapes, strict=True), strict=True)
    )
    stamps: dict[str, Any] = {name: tuple(values) for name, values in columns.items()}
    return Steps(**of_shapes, **stamps)


def model_of(name: str) -> Model:
    """A model of the catalog, or the tiny one of the tests."""
    if name == MODEL.name:
        return MODEL
    return synthetic.model_of(catalog.find(name), "Q4_K_M")


def session(
    model: Model, form: str, rates: Rates, plant: Plant, chance: random.Random
) -> list[Record]:
    """A session of a form: `lab measure`, `lab sweep`, or a long answer."""
    settings = dataclasses.replace(SETTINGS, n_ubatch=UBATCH)
    cases: dict[str, list[tuple[int, int, int | None]]] = {
        "measure": [(10, 200, None), (1000, 200, None), (10_000, 200, None)],
        "sweep": [(8192, 16, 256)],
        "fine sweep": [(2048, 16, 64)],
        "long answer": [(10, 3000, None)],
        "short": [(10, 8, None), (1500, 8, None)],
    }
    records = []
    for n_prompt, n_gen, every in cases[form]:
        for repeat in range(3):
            prompt = list(range(n_prompt))
            script = scripts.run(prompt, n_gen, UBATCH)
            if every:
                script = scripts.sweep(prompt, n_gen, UBATCH, every)
            run = make_run(20, 5, repeat, case={"every": every} if every else {})
            run = dataclasses.replace(
                run,
                n_prompt=n_prompt,
                n_gen=n_gen,
                steps=steps(script, model, rates, plant, chance),
            )
            records.append(make_record(run, model=model, settings=settings))
    return records


def made_rates(chance: random.Random) -> Rates:
    return Rates(
        bytes_per_s=10 ** chance.uniform(9.9, 10.9),
        flops_per_s=10 ** chance.uniform(10.8, 12),
        share=chance.uniform(0.2, 0.9),
        share_of_flops=chance.uniform(0.35, 1.4),
        noise=chance.uniform(0.003, 0.02),
        overhead_s=10 ** chance.uniform(-5, -3.5),
    )


def planted(chance: random.Random) -> Iterator[tuple[str, Plant, list[Record]]]:
    model = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
    for _ in range(4):
        form = chance.choice(["measure", "sweep", "fine sweep", "long answer"])
        yield "nothing", Plant(), session(model, form, made_rates(chance), Plant(), chance)
    for _ in range(4):
        rates = made_rates(chance)
        plant = Plant(KERNEL, factor=rates.share / chance.uniform(0.03, 0.055))
        form = chance.choice(["measure", "sweep", "long answer"])
        yield "slow kernel", plant, session(model, form, rates, plant, chance)
    places = ((512, ("fine sweep", "long answer")), (2048, ("sweep",)), (6000, ("sweep",)))
    for place, forms in places:
        for is_whole in (False, True, False):
            factor = chance.uniform(2.5, 8)
            plant = Plant(CLIFF, DECODE, place, factor, is_whole)
            name = f"cliff at {place:,}, {'jump' if is_whole else 'kink'}"
            form = chance.choice(forms)
            yield name, plant, session(model, form, made_rates(chance), plant, chance)
    for _ in range(3):
        rates = made_rates(chance)
        factor = rates.share_of_flops / chance.uniform(0.02, 0.06)
        plant = Plant(KERNEL, PREFILL, 0, factor)
        form = chance.choice(["measure", "sweep"])
        yield "slow prefill attention", plant, session(model, form, rates, plant, chance)


def honest(chance: random.Random) -> Iterator[tuple[str, list[Record]]]:
    """Samples, and sessions of models of many shapes, up to 40."""
    n_sessions = 0
    for path in sorted(SAMPLES.glob("sample-*.jsonl")):
        records = [record for record in results.read([path]).records if record.run.is_plain]
        by_model = grouped(text_growth.steady(records), lambda record: record.model.file)
        for repeats in by_model.values():
            if not any(growth.growth(repeats, phase) for phase in (PREFILL, DECODE)):
                continue  # one length
            n_sessions += 1
            yield f"{path.stem}, {repeats[0].model.quantization}", repeats
    while n_sessions < 40:
        name = HONEST_MODELS[n_sessions % len(HONEST_MODELS)]
        model = model_of(name)
        form = chance.choice(["measure", "sweep", "long answer"])
        n_sessions += 1
        yield f"{name}, {form}", session(model, form, made_rates(chance), Plant(), chance)


def published() -> Iterator[tuple[str, list[Record]]]:
    """Decodes that others published at two depths and more, each as two sessions."""
    with data_file("published.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["phase"] == DECODE and row["n_prompt"]
        ]
    for setup, decodes in grouped(
        rows, lambda row: tuple(row[name] for name in SETUP)
    ).items():
        decodes.sort(key=lambda row: int(row["n_prompt"]))
        short = int(decodes[0]["n_prompt"])
        long = int(decodes[-1]["n_prompt"])
        if short > MOST_SHORT or long < 2 * MOST_SHORT:
            continue
        try:
            model = synthetic.model_of(
                catalog.find(decodes[0]["model"]), decodes[0]["quantization"]
            )
        except LabError:  # a model or a type of weights that the catalog lacks
            continue
        n_gpu_layers = 0 if decodes[0]["backend"] == "CPU" else 99
        settings = dataclasses.replace(SETTINGS, n_gpu_layers=n_gpu_layers)
        records = []
        for row in (decodes[0], decodes[-1]):
            for repeat in (0, 1):
                n_prompt = int(row["n_prompt"])
                run = make_run(
                    n_prompt, 6, repeat, decode_ms=1e3 / float(row["tps"]), n_ubatch=512
                )
                records.append(make_record(run, model=model, settings=settings))
        yield ", ".join(filter(None, setup)), records


def verdict_of(records: Sequence[Record], phase: str) -> tuple[str, str]:
    """The name, and the figures."""
    cliff = growth.cliff(records, phase)
    if cliff is not None:
        return CLIFF, f"at {cliff.n_past:,.0f}, {cliff.factor:.2f}x"
    law = growth.growth(records, phase)
    if law is None:
        return "nothing to tell", ""
    return law.verdict, law.why or f"{law.rate / law.weight_rate:.3f} of the weights' rate"


def is_right(plant: Plant, records: Sequence[Record]) -> bool:
    name, _ = verdict_of(records, plant.phase)
    if name != plant.kind:
        return False
    cliff = growth.cliff(records, plant.phase)
    if cliff is None:
        other_phase = PREFILL if plant.phase == DECODE else DECODE
        return verdict_of(records, other_phase)[0] not in (KERNEL, CLIFF)
    is_near = abs(cliff.n_past / plant.place - 1) <= PLACE_ERROR
    return is_near and abs(cliff.factor / plant.factor - 1) <= FACTOR_ERROR


def findings(plant: Plant, form: str) -> str:
    """What the lab says of a planted session of SmolLM2; a page shows it."""
    model = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
    rates = Rates(15e9, 1e11, 0.6, 0.9, 0.005)
    records = session(model, form, rates, plant, random.Random(1))
    rows = summaries.summary(table.runs(records))
    return "\n".join(text_findings.findings(rows, records))


def main() -> None:
    chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    n_right = 0
    n_planted = 0
    for name, plant, records in planted(chance):
        verdict, figures = verdict_of(records, plant.phase)
        right = is_right(plant, records)
        n_planted += 1
        n_right += right
        mark = "right" if right else "WRONG"
        print(f"{mark}  {name} ({plant.factor:.2f}x): {verdict}, {figures}", flush=True)
    for name, records in published():
        verdict, figures = verdict_of(records, DECODE)
        print(f"published  {name}: {verdict}, {figures}", flush=True)
    n_false = 0
    n_honest = 0
    for name, records in honest(chance):
        verdicts = {phase: verdict_of(records, phase) for phase in (PREFILL, DECODE)}
        n_honest += 1
        n_false += any(verdict in (KERNEL, CLIFF) for verdict, _ in verdicts.values())
        summary = "; ".join(
            f"{phase} {' '.join(summary)}" for phase, summary in verdicts.items()
        )
        print(f"honest  {name}: {summary}", flush=True)
    print(f"{n_right} of {n_planted} planted sessions named right; 19 of 20 wanted")
    print(f'{n_false} of {n_honest} honest sessions called "kernel" or "cliff"; 0 wanted')


if __name__ == "__main__":
    main()
