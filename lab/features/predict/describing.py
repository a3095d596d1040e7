"""The facts of a device, asked one by one."""

from __future__ import annotations

import click

from lab.models import described, processors

QUESTIONS = (
    ("", "Device or processor, such as rtx-3060 or core-i7-8700 (Enter: unknown)"),
    ("", "Memory, such as DDR4-3200 x 2 or LPDDR5X-8533 x 128 bit (Enter: unknown)"),
    ("gbps=", "Or its bandwidth in GB/s (Enter: unknown)"),
    ("cores=", "Cores of a processor, without hyper-threads (Enter: unknown)"),
    (
        "simd=",
        f"Best instructions: {', '.join(processors.instruction_sets())} (Enter: unknown)",
    ),
    ("backend=", f"Backend of llama.cpp: {', '.join(described.BACKENDS)} (Enter: usual)"),
)


def device_of_answers() -> str:
    """The words that describe the device of the answers. LabError if they say nothing."""
    words = []
    for key, question in QUESTIONS:
        answer = click.prompt(question, default="", show_default=False, err=True).strip()
        if answer:
            words.append(f"{key}{answer}")
    text = " ".join(words)
    described.find(text)
    click.echo(f'Next time: --device "{text}"', err=True)
    return text
