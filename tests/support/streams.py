"""Events of a server's stream, as its bytes."""

from __future__ import annotations

import json
from typing import Any


def sse(*chunks: dict[str, Any] | str, end: str = "\n\n") -> bytes:
    return "".join(
        f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}{end}"
        for chunk in chunks
    ).encode()


def delta(
    content: dict[str, Any],
    finish: str | None = None,
    choice: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A chunk of a chat with one choice."""
    choice = {
        "index": 0,
        "delta": content,
        "finish_reason": finish,
    } | (choice or {})
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [choice],
        **more,
    }


def usage(n_prompt: int, n: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n,
        "total_tokens": n_prompt + n,
        **more,
    }
