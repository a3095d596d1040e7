"""Make models/published.csv from rows that other people published: python -m
tests.bench.clean_published RAW ...

RAW are CSVs with the columns source, url, collected, device, backend, model, quantization, test,
flash_attn, tps, stddev, commit, as_published, and where they have depth also n_prompt, n_depth,
n_gen and runtime. Every row of llama.cpp is kept. A row that breaks one of the RULES is marked
with the rule's name, and nothing is learned from it. Prints how many rows each rule marks, and
which devices are not in models/devices.toml."""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from pathlib import Path

from lab.core.memory import CPU
from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.models import catalog, described, devices
from lab.roofline import datasheet
from tests.bench.learn_published import (
    Row,
    case_for,
    model_of,
    row_of,
    seconds,
    sheet_of,
)

OUT = Path(__file__).parents[2] / "models" / "published.csv"

RULES = {
    "unknown-device": "The device is not in models/devices.toml.",
    "unclear-device": "The name covers devices with different memory: a series, or part of a card.",
    "unknown-model": "The model or its quantization is not in models/catalog.toml.",
    "small-cache": "The cache was not of type F16.",
    "other-build": "A fork of llama.cpp, or a build with kernels that are not the default's today.",
    "several-devices": "Several cards, or parts of the model on the CPU.",
    "other-runtime": "Not measured with llama.cpp or with what is built on it.",
    "slow-host": "A card behind a single-board computer.",
    "does-not-fit": "The weights take over 95 % of the card's memory: some lay elsewhere.",
    "no-peak": "The arithmetic peak of the device is not known: nothing bounds a prefill rate.",
    "above-bandwidth": "Faster than the memory bandwidth allows.",
    "above-peak": "Faster than the arithmetic peak allows.",
}
COLUMNS = [
    *(
        "source",
        "url",
        "collected",
        "device",
        "gpu_share",
        "backend",
        "model",
        "quantization",
        "phase",
        "n_prompt",
    ),
    *("n_depth", "n_ubatch", "threads", "flash_attn", "tps", "stddev", "commit", "marks"),
    "as_published",
]
HOSTS = re.compile(r"\b(Pi|CM5|Radxa|Rock|Orion|HiFive)\b")
NOTES = {
    "small-cache": re.compile(r"\bctk q|\bKV q|KV type q"),
    "other-build": re.compile("lhl-tune|qvac|rocwmma|MTP head|custom backend|SYCL_F16=OFF"),
    "several-devices": re.compile(r"-sm layer|\b2x\b|experts on CPU|ncmoe"),
}
SERIES = re.compile(r"\bSeries\b|-\d+[QC]\b|MIG ")
BUILT_ON = re.compile(
    "llama.cpp|localscore|llamafile|geerlingguy|ollama|lm ?studio|kobold", re.I
)
OTHER = re.compile(
    r"\b(vllm|mlx|exllama\w*|tensorrt\S*|mlc|sglang|transformers|ipex\S*)\b", re.I
)
BACKENDS = {
    "geforce": "CUDA",
    "datacenter": "CUDA",
    "apple": "Metal",
    "radeon": "ROCm",
    "arc": "Vulkan",
    "small": "Vulkan",
}


def marks_of(row: Row) -> tuple[str, ...]:
    """Why a row cannot be used: its device or model is unknown, or it breaks a limit."""
    device = sheet_of(row)
    model = model_of(row.model, row.quantization)
    marks = [] if device else ["unknown-device"]
    is_unknown = row.phase == DECODE and not row.n_prompt
    counted = row._replace(n_prompt=1) if is_unknown else row
    case = case_for(counted) if device else None
    if model is None or (device and not case):
        return (*marks, "unknown-model")
    if device is None or case is None:
        return tuple(marks)
    if device.memory_gb and (model.n_bytes or 0) > 0.95 * device.memory_gb * 2**30:
        marks.append("does-not-fit")
    if case.least_s is None:
        marks.append("no-peak")
    elif seconds(row) < case.least_s:
        marks.append("above-bandwidth" if row.phase == DECODE else "above-peak")
    return tuple(marks)


def chip_of(line: dict[str, str]) -> tuple[str, float | None]:
    """The name of the chip as it was published, and how many GPU cores it has where the name says
    so."""
    text = line["as_published"] or line["device"]
    if "n_gen" in line:
        return line["device"], None
    if "device=" in text:
        return line["device"].removesuffix("-unified"), None
    if "·" in text:
        parts = [part.strip() for part in text.split("·")]
        text = parts[1]
    inside = re.findall(r"\(([^()]*)\)", text)
    cores = re.search(r"(\d+) ?GPU", text)
    n_cores = float(cores[1]) if cores else None
    for part in [*inside, text]:
        part = re.sub(r"\d+P\+\d+E\+\d+GPU|\b\d+[- ]core\b", "", part).strip()
        full = re.sub("(?i)nvidia ", "RTX ", part), re.sub("(?i)amd ", "RX ", part)
        short = (
            re.sub(r"\s\d+ ?GB\b.*", "", part),
            part.split(" Mac")[0],
            re.sub(r"\s*\(.*", "", part),
        )
        for name in (part, *full, *short):
            if devices.called(name):
                return name, n_cores
    return text, n_cores


