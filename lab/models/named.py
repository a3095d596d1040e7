"""Models that are known by their name alone: as people write it, approximated by what it says.

An approximation is a model of the catalog, of the nearest version, or one scaled to the parameters
in the name (27b, 30b-a3b, 8x7b) or in models/sizes.toml. Its `source` is APPROXIMATE.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache

from lab.core.files import data_file
from lab.core.record import Model
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.models.candidates import is_tag, without_tag
from lab.models.catalog import Dimensions, Entry

APPROXIMATE = "approximate"

OWNER = re.compile(
    r"^(?:https?://)?(?:hf|huggingface|hf\.co|huggingface\.co|library|ollama)[:/]+"
)
FORMAT = re.compile(r"[-_. ](?:i1-)?(?:gguf|hf|mtp|qat|mlx|awq|gptq|fp8|bf16|imatrix)\b.*$")
SIZE = re.compile(
    r"(?<![a-z0-9.])(?P<active>a)?(?:(?P<times>\d+)x)?(?P<billions>\d+(?:\.\d+)?)b(?![a-z0-9])"
)
BITS = re.compile(r"(?:int|fp|w|q)?(?:[234568]|16|32)(?:[-_ ]?bits?|a16)?", re.IGNORECASE)
SHARED_OF_MIXTURE = 0.85
"""Of n experts of a size together: attention is shared. Mixtral 8x7B has 46.7e9 parameters."""

DENSE = "llama", "qwen2", "qwen3"
MIXTURES = ("qwen3moe",)
"""Architectures whose models are scaled to a size."""

ACTIVE_SHARE = 0.1
"""Of the parameters of a mixture whose name does not tell how many are active."""


@dataclass(frozen=True)
class Size:
    """Parameters in 10^9; `active` for a token of a mixture of experts, None of a dense model."""

    total: float
    active: float | None = None


def model_named(text: str) -> Model | None:
    """The model that a name in any tool's spelling tells, without its file; None without a size.

    For a path of a .gguf file that is not there, None too.
    """
    name, tag = name_and_tag(text)
    entry = entry_named(name)
    if entry is None:
        return None
    quantization = tag or entry.usual_quantization
    model = synthetic.model_like(entry, quantization)
    is_known = entry.name in catalog.entries() and entry.shape_source
    return model if is_known else dataclasses.replace(model, source=APPROXIMATE)


def name_and_tag(text: str) -> tuple[str, str | None]:
    """The name of a model without its owner and format, and its quantization.

    "unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M" is qwen3-30b-a3b and Q4_K_M.
    """
    remaining = OWNER.sub("", text.strip(), count=1)
    remaining, _, file = remaining.partition(".gguf")[0].rpartition("/")
    repo = remaining.rpartition("/")[2]
    name, *tags = re.split("[:@]", file)
    variant = "-".join(tag for tag in tags if tag.lower() != "latest")
    if is_tag(variant) or BITS.fullmatch(variant):
        return plain(name), variant.upper()
    full_name, tag = without_tag(f"{name}-{variant}" if variant else name)
    if tag is None and repo:
        full_name = full_name if SIZE.search(full_name.lower()) else repo
    return plain(full_name), tag and tag.upper()


def plain(name: str) -> str:
    """A name in lower case, with hyphens, without the format of its file."""
    lower = re.sub(r"[\s_]+", "-", name.strip().lower())
    without_format = FORMAT.sub("", lower)
    return without_format or lower


def entry_named(name: str) -> Entry | None:
    """The catalog's model with this name or the nearest version, or one of the size in it."""
    entry = catalog.base_of(name)
    if entry is not None:
        return entry
    size = size_in(name)
    if size is None:
        return None
    return nearest_version(name, size) or scaled(name, size)


