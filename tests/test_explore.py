"""The explorable part of a page: its script predicts what lab predict does, and nothing else runs
or stands there."""

import dataclasses
import itertools
import math
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.record import DECODE, PREFILL, Ceilings, Device, Placement, Record
from lab.errors import LabError
from lab.features.predict import laws, wording
from lab.features.report import page
from lab.models import catalog, devices, synthetic
from lab.roofline import kernel_rates, learning, prediction, probing
from lab.roofline.prediction import Here
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction
from tests.support.browser import Page, browser, contrast, evil, look, session
from tests.support.ceilings import epyc
from tests.support.command import run_lab
from tests.support.rates import FAST
from tests.support.records import SETTINGS

pytestmark = pytest.mark.usefixtures("undrawn")

__all__ = ["browser"]  # a fixture

ONE = {
    "device": 0,
    "model": 0,
    "prompt": 1000,
    "gen": 200,
    "users": 1,
    "cached": 0,
}


def ask(browser: Any, settings: list[dict[str, int]]) -> list[dict[str, Any]]:
    """What the page's script predicts."""
    predictions: list[dict[str, Any]] = browser.execute_script(
        "return arguments[0].map(request)"
        ".map(({prefill, decode, memory}) => ({prefill, decode, memory}))",
        settings,
    )
    return predictions


@cache
def here() -> tuple[list[Record], Ceilings]:
    """Runs of the sample's machine alone."""
    records, best = epyc(10, 512, 1000, 4096)
    return [record for record in records if record.machine == best.machine], best


@cache
def html() -> str:
    return page.html(here()[0], [here()[1]])


def with_ceilings(runs: list[Record]) -> str:
    """A page of runs on a machine whose ceilings are known, but not for their kernels."""
    ceilings = dataclasses.replace(
        FAST, machine=runs[0].machine, rates=tuple(r for r in FAST.rates if r.type == "Q8_0")
    )
    names = probing.place_of_record(runs[0]).devices
    return page.html(
        runs,
        [
            dataclasses.replace(
                ceilings,
                on_gpu=bool(name),
                device=name,
            )
            for name in names
        ],
    )


def opened(
    browser: Any, path: Path, text: str, width: int = 1280, scheme: str = "light"
) -> dict[str, Any]:
    """The numbers of a page, in the browser."""
    path.write_text(text)
    page_look = look(browser, path, width, scheme)
    assert page_look["overflow"] <= 0
    assert contrast(page_look["paper"], page_look["ink"]) > 7
    numbers: dict[str, Any] = browser.execute_script("return data")
    return numbers


def agrees(
    shown: dict[str, Any] | None,
    limit: float | None,
    expected: float | None,
    ends: tuple[float, float],
) -> bool:
    """Whether a phase of the script equals a prediction, in all its figures; NaN: not predicted."""
    if shown is None:
        return ends[0] != ends[0]
    expected_figures = {
        "limit": limit,
        "expected": expected,
        "low": ends[0],
        "high": ends[1],
    }
    for name, value in expected_figures.items():
        if value is None:
            if shown[name] is not None:
                return False
        elif shown[name] != pytest.approx(value, rel=1e-6):
            return False
    return True


def test_it_predicts_as_lab_predict_does_for_random_requests(
    browser: Any, tmp_path: Path
) -> None:
    records, best = here()
    packed = synthetic.by_quantization(catalog.find("smollm2-135m")).values()
    page_data = opened(browser, tmp_path / "page.html", html())
    models = {
        f"{choice.name} {choice.quantization}": choice
        for choice in (records[0].model, *packed)
    }
    assert [*models] == page_data["models"]
    assert len(models) == 5
    settings = records[0].settings
    learned = learning.learn(records, best)
    with_ceilings_of = [i for i, law in enumerate(page_data["laws"][0]) if "why" not in law]
    assert [page_data["models"][i].split()[-1] for i in with_ceilings_of] == [
        "Q4_1",
        "Q4_0",
        "Q8_0",
    ]  # of these there are ceilings
    dice = random.Random(1)
    asked = []
    for i in range(60):
        prompt = round(10 ** dice.uniform(0, 3.9))
        answer = round(10 ** dice.uniform(0.4, 3.6))
        device = 0 if i < 30 else dice.randrange(1, len(page_data["devices"]))
        model = dice.choice(with_ceilings_of) if i < 30 else dice.randrange(len(models))
        users = dice.choice((1, 2, 7, 32)) if device else 1
        asked.append(
            {
                "device": device,
                "model": model,
                "prompt": prompt,
                "gen": answer,
                "users": users,
                "cached": 0,
            }
        )
    for choice, shown in zip(asked, ask(browser, asked), strict=True):
        chosen = models[page_data["models"][choice["model"]]]
        n = choice["prompt"]
        gen = choice["gen"]
        if choice["device"] == 0:
            row = Here(chosen, settings, best, learned).request(n, gen)
            clauses = "\n".join(wording.beyond(row.extrapolations))
            for phase in (PREFILL, DECODE):
                is_beyond = re.search(f"^{phase}", clauses, re.MULTILINE) is not None
                assert shown[phase]["beyond"] == is_beyond, choice
        else:
            device_of_row = devices.find_device(page_data["devices"][choice["device"]]["name"])
            row = prediction.OnDevice(chosen, settings, device_of_row).request(
                n, gen, choice["users"]
            )
        assert agrees(
            shown["prefill"], row.prefill.limit_s, row.prefill.expected_s, row.prefill_s
        ), choice
        assert agrees(shown["decode"], row.token.limit_s, row.token.expected_s, row.tpot_s), (
            choice
        )
        assert shown["memory"]["total"] == prediction.memory_bytes(
            chosen, settings, n + gen, choice["users"]
        )


