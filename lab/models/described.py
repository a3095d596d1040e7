"""Devices in the user's words: "gbps=51.2 cores=8 avx2", "13900K, DDR5-6400", "m5-max:cpu".

Words name a device of models/devices.toml, or a family of processors, and say more about it. What
they do not say is assumed, and widens what is predicted.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lab.core.memory import CPU
from lab.errors import LabError
from lab.models import devices, processors
from lab.models.devices import UNKNOWN_CORES, Assumption, DeviceSheet

BACKENDS = {
    "cpu": CPU,
    "metal": "Metal",
    "vulkan": "Vulkan",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "hip": "ROCm",
    "sycl": "SYCL",
    "opencl": "OpenCL",
}
EXAMPLE = '--device "gbps=51.2 cores=8 avx2", or --device "laptop-ddr5 16 GB"'

NUMBERS = ("gbps", "cores", "threads", "ghz", "watts", "tflops", "memory")
TEXTS = ("backend", "simd")
GIVEN = re.compile(r"(?<![\w.])([a-z]+) ?= ?([a-z0-9.]+)")
BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?) ?gb/s")
MEMORY_SIZE = re.compile(r"(?:\b(\d{1,2}) ?[x*] ?)?(\d+) ?(?:gb|gib|gbyte)\b(?!/s)")
CORES = re.compile(
    r"(?<![a-z0-9.])(\d{1,3})(?: ?p ?\+|[- ]?(?:physical |cpu )?cores?\b|c\d+t\b|c/\d+t\b)"
)
VIRTUAL_CORES = re.compile(r"(\d+) ?v ?c[po]u|v ?cpus? ?(\d+)|(\d+) threads")
CHANNELS = re.compile(r"\b(single|dual|two|quad|six|eight|octa|twelve|\d+)[- ]channel")
NUMBER_WORDS = {
    "single": 1,
    "dual": 2,
    "two": 2,
    "quad": 4,
    "six": 6,
    "eight": 8,
    "octa": 8,
    "twelve": 12,
}
SEVERAL = re.compile(
    r"(?:^|\b)(?:([2-9]) ?x(?=[ \d]|$)|(?:dual(?![- ]channel)|(?:a )?pair of)\b)|\* ?([2-9])\b"
    r"|(?<!snapdragon) x ?([2-9])$"
)
PRODUCT = re.compile(
    r"\b(?:mac ?book (?:pro|air)|mac ?(?:mini|studio|pro)|mac ?book|i?mac|mini|macos|apple)\b"
)
PROCESSOR = re.compile(r"\b(ryzen|xeon|epyc|core|threadripper|i[3579]|e[357])\b")
CARD = re.compile(r"\b(radeon|geforce|quadro|tesla|instinct|r[tx]x|gtx|arc)\b")
COMPUTER = re.compile(
    r"\b(thinkpad|ideapad|thinkcentre|latitude|inspiron|precision|xps|optiplex|pavilion|probook"
    r"|(?:elite|pro)(?:book|desk)|mac ?book|i?mac|vivobook|zenbook|nuc|beelink|minisforum|geekom"
    r"|gmktec|poco|redmi|laptop|desktop|mini ?pc|server)\b"
)
NPU = re.compile(r"\b(npus?|neural engine|hexagon|xdna2?|ane)\b")
SUFFIX = re.compile(r"(?<=\d)(ti|super|xtx|xt|gre)(s?)\b")
AFTER_NAME = re.compile(r"ti|super|laptop|mobile|max-q|xt|xtx|gre|ada|d")

LETTERS_ALONE = re.compile(r"\d|halo|spark|thor|orin|xavier|iris")
"""A name without a number, of a device."""

OTHER_BOARD = re.compile("orange|banana|nano")
LONGEST_NAME = 32

THREADS_OF_CORE = 2
MOST_WORDS = 5  # of a device's name
POWER_OF_LAPTOP = 100
"""Watts with which a laptop's card reaches its highest rates; below, these fall with the root."""

