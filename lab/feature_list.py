"""The list of features: what the command line, the readers of files and the pages find them by.

Plain data, below everything else. To remove a feature, remove its room and its entry. A target is
written as `module:attribute`, and imported when it is used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A command, and what its results are shown and read by."""

    name: str
    group: str  # in the help of `lab`
    help: str  # one line
    command: str  # target of the click command
    # Targets of tuples of `Kind`, in the order in which they are shown
    results: tuple[str, ...] = ()
    experiment: str | None = None  # target of the `ExperimentRuns` of its runs
    page: str | None = None  # target of the function that writes a page of records
    lines: dict[str, str] = field(default_factory=dict)  # by kind of line: target of its class


MEASURE = "Measure"
UNDERSTAND = "Understand"
CHOOSE = "Compare and choose"
MANY = "Serve many"
SERVERS = "Servers"
FILES = "Files"
MACHINES = "Machines"

TOGETHER = "batch"
"""The experiment of sequences decoded together, which other features measure too."""

CHOOSING = "choose"
"""The experiment of choosing tokens, whose runs tell what a chain of samplers costs."""

FEATURES: tuple[Feature, ...] = (
    Feature(
        name="measure",
        group=MEASURE,
        help="Time every token of answers to prompts of several lengths.",
        command="lab.features.measure:command",
        results=(
            "lab.show.text_results:KINDS",
            "lab.show.text_requests:KINDS",
        ),
    ),
    Feature(
        name="sweep",
        group=MEASURE,
        help="Measure how both phases slow down as one prompt grows.",
        command="lab.features.sweep:command",
    ),
    Feature(
        name="start",
        group=MEASURE,
        help="Show what it takes until the first token can come, from the disk and from memory.",
        command="lab.features.start.command:command",
        results=("lab.features.start.command:KINDS",),
        lines={
            "start": "lab.features.start.lines:StartLine",
            "memory": "lab.roofline.paging:MemoryLine",
        },
    ),
    Feature(
        name="ab",
        group=MEASURE,
        help="Compare settings or models, measured alternately.",
        command="lab.features.ab:command",
    ),
    Feature(
        name="ceilings",
        group=UNDERSTAND,
        help="Measure how fast this machine's basic operations can be.",
        command="lab.features.ceilings:command",
    ),
    Feature(
        name="explain",
        group=UNDERSTAND,
        help="Explain what limited each phase, and what would help.",
        command="lab.features.explain.command:explain",
    ),
    Feature(
        name="why",
        group=UNDERSTAND,
        help="Explain why two speeds differ, cause by cause.",
        command="lab.features.why.command:command",
    ),
    Feature(
        name="trace",
        group=UNDERSTAND,
        help="Show where the time of one token goes, operation by operation.",
        command="lab.features.trace.command:command",
        results=("lab.features.trace.command:KINDS",),
        lines={
            "trace": "lab.features.trace.lines:TraceLine",
            "attention": "lab.features.trace.lines:AttentionLine",
        },
    ),
    Feature(
        name="choose",
        group=UNDERSTAND,
        help="Measure what choosing a token costs: samplers, grammars.",
        command="lab.features.choose.command:command",
        results=("lab.features.choose.command:KINDS",),
        experiment="lab.features.choose.planning:RUNS",
    ),
    Feature(
        name="claims",
        group=UNDERSTAND,
        help="Test common claims about LLM inference on this machine.",
        command="lab.features.claims.command:command",
        results=("lab.features.claims.section:KINDS",),
    ),
    Feature(
        name="words",
        group=UNDERSTAND,
        help="Explain the lab's terms, such as TTFT, ridge or ubatch.",
        command="lab.features.words:words",
    ),
    Feature(
        name="show",
        group=UNDERSTAND,
        help="Show saved results (files or folders) as tables.",
        command="lab.features.show:show",
    ),
    Feature(
        name="plot",
        group=UNDERSTAND,
        help="Draw the plots of saved results (files or folders).",
        command="lab.features.show:plot",
    ),
    Feature(
        name="report",
        group=UNDERSTAND,
        help="Write results as one HTML page with the raw data inside.",
        command="lab.features.report.command:report",
        page="lab.features.report.page:report",
    ),
    Feature(
        name="compare",
        group=CHOOSE,
        help="Compare saved results: machines, builds, models, settings.",
        command="lab.features.compare:compare",
    ),
    Feature(
        name="bisect",
        group=CHOOSE,
        help="Find the build of llama.cpp that became slower.",
        command="lab.features.bisect.command:command",
        results=("lab.features.bisect.section:KINDS",),
        lines={
            "bisect": "lab.features.bisect.lines:BisectLine",
            "bisect build": "lab.features.bisect.lines:BuildLine",
        },
    ),
    Feature(
        name="predict",
        group=CHOOSE,
        help="Predict a model's speed: which device suits it, and why.",
        command="lab.features.predict.command:predict",
    ),
    Feature(
        name="quant",
        group=CHOOSE,
        help="Show what quantizations cost in quality and gain in speed.",
        command="lab.features.quant.command:command",
        results=("lab.features.quant.command:KINDS",),
        lines={"quality": "lab.features.quant.lines:QualityLine"},
    ),
    Feature(
        name="tune",
        group=CHOOSE,
        help="Find the fastest settings for your requests, and prove it.",
        command="lab.features.tune.command:command",
        results=("lab.features.tune.section:KINDS",),
        lines={"tuning": "lab.features.tune.lines:TuningLine"},
    ),
    Feature(
        name="batch",
        group=MANY,
        help="Measure what decoding several answers together gains.",
        command="lab.features.batch:command",
        results=("lab.features.batch:KINDS",),
        experiment="lab.features.batch:RUNS",
    ),
    Feature(
        name="turns",
        group=MANY,
        help="Measure what each turn of a conversation processes again.",
        command="lab.features.turns.command:command",
        results=("lab.features.turns.command:KINDS",),
        experiment="lab.features.turns.conversation:RUNS",
    ),
    Feature(
        name="record",
        group=MANY,
        help="Record an agent's requests, and name what breaks its server's cache.",
        command="lab.features.recording.command:command",
        results=("lab.features.recording.section:KINDS",),
        lines={"recorded": "lab.features.recording.lines:RecordedCall"},
    ),
    Feature(
        name="stall",
        group=MANY,
        help="Measure how long a new prompt interrupts running answers.",
        command="lab.features.stall:command",
        results=("lab.features.stall:KINDS",),
        experiment="lab.features.stall:RUNS",
    ),
    Feature(
        name="speculate",
        group=MANY,
        help="Measure what speculative decoding costs and gains.",
        command="lab.features.speculate.command:command",
        results=("lab.features.speculate.command:KINDS",),
        experiment="lab.features.speculate.setup:RUNS",
    ),
    Feature(
        name="rpc-server",
        group=SERVERS,
        help="Lend this machine's devices to another machine (llama.cpp's RPC).",
        command="lab.features.rpc_server:command",
    ),
    Feature(
        name="models",
        group=FILES,
        help="List models; subcommands: info, make, pull, remove.",
        command="lab.features.models:models",
    ),
    Feature(
        name="export",
        group=FILES,
        help="Export results as llama-bench's JSON, or as tables.",
        command="lab.features.export_results:command",
    ),
    Feature(
        name="import",
        group=FILES,
        help="Import results of llama-bench.",
        command="lab.features.import_results:command",
    ),
    Feature(
        name="doctor",
        group=MACHINES,
        help="Show this machine, and find out why the lab fails or is slow.",
        command="lab.features.doctor.command:doctor",
    ),
)
"""Every feature, in the order of the help and of its results on a page."""


@functools.cache
def by_name() -> dict[str, Feature]:
    return {feature.name: feature for feature in FEATURES}


def load(target: str) -> Any:
    """The attribute that `module:attribute` names."""
    module, attribute = target.split(":")
    return getattr(import_module(module), attribute)


@functools.cache
def line_targets() -> dict[str, str]:
    """The target of the class of each kind of line that is no run."""
    targets: dict[str, str] = {}
    for feature in FEATURES:
        targets |= feature.lines
    return targets


def page_target() -> str:
    """The target of the function that writes a page."""
    return next(feature.page for feature in FEATURES if feature.page)