def size_in(name: str) -> Size | None:
    """The parameters that a name tells, or those of models/sizes.toml; None without either."""
    for start, figures in known_sizes().items():
        if re.search(rf"(?:^|[^a-z0-9]){re.escape(start)}(?:[^a-z0-9.]|$)", name):
            return Size(*figures)
    totals = []
    actives = []
    for match in SIZE.finditer(name):
        billions = float(match["billions"])
        if match["times"]:
            n_experts = int(match["times"])
            totals.append(SHARED_OF_MIXTURE * n_experts * billions)
            actives.append(2 * SHARED_OF_MIXTURE * billions)
        elif match["active"]:
            actives.append(billions)
        else:
            totals.append(billions)
    if not totals:
        return None
    if not actives and "moe" in name:
        actives = [min(totals) if len(totals) > 1 else ACTIVE_SHARE * totals[0]]
    return Size(max(totals), min(actives) if actives else None)


@cache
def known_sizes() -> dict[str, list[float]]:
    """Parameters by name, in 10^9: total, and active ones of a mixture."""
    return tomllib.loads(data_file("sizes.toml").read_text(encoding="utf-8"))


def nearest_version(name: str, size: Size) -> Entry | None:
    """The catalog's model of the same family and size, of the nearest version."""
    family = re.match(r"[a-z]+", name)
    best = None
    least = math.inf
    for alias, entry in catalog.by_name().items():
        is_family = family is not None and alias.startswith(family[0])
        if not is_family or size_in(alias) != size:
            continue
        distance = catalog.versions_apart(name, alias)
        if distance < least:
            best = entry
            least = distance
    if best is None:
        return None
    return dataclasses.replace(best, name=name, repo=None, file=None, shape_source="")


def scaled(name: str, size: Size) -> Entry:
    """A model of this size: the nearest one of the catalog with more or fewer layers, experts."""
    architectures = DENSE if size.active is None else MIXTURES
    best: Entry | None = None
    least = math.inf
    for entry in catalog.entries().values():
        if entry.shape.arch not in architectures or entry.embedded:
            continue
        distance = abs(math.log(params_of(entry.shape).total / size.total))
        if distance < least:
            best = entry
            least = distance
    assert best is not None
    return dataclasses.replace(
        best,
        name=name,
        repo=None,
        file=None,
        quantization=None,
        n_bytes=None,
        shape_source="",
        shape=scaled_shape(best.shape, size),
    )


def scaled_shape(shape: Dimensions, size: Size) -> Dimensions:
    """A shape with as many layers, and experts, as give this number of parameters."""
    one_layer = dataclasses.replace(shape, n_layer=1)
    two_layers = dataclasses.replace(shape, n_layer=2)
    first = params_of(one_layer)
    second = params_of(two_layers)
    if size.active is None or first.active is None or second.active is None:
        per_layer = second.total - first.total
        n_layer = max(1, round((size.total - first.total) / per_layer + 1))
        return dataclasses.replace(shape, n_layer=n_layer)
    per_layer = second.active - first.active
    n_layer = max(1, round((size.active - first.active) / per_layer + 1))
    n_expert = shape.n_expert or 1
    of_expert = (second.total - first.total - per_layer) / (
        n_expert - (shape.n_expert_used or 1)
    )
    active = first.active + (n_layer - 1) * per_layer
    more = max(0.0, size.total - active) / (n_layer * of_expert)
    return dataclasses.replace(
        shape, n_layer=n_layer, n_expert=round((shape.n_expert_used or 1) + more)
    )


@cache
def params_of(shape: Dimensions) -> Size:
    """The parameters of a shape."""
    total = 0.0
    idle = 0.0
    for tensor in synthetic.tensors(shape, "F16"):
        total += tensor.n_weights / 1e9
        if tensor.name.endswith("_exps.weight") and shape.n_expert:
            used = (shape.n_expert_used or 1) / shape.n_expert
            idle += (1 - used) * tensor.n_weights / 1e9
    return Size(total, total - idle if shape.n_expert else None)


def need_named(text: str, problem: LabError) -> Model:
    """The model that a name tells; otherwise `problem`, why its file was not found."""
    if text.strip().lower().endswith(".gguf") or text.startswith(("/", "./", "~")):
        raise problem
    model = model_named(text)
    if model is None:
        raise problem
    return model