def test_several_users_and_a_cached_prompt_follow_the_laws_of_steps(
    browser: Any, tmp_path: Path
) -> None:
    records, best = here()
    opened(browser, tmp_path / "page.html", html())
    model = records[0].model
    settings = records[0].settings
    learned = learning.learn(records, best)
    steps = StepPrediction(model, settings, best, learned.fit, learned.n_runs)
    roof = kernel_rates.roof(best)
    alone = Here(model, settings, best, learned).request(1000, 200)
    asked = [
        {
            **ONE,
            "users": n,
            "cached": cached,
        }
        for n, cached in itertools.product((1, 2, 7, 32), (0, 1, 600, 999))
    ]
    for choice, shown in zip(asked, ask(browser, asked), strict=True):
        other_spans = [(1, 1099)] * (choice["users"] - 1)
        seconds = steps.seconds(1, 1099, choice["users"], other_spans)
        work = cost.step(model, 1, 1099, choice["users"], beside=other_spans)
        assert seconds
        assert work
        least = max(work.n_bytes / roof.gbps, work.flops / roof.gflops) / 1e9
        assert shown["decode"]["expected"] == pytest.approx(max(seconds, least), rel=1e-6)
        uncached_steps = learning.prompt_steps(
            1000 - choice["cached"], settings, choice["cached"]
        )
        costs = learning.costs_of(StepKernels(model, settings, best), uncached_steps)
        expected = learned.fit.seconds(
            learning.case_of(PREFILL, 1000.0, model, settings), costs
        )
        assert shown["prefill"]["expected"] == pytest.approx(expected, rel=1e-6)
        assert (shown["prefill"]["low"] is None) == bool(
            choice["cached"]
        )  # no run measured these ranges
        slower = seconds / (
            steps.seconds(1, 1099, 1) or math.nan
        )  # the range: as wide as for one user
        ends = slower * alone.tpot_s[0], slower * alone.tpot_s[1]
        assert (shown["decode"]["low"], shown["decode"]["high"]) == pytest.approx(
            ends, rel=1e-6
        )


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-4b"])
def test_the_cost_of_steps_is_that_of_the_model(
    browser: Any,
    tmp_path: Path,
    name: str,
) -> None:
    model = synthetic.model_of(catalog.find(name), "Q4_0")
    runs = [dataclasses.replace(record, model=model) for record in session()]
    opened(browser, tmp_path / "page.html", with_ceilings(runs))
    dice = random.Random(2)
    asked = [
        [
            dice.randint(1, 600),
            dice.randint(0, 9000),
            dice.randint(0, 1),
        ]
        for _ in range(50)
    ]
    asked += [[1, dice.randint(0, 9000), n, n] for n in (2, 5, 32)]
    costs = browser.execute_script(
        "return arguments[0].map(step => cost(data.shapes[0], ...step))", asked
    )
    for (n, past, outputs, *users), shown in zip(asked, costs, strict=True):
        step = cost.step(
            model, n, past, outputs, beside=[(n, past)] * (users[0] - 1 if users else 0)
        )
        assert step is not None
        assert [shown["weights"], shown["bytes"], shown["flops"]] == pytest.approx(
            [step.weight_bytes, step.n_bytes, step.flops], rel=1e-6
        )
    need = browser.execute_script(
        "return [1, 300, 9000].map(n => memoryOf({}, data.shapes[0], n, 1).total)"
    )
    assert need == [prediction.memory_bytes(model, SETTINGS, n) for n in (1, 300, 9000)]


def test_what_is_not_known_is_said_and_not_computed(browser: Any, tmp_path: Path) -> None:
    page_data = opened(browser, tmp_path / "page.html", with_ceilings(session()))
    assert "lab ceilings" in page_data["laws"][0][0]["why"]
    browser.execute_script("inputs.device.value = 0; update()")
    text = browser.find_element("id", "explore-part").text
    assert "There is no prediction for this choice." in text
    assert "lab ceilings" in text
    shown = [
        browser.find_element("id", f"explore-{name}")
        for name in ("request", "prefill-figure", "decode-figure")
    ]
    assert not any(element.is_displayed() for element in shown)
    without_peak = [not law.get("peak") for (law, *_) in page_data["laws"]].index(True, 1)
    browser.execute_script(f"inputs.device.value = {without_peak}; update()")
    assert [element.is_displayed() for element in shown] == [False, False, True]
    text = browser.find_element("id", "explore-part").text
    assert "Predicted: the tokens of the answer take" in text
    assert "prefill is not predicted" in text
    assert "lab ceilings" in text


