"""The explorable part of a page: its script predicts what lab predict does, and nothing else runs or stands there."""

import dataclasses
import itertools
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.record import DECODE, PREFILL, Ceilings, Device, Placement, Record
from lab.errors import LabError
from lab.features.report import page
from lab.roofline import probing, step_kernels
from lab.features.predict import laws, wording
from lab.roofline import learning, prediction
from lab.roofline.prediction import Here
from lab.roofline.step_prediction import StepPrediction
from lab.models import catalog, devices, synthetic
from tests.conftest import SETTINGS, run_lab
from tests.test_explain import FAST
from tests.test_prediction import epyc
from tests.test_report import Page, browser, contrast, evil, look, session

__all__ = ["browser"]  # a fixture

ONE = {"device": 0, "model": 0, "prompt": 1000, "gen": 200, "users": 1, "cached": 0}


def ask(browser: Any, settings: list[dict[str, int]]) -> list[dict[str, Any]]:
    """What the page's script predicts."""
    found: list[dict[str, Any]] = browser.execute_script(
        "return arguments[0].map(request).map(({prefill, decode, memory}) => ({prefill, decode, memory}))",
        settings,
    )
    return found


@cache
def here() -> tuple[list[Record], Ceilings]:
    """Runs of the sample's machine alone."""
    records, best = epyc(10, 512, 1000, 4096)
    return [one for one in records if one.machine == best.machine], best


@cache
def html() -> str:
    return page.html(here()[0], [here()[1]])


def with_ceilings(runs: list[Record]) -> str:
    """A page of runs on a machine whose ceilings are known, but not for their kernels."""
    other = dataclasses.replace(
        FAST, machine=runs[0].machine, rates=tuple(r for r in FAST.rates if r.type == "Q8_0")
    )
    names = probing.place_of_record(runs[0]).devices
    return page.html(
        runs, [dataclasses.replace(other, on_gpu=bool(one), device=one) for one in names]
    )


def opened(
    browser: Any, path: Path, text: str, width: int = 1280, scheme: str = "light"
) -> dict[str, Any]:
    """The numbers of a page, in the browser."""
    path.write_text(text)
    found = look(browser, path, width, scheme)
    assert found["overflow"] <= 0 and contrast(found["paper"], found["ink"]) > 7
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
    wanted = {"limit": limit, "expected": expected, "low": ends[0], "high": ends[1]}
    return all(
        shown[name] is None if value is None else shown[name] == pytest.approx(value, rel=1e-6)
        for name, value in wanted.items()
    )