SEVERAL_SOCKETS = 0.35
OF_POWER = Assumption("tflops=", "", arithmetic=0.2)
UNKNOWN_POWER = replace(OF_POWER, text="all of its arithmetic at that power")
UNKNOWN_MEMORY = Assumption("gbps=", "memory of 51.2 GB/s", bandwidth=0.6)
UNKNOWN_SIMD = Assumption("avx2, avx512, amx, ...", "AVX2", arithmetic=0.4)


@dataclass(frozen=True)
class Description:
    """What a text says of a device, beside its name. None: not said."""

    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    backend: str | None = None
    simd: str | None = None
    memory: processors.RamType | None = None
    channels: float | None = None
    n_devices: int = 1

    @property
    def says_something(self) -> bool:
        facts = {*self.numbers} - {"memory"}
        return bool(facts or self.memory or self.simd)


def find(text: str) -> DeviceSheet:
    """The device that a text names or describes. LabError if it does neither."""
    device = devices.called(text)
    if device is not None:
        return device
    if NPU.search(normal(text.lower())):
        raise LabError(
            "No rate of an NPU is predicted: llama.cpp has backends for those of Qualcomm"
            " (Hexagon), Intel (OpenVINO) and Huawei (CANN), and none for those of Apple, AMD and"
            " Rockchip; too few rates were published.",
            "The same chip has a CPU and mostly a GPU: --device m4-max, --device m4-max:cpu",
        )
    if devices.names_of(text):
        return devices.find_device(text)
    device = described(text)
    if device is not None:
        return device
    if COMPUTER.search(normal(text.lower())):
        raise LabError(
            f"{text!r} is a computer that is sold with several processors or cards.",
            'Name what is in it: --device "core-i5-8500T DDR4-2666 x 2", or --device gtx-1650',
        )
    try:
        return devices.find_device(text)
    except LabError as unknown:
        hint = f"{unknown.hint} Or describe it: {EXAMPLE}"
        raise LabError(unknown.what, hint) from None


def is_addition(text: str) -> bool:
    """Whether a text only says more about a device that was named before it."""
    if devices.called(text) is not None:
        return False
    description = words_in(text)
    remaining = description.text.strip()
    is_named = named_in(remaining) or processors.family_of(remaining) or devices.names_of(text)
    return not is_named and (description.says_something or bool(description.numbers))


def described(text: str) -> DeviceSheet | None:
    """The device that words describe; None if they say nothing that is known."""
    description = words_in(text)
    is_processor = description.backend == CPU
    # A name may end in the cores of its GPU, which words_in takes for cores.
    sheet = devices.called(text.rpartition(":")[0]) or named_in(description.text)
    family = None
    if sheet is None or is_processor:
        family = processors.family_of(description.text)
    if family and sheet is None:
        is_card = CARD.search(description.text) and not PROCESSOR.search(description.text)
        if is_card or family.name.startswith("apple"):
            family = None
    if sheet is not None and not (is_processor and sheet.architecture):
        return of_sheet(sheet, description, text)
    if family is not None:
        return of_family(family, sheet, description, text)
    if description.says_something:
        return of_facts(description, text)
    return None


def on_backend(device: DeviceSheet, backend: str) -> DeviceSheet:
    """The device with another backend of llama.cpp; with cpu the processor of its chip."""
    name = backend_called(backend)
    if name != CPU or device.simd:
        return replace(device, backend=name)
    return find(f"{device.name}:cpu")


# What a text says


def words_in(text: str) -> Description:
    """The facts in a text, and the rest of it, which may name a device. LabError for bad facts."""
    remaining = text.lower().strip()
    facts = facts_in(remaining)
    numbers = facts.numbers
    remaining = GIVEN.sub(" ", remaining)
    memory = memory_of(remaining)
    remaining = processors.MEMORY.sub(" ", remaining)
    modules = MEMORY_SIZE.search(remaining)
    if modules and "memory" not in numbers:
        numbers["memory"] = float(modules[1] or 1) * float(modules[2])
    remaining = MEMORY_SIZE.sub(" ", remaining)
    for name, pattern in (("gbps", BANDWIDTH), ("cores", CORES)):
        match = pattern.search(remaining)
        if match and name not in numbers:
            numbers[name] = float(match[1])
        remaining = pattern.sub(" ", remaining)
    virtual = VIRTUAL_CORES.search(remaining)
    if virtual and "cores" not in numbers:
        n_virtual = float(next(filter(None, virtual.groups())))
        numbers["cores"] = max(1.0, n_virtual / THREADS_OF_CORE)
    several = SEVERAL.search(remaining)
    n_devices = int(next(filter(None, several.groups()), 2)) if several else 1
    backend = facts.backend
    simd = facts.simd
    plain = normal(SEVERAL.sub(" ", CHANNELS.sub(" ", VIRTUAL_CORES.sub(" ", remaining))))
    for word in plain.split():
        if word in BACKENDS:
            backend = backend or BACKENDS[word]
        if processors.operations_of(word):
            simd = simd or word
    return Description(
        plain, numbers, backend, simd, memory, channels_in(remaining), n_devices
    )


