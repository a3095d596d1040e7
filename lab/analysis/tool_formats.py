"""Requests as other tools would have reported them: the same events, by the tools' definitions and field names.

Each tool gives its figures in a JSON document for each load; guidellm_format.py, aiperf_format.py and vllm_format.py
say by which definitions, and where those were read. What a tool would give as 0 for want of a value is None here.

A tool counts every request that is no warm-up, also one whose prompt came from a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from lab.analysis import aiperf_format, guidellm_format, tool_groups, vllm_format
from lab.core.request import RequestRecord
from lab.errors import LabError

FORMATS = ("guidellm", "aiperf", "vllm")


def written(records: Iterable[RequestRecord], form: str) -> str:
    """The requests in one of FORMATS: GuideLLM's report, or a line of JSON for each run of AIPerf or vLLM.

    LabError where there are none.
    """
    grouped = tool_groups.groups(records)
    if not grouped:
        raise LabError(
            f"There are no requests to a server here, which --format {form} is for.",
            "Measure a server: lab measure --url http://127.0.0.1:8080/v1",
        )
    if form == "guidellm":
        return json.dumps(guidellm_format.report(grouped), indent=2) + "\n"
    summary = {"aiperf": aiperf_format.summary, "vllm": vllm_format.summary}[form]
    return "".join(json.dumps(summary(group)) + "\n" for group in grouped)
