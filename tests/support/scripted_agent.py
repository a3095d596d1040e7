"""An agent that says what it is told to, and breaks its server's cache three times.

    lab record --url http://127.0.0.1:8080 -- python3 -m tests.support.scripted_agent {url}

Its requests are those of agent_transcript.py. From the third on the clock in the system
prompt shows another time, from the fifth on two tools come in another order, and from the seventh
on an old result of a tool is cut.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from tests.support.agent_transcript import requests

N_GEN = 24
CLOCK_AT = 3
TOOLS_AT = 5
CUT_AT = 7
CUT_MESSAGE = 5  # an old result of a tool, from 0
N_LEFT = 60  # letters of it


def body_of(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body of request `number`, from 1, as this agent sends it."""
    messages = [dict(message) for message in body["messages"]]
    tools = list(body["tools"])
    if number >= CLOCK_AT:
        messages[0]["content"] = messages[0]["content"].replace("08:00", "08:03")
    if number >= TOOLS_AT:
        tools[1:] = reversed(tools[1:])
    if number >= CUT_AT:
        messages[CUT_MESSAGE]["content"] = messages[CUT_MESSAGE]["content"][:N_LEFT]
    limits = {"max_tokens": N_GEN, "temperature": 0, "stream": True, "ignore_eos": True}
    return {**body, "messages": messages, "tools": tools, **limits}


def main(url: str) -> None:
    """Send all requests, and read their answers to the end."""
    for number, body in enumerate(requests(), 1):
        data = json.dumps(body_of(number, body)).encode()
        headers = {"Content-Type": "application/json"}
        question = urllib.request.Request(f"{url}/chat/completions", data, headers)
        with urllib.request.urlopen(question) as answer:
            answer.read()


if __name__ == "__main__":
    main(sys.argv[1])
