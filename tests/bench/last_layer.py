"""Which architectures run the last layer's feed-forward for every token: cost.NEVER_SKIPS.

    python3 -m uv run python -m tests.bench.last_layer LLAMA_CPP

LLAMA_CPP is a checkout, such as vendor/llama.cpp in the source package of llama-cpp-python. An
architecture skips if its graph (src/models) picks the rows of the tokens with logits (inp_out_ids)
before the last layer's feed-forward in a plain context (embeddings_nextn and
embeddings_nextn_masked are off). Graphs that the script cannot judge are listed apart: read them.
With 0.3.36 these are encoders, draft heads, models without a feed-forward, and lfm2, which skips.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lab.core import cost

SKIPS = "skips"
NEVER = "never skips"
UNCLEAR = "unclear"

FEED_FORWARD = re.compile(r"build_(?:moe_|layer_)?ffn\w*\s*\(|\bffn_up\b|channel_mix")


def architectures(source: Path) -> dict[str, str]:
    """The class of each architecture's graph, by its name in GGUF files."""
    names = dict(
        re.findall(
            r"\{\s*(LLM_ARCH_\w+),\s*\"([^\"]+)\"", (source / "llama-arch.cpp").read_text()
        )
    )
    cases = re.findall(
        r"case (LLM_ARCH_\w+):\s*return new (\w+)\(", (source / "llama-model.cpp").read_text()
    )
    return {names[arch]: class_name for arch, class_name in cases if arch in names}


def graph_of(
    name: str,
    text: str,
    header: str,
) -> str:
    """The source of the graph of a class, or of the class from which it takes its graph.

    "" where there is none.
    """
    start = re.search(rf"{name}::graph(?:<\w+>)?::graph\(", text)
    if start:
        end = text.find("\n}\n", start.start())
        return re.sub(r"//[^\n]*", "", text[start.start() : end])
    definition = re.search(rf"struct {name} .*?\n\}};", header, re.DOTALL)
    if definition:
        alias = re.search(r"using graph = (\w+)::graph", definition[0])
        if alias:
            return graph_of(alias[1], text, header)
    base = re.search(rf"struct {name} : public (llama_model_\w+) ", header)
    if base and base[1] != "llama_model_base":
        return graph_of(base[1], text, header)
    return ""


def verdict_on(graph: str) -> str:
    """Whether a graph picks the rows before the last layer's feed-forward."""
    loop = re.search(r"for \(int il = 0; il < \w+", graph)
    if not loop or "inp_out_ids" not in graph:
        return UNCLEAR
    feed_forward = FEED_FORWARD.search(graph, loop.end())
    if not feed_forward:
        return UNCLEAR
    is_picked_after = False
    for picking in re.finditer(r"ggml_get_rows\([^;]*inp_out_ids\)", graph[loop.end() :]):
        at = loop.end() + picking.start()
        if is_for_last_layer(graph, at):
            if at < feed_forward.start():
                return SKIPS
            is_picked_after = True
    return UNCLEAR if is_picked_after else NEVER


def is_for_last_layer(graph: str, at: int) -> bool:
    """Whether the condition before a position holds in the last layer of a plain context."""
    conditions = re.findall(r"if \((.*)\) \{", graph[:at])
    if not conditions:
        return False
    condition = conditions[-1]
    for name, meaning in re.findall(r"const bool (\w+)\s*= ([^;]*);", graph):
        condition = condition.replace(name, meaning)
    is_plain = "embeddings_nextn_masked" not in condition or "||" in condition
    return is_plain and re.search(r"\w*n_layer\w* - 1", condition) is not None


def main() -> None:
    source = Path(sys.argv[1]) / "src"
    text = "\n".join(path.read_text() for path in sorted((source / "models").glob("*.cpp")))
    header = (source / "models" / "models.h").read_text()
    by_verdict: dict[str, list[str]] = {SKIPS: [], NEVER: [], UNCLEAR: []}
    for arch, name in sorted(architectures(source).items()):
        by_verdict[verdict_on(graph_of(name, text, header))].append(arch)
    for verdict, names in by_verdict.items():
        print(f"{verdict} ({len(names)}): {' '.join(names)}")
    missing = sorted(set(by_verdict[NEVER]) - set(cost.NEVER_SKIPS))
    print(f"cost.NEVER_SKIPS lacks: {missing}")


if __name__ == "__main__":
    main()