def facts_in(text: str) -> Description:
    """What key=value tells. LabError for unknown keys and values."""
    numbers = {}
    backend = None
    simd = None
    for key, value in GIVEN.findall(text):
        if key in NUMBERS:
            numbers[key] = number_of(key, value)
        elif key == "backend":
            backend = backend_called(value)
        elif key == "simd":
            simd = simd_called(value)
        else:
            keys = ", ".join((*NUMBERS, *TEXTS))
            raise LabError(f"--device has no fact {key}=.", f"It takes {keys}.")
    return Description(text, numbers, backend, simd)


def number_of(key: str, value: str) -> float:
    match = re.match(r"\d+(?:\.\d+)?", value)
    number = float(match[0]) if match else 0.0
    if not 0 < number < 1e6:
        raise LabError(f"{key}={value} is not a number.", f"For example: {EXAMPLE}")
    return number


def backend_called(name: str) -> str:
    """llama.cpp's backend with this name, in any case. LabError for another one."""
    backend = BACKENDS.get(name.lower())
    if backend is None:
        what = f"llama.cpp has no backend {name!r} that is predicted."
        raise LabError(what, f"One of: {', '.join(BACKENDS)}.")
    return backend


def simd_called(name: str) -> str:
    if processors.operations_of(name) is None:
        sets = ", ".join(processors.instruction_sets())
        raise LabError(f"simd={name} is not known.", f"One of: {sets}.")
    return name


def memory_of(text: str) -> processors.RamType | None:
    """The memory that a text names, with the number of its channels."""
    memory = processors.memory_in(text)
    if memory is None or memory.channels:
        return memory
    return replace(memory, channels=channels_in(text))


def channels_in(text: str) -> float | None:
    """The number of memory channels that a text names; None without one."""
    channels = CHANNELS.search(text)
    if channels is None:
        return None
    word = channels[1]
    return float(NUMBER_WORDS.get(word) or int(word))


def normal(text: str) -> str:
    """Description in lower case, apart from numbers: rtx-3080ti is rtx 3080 ti."""
    plain = re.sub(r"\((?:r|tm|c)\)", "", text)
    plain = re.sub(r"@ ?\d(?:\.\d+)? ?ghz", " ", plain)
    plain = re.sub(r"[^a-z0-9+.]+", " ", plain)
    return SUFFIX.sub(lambda m: f" {m[1]}{' super' if m[2] else ''}", plain).strip()


# Which device


def named_in(text: str) -> DeviceSheet | None:
    """The device of the table whose name is among the words, the longest name first."""
    if not PROCESSOR.search(text):
        for model in re.findall(r"\b\d{4}\b(?: (?:ti super|ti|super|laptop)\b)?", text):
            for maker in ("rtx", "gtx"):
                text = re.sub(rf"(?<!x )\b{model}\b", f"{maker} {model}", text, count=1)
                if devices.called(f"{maker} {model}"):
                    break
                text = text.replace(f"{maker} {model}", model)
    parts = PRODUCT.sub(" ", text).split()
    for length in range(min(MOST_WORDS, len(parts)), 0, -1):
        for start in range(len(parts) - length + 1):
            device = named_by(parts, start, start + length)
            if device is not None:
                return device
    return None