def test_runs_on_two_gpus_are_not_predicted_and_their_memory_is_not_that_of_the_first() -> (
    None
):
    pair = tuple(Device(f"CUDA{i}", "Some GPU", "gpu", 10**10) for i in range(2))
    (records, best) = here()
    n_layer = here()[0][0].model.n_layer or 0
    record = next(record for record in records if record.run.is_timed)
    both = dataclasses.replace(
        record,
        machine=dataclasses.replace(record.machine, devices=(*record.machine.devices, *pair)),
        settings=dataclasses.replace(record.settings, n_gpu_layers=n_layer + 1),
        run=dataclasses.replace(
            record.run, placement=Placement((*["CUDA0"] * n_layer, "CUDA1"), ())
        ),
    )
    numbers = laws.laws([both, record], [best])
    assert numbers["devices"][0]["memory"] is None
    assert "for one GPU" in numbers["laws"][0][0]["why"]
    assert "why" not in numbers["laws"][1][0]


def test_without_ceilings_a_page_has_no_script_and_with_them_it_allows_one_only(
    tmp_path: Path,
) -> None:
    records, best = here()
    for plain in (
        page.html(records, []),
        page.html(records, [best], explore=False),
    ):
        assert "script-src" not in plain
        assert "explore" not in plain
    shown = html()
    kinds = [item.get("type") for item in Page(shown).named("script")]
    assert kinds == ["application/json", "application/gzip", None]
    (policy,) = [
        item["content"] or "" for item in Page(shown).named("meta") if "http-equiv" in item
    ]
    assert policy.startswith("default-src 'none'")
    assert policy.count("sha256-") == 1
    assert "unsafe-eval" not in policy
    assert len(Page(shown).named("label")) == 6
    assert shown.count('role="status"') == 1
    sample = tmp_path / "a.jsonl"
    out = tmp_path / "a.html"
    results.save(sample, *[item for item in records if item.run.is_timed][:2], best)
    assert run_lab("report", sample, "--file", out, "--no-explore")[0] == 0
    assert "mini-lab-laws" in shown
    assert "mini-lab-laws" not in out.read_text()


def test_a_hostile_record_stays_text(browser: Any, tmp_path: Path) -> None:
    timed_runs = [record for record in here()[0] if record.run.is_timed][:2]
    hostile = [
        dataclasses.replace(evil(record), settings=record.settings) for record in timed_runs
    ]
    text = with_ceilings(hostile)
    page_data = opened(browser, tmp_path / "page.html", text)
    assert "<script>alert(1)" in page_data["devices"][0]["name"]
    assert "<img" in page_data["models"][0]
    assert "<img" not in text
    assert text.count("<script>") == 1
    assert browser.execute_script("return document.images.length") == 0
    assert "alert(1)" in browser.find_element("id", "explore-device").text


@pytest.mark.parametrize(
    "n_embd, n_ubatch",
    [
        (-1, 512),
        (10**15, 512),
        (576, 0),
    ],
)
def test_impossible_sizes_are_left_out(n_embd: int, n_ubatch: int) -> None:
    records, best = here()
    (record, *_) = (record for record in records if record.run.is_timed)
    model = dataclasses.replace(record.model, n_embd=n_embd)
    settings = dataclasses.replace(record.settings, n_ubatch=n_ubatch)
    hostile = dataclasses.replace(record, model=model, settings=settings)
    with pytest.raises(LabError, match="nothing to explore"):
        laws.laws([hostile], [best])
    numbers = laws.laws([record, hostile], [best])
    assert len(numbers["devices"]) == 1 + len(devices.devices())
    assert "why" not in numbers["laws"][0][0]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1280, "light"), (400, "dark")],
)
def test_in_a_browser_keys_move_the_sliders(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    opened(browser, tmp_path / "page.html", html(), width, scheme)
    answer = browser.find_element("id", "explore-said")
    before = answer.text
    prompt = browser.find_element("id", "explore-prompt")
    prompt.send_keys("\ue014")  # right
    assert answer.text != before
    assert answer.text.startswith("Predicted: the prompt takes ")
    assert prompt.get_attribute("aria-valuetext").endswith(" tokens")
    browser.find_element("id", "explore-users").send_keys("\ue014")
    note = browser.find_element("id", "explore-note")
    assert answer.text.startswith("Predicted: 2 users send at once")
    assert "as wide as for one" in note.text
    browser.find_element("id", "explore-cached").send_keys("\ue014")
    assert "Prefill has no range" in note.text
    assert "(1 %)" in browser.find_element("id", "explore-cached-is").text
    names = browser.execute_script(
        "return [...document.querySelectorAll('#explore-part [role=img]')]"
        ".map(image => image.getAttribute('aria-label'))"
    )
    assert len(names) == 4
    assert all(len(name) > 20 for name in names)
    assert len(browser.find_elements("css selector", "#explore-prefill .line")) > 20
    assert browser.find_elements("css selector", "#explore-prefill .far")
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