def test_it_predicts_as_lab_predict_does_for_random_requests(browser: Any, tmp_path: Path) -> None:
    records, best = here()
    packed = synthetic.by_quantization(catalog.find("smollm2-135m")).values()
    known = opened(browser, tmp_path / "page.html", html())
    models = {f"{one.name} {one.quantization}": one for one in (records[0].model, *packed)}
    assert [*models] == known["models"] and len(models) == 5
    settings = records[0].settings
    learned = learning.learn(records, best)
    own = [i for i, law in enumerate(known["laws"][0]) if "why" not in law]
    assert [known["models"][i].split()[-1] for i in own] == [
        "Q4_1",
        "Q4_0",
        "Q8_0",
    ]  # of these there are ceilings
    dice = random.Random(1)
    asked = []
    for i in range(60):
        prompt = round(10 ** dice.uniform(0, 3.9))
        answer = round(10 ** dice.uniform(0.4, 3.6))
        device = 0 if i < 30 else dice.randrange(1, len(known["devices"]))
        model = dice.choice(own) if i < 30 else dice.randrange(len(models))
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
    for one, shown in zip(asked, ask(browser, asked), strict=True):
        chosen = models[known["models"][one["model"]]]
        n = one["prompt"]
        gen = one["gen"]
        if one["device"] == 0:
            row = Here(chosen, settings, best, learned).request(n, gen)
            far = [
                any(words.startswith(phase) for words in wording.beyond(row.extrapolations))
                for phase in (PREFILL, DECODE)
            ]
            assert [shown["prefill"]["beyond"], shown["decode"]["beyond"]] == far, one
        else:
            other = devices.find_device(known["devices"][one["device"]]["name"])
            row = prediction.on_device(chosen, settings, other, n, gen, one["users"])
        assert agrees(
            shown["prefill"], row.prefill_limit_s, row.prefill_expected_s, row.prefill_s
        ), one
        assert agrees(shown["decode"], row.tpot_limit_s, row.tpot_expected_s, row.tpot_s), one
        assert shown["memory"]["total"] == prediction.memory_bytes(
            chosen, settings, n + gen, one["users"]
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
    roof = step_kernels.roof(best)
    alone = Here(model, settings, best, learned).request(1000, 200)
    asked = [
        {**ONE, "users": n, "cached": cached}
        for n, cached in itertools.product((1, 2, 7, 32), (0, 1, 600, 999))
    ]
    for one, shown in zip(asked, ask(browser, asked), strict=True):
        others = [(1, 1099)] * (one["users"] - 1)
        seconds = steps.seconds(1, 1099, one["users"], others)
        work = cost.step(model, 1, 1099, one["users"], beside=others)
        assert seconds and work
        least = max(work.n_bytes / roof.gbps, work.flops / roof.gflops) / 1e9
        assert shown["decode"]["expected"] == pytest.approx(max(seconds, least), rel=1e-6)
        rest = learning.prompt_steps(1000 - one["cached"], settings, one["cached"])
        costs = learning.costs_of(model, settings, best, rest)
        expected = learned.fit.seconds(learning.case_of(PREFILL, 1000.0, model, settings), costs)
        assert shown["prefill"]["expected"] == pytest.approx(expected, rel=1e-6)
        assert (shown["prefill"]["low"] is None) == bool(
            one["cached"]
        )  # no run measured these ranges
        slower = seconds / (
            steps.seconds(1, 1099, 1) or math.nan
        )  # the range: as wide as for one user
        ends = slower * alone.tpot_s[0], slower * alone.tpot_s[1]
        assert (shown["decode"]["low"], shown["decode"]["high"]) == pytest.approx(ends, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-4b"])
def test_the_cost_of_steps_is_that_of_the_model(browser: Any, tmp_path: Path, name: str) -> None:
    model = synthetic.model_of(catalog.find(name), "Q4_0")
    runs = [dataclasses.replace(record, model=model) for record in session()]
    opened(browser, tmp_path / "page.html", with_ceilings(runs))
    dice = random.Random(2)
    asked = [[dice.randint(1, 600), dice.randint(0, 9000), dice.randint(0, 1)] for _ in range(50)]
    asked += [[1, dice.randint(0, 9000), n, n] for n in (2, 5, 32)]
    found = browser.execute_script(
        "return arguments[0].map(one => cost(data.shapes[0], ...one))", asked
    )
    for (n, past, outputs, *users), shown in zip(asked, found, strict=True):
        step = cost.step(
            model, n, past, outputs, beside=[(n, past)] * (users[0] - 1 if users else 0)
        )
        assert step is not None
        assert [shown["weights"], shown["bytes"], shown["flops"]] == pytest.approx(
            [step.weight_bytes, step.n_bytes, step.flops], rel=1e-6
        )
    need = browser.execute_script(
        "return [1, 300, 9000].map(n => memoryOf(data.shapes[0], n, 1).total)"
    )
    assert need == [prediction.memory_bytes(model, SETTINGS, n) for n in (1, 300, 9000)]


def test_what_is_not_known_is_said_and_not_computed(browser: Any, tmp_path: Path) -> None:
    found = opened(browser, tmp_path / "page.html", with_ceilings(session()))
    assert "lab ceilings" in found["laws"][0][0]["why"]
    browser.execute_script("inputs.device.value = 0; update()")
    text = browser.find_element("id", "explore-part").text
    assert "There is no prediction for this choice." in text and "lab ceilings" in text
    shown = [
        browser.find_element("id", f"explore-{name}")
        for name in ("request", "prefill-figure", "decode-figure")
    ]
    assert not any(one.is_displayed() for one in shown)
    without_peak = [not law.get("peak") for (law, *_) in found["laws"]].index(True, 1)
    browser.execute_script(f"inputs.device.value = {without_peak}; update()")
    assert [one.is_displayed() for one in shown] == [False, False, True]
    text = browser.find_element("id", "explore-part").text
    assert (
        "Predicted: the tokens of the answer take" in text
        and "prefill is not predicted" in text
        and "lab ceilings" in text
    )


def test_runs_on_two_gpus_are_not_predicted_and_their_memory_is_not_that_of_the_first() -> None:
    pair = tuple(Device(f"CUDA{i}", "Some GPU", "gpu", 10**10) for i in range(2))
    (records, best) = here()
    n_layer = here()[0][0].model.n_layer or 0
    one = next(one for one in records if one.run.is_timed)
    both = dataclasses.replace(
        one,
        machine=dataclasses.replace(one.machine, devices=(*one.machine.devices, *pair)),
        settings=dataclasses.replace(one.settings, n_gpu_layers=n_layer + 1),
        run=dataclasses.replace(one.run, placement=Placement((*["CUDA0"] * n_layer, "CUDA1"), ())),
    )
    found = laws.laws([both, one], [best])
    assert found["devices"][0]["memory"] is None and "for one GPU" in found["laws"][0][0]["why"]
    assert "why" not in found["laws"][1][0]


def test_without_ceilings_a_page_has_no_script_and_with_them_it_allows_one_only(
    tmp_path: Path,
) -> None:
    records, best = here()
    for plain in (page.html(records, []), page.html(records, [best], explore=False)):
        assert "script-src" not in plain and "explore" not in plain
    shown = html()
    kinds = [one.get("type") for one in Page(shown).named("script")]
    assert kinds == ["application/json", "application/gzip", None]
    (policy,) = [one["content"] or "" for one in Page(shown).named("meta") if "http-equiv" in one]
    assert (
        policy.startswith("default-src 'none'")
        and policy.count("sha256-") == 1
        and "unsafe-eval" not in policy
    )
    assert len(Page(shown).named("label")) == 6 and shown.count('role="status"') == 1
    sample = tmp_path / "a.jsonl"
    out = tmp_path / "a.html"
    results.save(sample, *[one for one in records if one.run.is_timed][:2], best)
    assert run_lab("report", sample, "--out", out, "--no-explore")[0] == 0
    assert "mini-lab-laws" in shown and "mini-lab-laws" not in out.read_text()


def test_a_hostile_record_stays_text(browser: Any, tmp_path: Path) -> None:
    own = [one for one in here()[0] if one.run.is_timed][:2]
    hostile = [dataclasses.replace(evil(one), settings=one.settings) for one in own]
    text = with_ceilings(hostile)
    known = opened(browser, tmp_path / "page.html", text)
    assert "<script>alert(1)" in known["devices"][0]["name"] and "<img" in known["models"][0]
    assert "<img" not in text and text.count("<script>") == 1
    assert browser.execute_script("return document.images.length") == 0
    assert "alert(1)" in browser.find_element("id", "explore-device").text


@pytest.mark.parametrize("n_embd, n_ubatch", [(-1, 512), (10**15, 512), (576, 0)])
def test_impossible_sizes_are_left_out(n_embd: int, n_ubatch: int) -> None:
    records, best = here()
    (one, *_) = (record for record in records if record.run.is_timed)
    model = dataclasses.replace(one.model, n_embd=n_embd)
    settings = dataclasses.replace(one.settings, n_ubatch=n_ubatch)
    hostile = dataclasses.replace(one, model=model, settings=settings)
    with pytest.raises(LabError, match="nothing to explore"):
        laws.laws([hostile], [best])
    found = laws.laws([one, hostile], [best])
    assert len(found["devices"]) == 1 + len(devices.devices()) and "why" not in found["laws"][0][0]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_in_a_browser_keys_move_the_sliders(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    opened(browser, tmp_path / "page.html", html(), width, scheme)
    said = browser.find_element("id", "explore-said")
    before = said.text
    prompt = browser.find_element("id", "explore-prompt")
    prompt.send_keys("\ue014")  # right
    assert said.text != before and said.text.startswith("Predicted: the prompt takes ")
    assert prompt.get_attribute("aria-valuetext").endswith(" tokens")
    browser.find_element("id", "explore-users").send_keys("\ue014")
    note = browser.find_element("id", "explore-note")
    assert (
        said.text.startswith("Predicted: 2 users send at once")
        and "as wide as for one" in note.text
    )
    browser.find_element("id", "explore-cached").send_keys("\ue014")
    assert (
        "Prefill has no range" in note.text
        and "(1 %)" in browser.find_element("id", "explore-cached-is").text
    )
    names = browser.execute_script(
        "return [...document.querySelectorAll('#explore-part [role=img]')].map(one => one.getAttribute('aria-label'))"
    )
    assert len(names) == 4 and all(len(name) > 20 for name in names)
    assert len(browser.find_elements("css selector", "#explore-prefill .line")) > 20
    assert browser.find_elements("css selector", "#explore-prefill .far")
    assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]