def named_by(parts: list[str], start: int, end: int) -> DeviceSheet | None:
    """The device that these words name, unless the next word makes it another one."""
    name = " ".join(parts[start:end])
    if not LETTERS_ALONE.search(name) or re.fullmatch(r"\d{1,3}", name):
        return None
    device = devices.called(name)
    if device is None and name.endswith("s"):
        device = devices.called(name[:-1])
    if start and OTHER_BOARD.fullmatch(parts[start - 1]):
        return None
    follower = parts[end] if end < len(parts) else ""
    if device is not None and AFTER_NAME.fullmatch(follower):
        return None
    return device


# Its sheet


def of_sheet(sheet: DeviceSheet, description: Description, text: str) -> DeviceSheet:
    """A device of the table with what the words say about it."""
    facts = description.numbers
    device = sheet
    if description.backend and description.backend != sheet.backend:
        device = replace(device, backend=description.backend)
    if "gbps" in facts:
        device = replace(device, gbps=facts["gbps"])
    elif description.memory and sheet.simd:
        device = replace(device, gbps=with_memory(sheet.gbps, description.memory))
    if "tflops" in facts:
        device = replace(device, tflops=facts["tflops"])
    if device.simd:
        device = with_processor_facts(device, description)
    if "watts" in facts and device.peak_tflops and "laptop" in sheet.name:
        share = math.sqrt(min(1.0, facts["watts"] / POWER_OF_LAPTOP))
        doubt = replace(OF_POWER, text=f"{100 * share:.0f} % of its arithmetic at that power")
        device = replace(
            device, tflops=device.peak_tflops * share, assumed=(*device.assumed, doubt)
        )
    elif "watts" in facts:
        device = replace(device, assumed=(*device.assumed, UNKNOWN_POWER))
    if description.n_devices > 1 and device.memory_gb:
        device = replace(device, memory_gb=device.memory_gb * description.n_devices)
    changed = {*facts} & {"gbps", "tflops", "watts", "cores", "threads"}
    if changed or description.n_devices > 1:
        device = replace(device, about=f"{sheet.about} ({text.strip()})")
    return device


def with_memory(gbps: float, memory: processors.RamType) -> float:
    """The bandwidth with this memory; as before where untold channels seem to be more."""
    if memory.channels is None and memory.gbps < gbps / 2:
        return gbps
    return memory.gbps


def with_processor_facts(device: DeviceSheet, description: Description) -> DeviceSheet:
    """A processor with the instructions, clock and cores that words give."""
    facts = description.numbers
    assumed = [
        assumption
        for assumption in device.assumed
        if assumption.field.rstrip("=") not in facts
    ]
    cores = facts.get("cores", device.cores)
    if cores and "threads" in facts:
        cores = min(cores, facts["threads"])
    return replace(
        device,
        simd=description.simd or device.simd,
        ghz=facts.get("ghz", device.ghz),
        cores=cores,
        assumed=tuple(assumed),
    )


def of_family(
    family: processors.Family, chip: DeviceSheet | None, description: Description, text: str
) -> DeviceSheet:
    """A processor of a family; `chip`: the sheet of the chip that it is a part of."""
    if family.is_hybrid and "cores" in description.numbers:
        # "14-core" counts the slower cores too, and a name such as m3-max-30core those of the GPU.
        n_fast = min(description.numbers["cores"], family.cores)
        description = replace(description, numbers=description.numbers | {"cores": n_fast})
    assumed = []
    if chip is not None:
        gbps = chip.gbps
    elif "gbps" in description.numbers:
        gbps = description.numbers["gbps"]
    elif description.memory is not None:
        gbps = memory_gbps(family, description.memory)
    else:
        gbps = family.gbps
        usual = processors.memory_in(family.memory)
        if usual is not None and description.channels:
            gbps = replace(usual, channels=description.channels).gbps
        memory = f"{gbps:.4g} GB/s" if description.channels else family.memory
        assumed.append(Assumption("gbps=", memory, bandwidth=0.1))
    is_by_computer = COMPUTER.search(description.text) and not PROCESSOR.search(
        description.text
    )
    if is_by_computer and not {"cores", "threads"} & {*description.numbers}:
        cores = f"{family.cores:g} cores of {family.name}"
        assumed.append(Assumption("cores=", cores, bandwidth=0.1, arithmetic=0.3))
    if "watts" in description.numbers:
        assumed.append(UNKNOWN_POWER)
    device = DeviceSheet(
        kind="cpu",
        name=f"{chip.name}-cpu" if chip else short_name(text),
        about=f"{chip.about} (CPU)" if chip else text.strip(),
        gbps=gbps,
        source=f"models/processors.toml, {family.name}",
        simd=family.simd,
        ghz=family.ghz,
        cores=family.cores,
        vector_share=family.vector_share,
        core=family.core,
        memory_gb=description.numbers.get("memory"),
        backend=CPU,
        assumed=tuple(assumed),
    )
    device = with_processor_facts(device, description)
    if description.n_devices > 1:
        n = description.n_devices
        doubt = Assumption("gbps=", f"{n} sockets together", bandwidth=SEVERAL_SOCKETS)
        device = replace(
            device,
            gbps=device.gbps
            * (1 if description.memory and description.memory.channels else n),
            cores=(device.cores or 1) * n,
            assumed=(*device.assumed, doubt),
        )
    return device