def device_of(line: dict[str, str]) -> tuple[devices.DeviceSheet | None, float, str]:
    """The device of the list, the part of its GPU cores, and the chip's name."""
    name, n_cores = chip_of(line)
    if line["backend"] == CPU:
        return processor_called(line["device"]), 1.0, line["device"]
    plain = re.sub(r"-(\d+gb|\d\d|gb10|mac-mini)$", "", name)
    short = re.sub(r"(\d)tis\b", r"\1-ti-super", plain), re.sub(r"(\d)s\b", r"\1-super", plain)
    device = next(filter(None, map(devices.called, (name, plain, *short))), None)
    if device is None:
        return None, 1.0, name
    if n_cores:
        device = devices.called(f"{device.name}-{n_cores:.0f}core") or device
    share = n_cores / device.gpu_cores if n_cores and device.gpu_cores else 1.0
    return device, round(min(share, 1.0), 3), name


def processor_called(name: str) -> devices.DeviceSheet | None:
    """The processor that a name describes; None for an unknown one."""
    try:
        return described.find(f"{name.removesuffix('-cpu')}:cpu")
    except LabError:
        return None


def name_of(line: dict[str, str]) -> str:
    """The name in the catalog, or the published one."""
    name = (
        line["model"].rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-it")
    )
    for text in (
        name,
        name.removeprefix("meta-"),
        name.replace("deepseek-r1-distill-", ""),
    ):
        try:
            return catalog.find(text).name
        except LabError:
            continue
    return name


def quantization_of(line: dict[str, str]) -> str:
    """As the source itself named it, where it did: the collector's int4 is any of them."""
    match = re.search(
        r"\b(I?Q\d\w*|F16|BF16|F32)( - Medium| - Small| - Large)?",
        line["as_published"].rpartition("·")[2],
    )
    if match and line["source"] == "localscore":
        return match[1].upper() + {
            " - Medium": "_M",
            " - Small": "_S",
            " - Large": "_L",
        }.get(match[2] or "", "_M" if match[1] in ("Q4_K", "Q5_K") else "")
    return line["quantization"].upper()


def backend_of(line: dict[str, str], device: devices.DeviceSheet | None) -> str:
    """As published, else what the runtime uses on such a device. llamafile has kernels of its own
    on AMD."""
    if line["backend"]:
        return line["backend"]
    backend = datasheet.backend_of(device) if device else ""
    return "tinyBLAS" if backend == "ROCm" and line["source"] == "localscore" else backend


def cleaned(line: dict[str, str]) -> dict[str, str]:
    """A row of the file, with its marks."""
    device, share, name = device_of(line)
    phase, n_prompt, n_depth = _lengths(line)
    note = f"{line['as_published']} {line['commit']}"
    ubatch = re.search(r"\bub (\d+)", note)
    row = {
        **{column: line.get(column, "") for column in COLUMNS},
        "device": device.name if device and line["backend"] != CPU else name,
        "gpu_share": f"{share:g}" if share != 1 else "",
        "backend": backend_of(line, device),
        "model": name_of(line),
        "quantization": quantization_of(line),
        "phase": phase,
        "n_prompt": n_prompt,
        "n_depth": n_depth,
        "n_ubatch": ubatch[1] if ubatch else "",
        "threads": threads_of(line),
        "as_published": line["as_published"] if "n_gen" in line else name,
        "marks": "",
    }
    marks = list(marks_of(row_of(row)))
    if SERIES.search(line["as_published"]):
        marks = ["unclear-device"] + [mark for mark in marks if mark != "unknown-device"]
    marks += [mark for mark, pattern in NOTES.items() if pattern.search(note)]
    if HOSTS.search(line["as_published"]) and line["backend"] != CPU:
        marks.append("slow-host")
    if OTHER.search(" ".join((line["source"], line["as_published"], line["backend"]))):
        marks.append("other-runtime")
    assert set(marks) <= set(RULES)
    return {
        **row,
        "marks": " ".join(marks),
    }


def threads_of(line: dict[str, str]) -> str:
    """The threads of a processor's row; "" where they are not published."""
    if line.get("threads"):
        return line["threads"]
    noted = re.search(r"\[.*\bt (\d+)", line["as_published"])
    return noted[1] if noted and line["backend"] == CPU else ""


def _lengths(line: dict[str, str]) -> tuple[str, str, str]:
    """The phase, the tokens of the prompt or before the middle of the answer, and the tokens
    before a prompt."""
    if "n_gen" in line:
        n_prompt, n_depth, n_gen = (
            int(line[name]) for name in ("n_prompt", "n_depth", "n_gen")
        )
        return (
            (DECODE, str(n_depth + n_gen // 2), "")
            if n_gen
            else (
                PREFILL,
                str(n_prompt),
                str(n_depth or ""),
            )
        )
    phase, length = re.fullmatch(r"(pp|tg)(\d*)", line["test"]).groups()  # type: ignore[union-attr]
    if phase == "pp":
        return PREFILL, length, ""
    if not length:
        return DECODE, "", ""
    return DECODE, str(int(length) // 2), ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = []
    for raw in asked.raw:
        with raw.open(encoding="utf-8", newline="") as file:
            lines += [
                cleaned(line)
                for line in csv.DictReader(file)
                if line.get("runtime", "llama.cpp") == "llama.cpp"
            ]
    with asked.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    report(lines)


def report(lines: list[dict[str, str]]) -> None:
    """Print what was kept, what each rule marks, and which devices are missing."""
    n_clean = sum(not line["marks"] for line in lines)
    clean_devices = {line["device"] for line in lines if not line["marks"]}
    print(f"{len(lines)} rows, {n_clean} clean, of {len(clean_devices)} devices")
    counts = Counter(mark for line in lines for mark in line["marks"].split())
    for rule, about in RULES.items():
        print(f"{counts[rule]:5}  {rule}: {about}")
    for line in {
        line["device"]: line
        for line in lines
        if re.search("un(known|clear)-device", line["marks"])
    }.values():
        print(f"not in the list: {line['device']} ({line['marks'].split()[0]})")


if __name__ == "__main__":
    main()
