"""A server without a model whose speed depends on its options, as a program that `lab tune --serve` starts in tests.

    python -m tests.tunable_server --port 8080 --parallel 2

It answers `--parallel` requests at once; the others wait. It rejects `--flash-attn on`, and `--ubatch-size 64` makes it
end at its first long answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.odd_server import CHAT_PATH, STREAM, Canned, as_json, odd_server, stream

TOKEN_S = 0.004


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--flash-attn", choices=("on", "off"), default="off")
    parser.add_argument("--ubatch-size", type=int, default=512)
    asked = parser.parse_args()
    if asked.flash_attn == "on":
        sys.exit("error: flash attention needs a GPU")
    slots = threading.Semaphore(asked.parallel)

    def answer(question: dict[str, Any]) -> Canned:
        n = question["max_tokens"]
        if asked.ubatch_size == 64 and n > 4 and "Say yes" not in str(question):
            print("GGML_ASSERT failed", flush=True)
            os._exit(3)

        def pieces(_: dict[str, Any]) -> Iterator[bytes]:
            with slots:
                for piece in stream(*[" word"] * n):
                    time.sleep(TOKEN_S)
                    yield piece

        return Canned(pieces, kind=STREAM)

    with odd_server({CHAT_PATH: answer, "/health": as_json({"status": "ok"})}, port=asked.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