def short_name(text: str) -> str:
    """A name for a described device, from its words."""
    name = re.sub(r"[^a-z0-9.=+:]+", "-", re.sub(r"\(.*?\)", "", text.lower()))
    return name.strip("-")[:LONGEST_NAME].strip("-")


def memory_gbps(family: processors.Family, memory: processors.RamType) -> float:
    """The bandwidth with this memory, in as many channels as such processors have."""
    usual = processors.memory_in(family.memory)
    if usual is None:
        return memory.gbps
    if memory.channels is None:
        memory = replace(memory, channels=usual.channels)
    if not memory.is_rate_told and memory.type == usual.type:
        memory = replace(memory, mtps=usual.mtps)
    return memory.gbps


def of_facts(description: Description, text: str) -> DeviceSheet:
    """A device that is known by its figures alone; a processor unless a backend says otherwise."""
    facts = description.numbers
    assumed = []
    gbps = facts.get("gbps") or (description.memory.gbps if description.memory else None)
    if gbps is None:
        gbps = 51.2
        assumed.append(UNKNOWN_MEMORY)
    elif "gbps" not in facts and description.memory and not description.memory.channels:
        text_of = (
            f"two channels of {description.memory.type.upper()}-{description.memory.mtps:g}"
        )
        assumed.append(Assumption("gbps=", text_of, bandwidth=0.3))
    device = DeviceSheet(
        kind="described",
        name=short_name(text),
        about=text.strip(),
        gbps=gbps,
        source="as described",
        tflops=facts.get("tflops"),
        memory_gb=facts.get("memory"),
        backend=description.backend or CPU,
    )
    if device.backend != CPU:
        if device.tflops is None:
            device, doubt = with_usual_peak(device)
            assumed.append(doubt)
        return replace(device, assumed=tuple(assumed))
    if "cores" not in facts and "threads" not in facts:
        assumed.append(UNKNOWN_CORES)
    if description.simd is None:
        assumed.append(UNKNOWN_SIMD)
    cores = facts.get("cores") or facts.get("threads") or 6.0
    device = replace(
        device,
        simd=description.simd or devices.USUAL_SIMD,
        ghz=facts.get("ghz", 3.6),
        cores=cores,
    )
    return replace(device, assumed=tuple(assumed))


def with_usual_peak(device: DeviceSheet) -> tuple[DeviceSheet, Assumption]:
    """The device with the arithmetic that devices of its backend have for their bandwidth."""
    ratios = list(ratios_of_peaks())
    usual = math.exp(statistics.fmean(ratios))
    text = f"{usual * device.gbps:.3g} TFLOP/s"
    doubt = Assumption("tflops=", text, arithmetic=statistics.stdev(ratios))
    return replace(device, tflops=usual * device.gbps), doubt


def ratios_of_peaks() -> Iterator[float]:
    """Logarithms of the peak over the bandwidth of all devices that are no processors."""
    for device in devices.devices().values():
        if device.peak_tflops and not device.simd:
            yield math.log(device.peak_tflops / device.gbps)
