"""Which architectures run the last layer's feed-forward for every token: cost.NEVER_SKIPS, from llama.cpp's source.

    python3 -m uv run python -m tests.bench.last_layer LLAMA_CPP

LLAMA_CPP is a checkout, such as vendor/llama.cpp in the source package of llama-cpp-python. An architecture skips if
its graph (src/models) picks the rows of the tokens with logits (inp_out_ids) before the last layer's feed-forward in a
plain context (embeddings_nextn and embeddings_nextn_masked are off). Graphs that the script cannot judge are listed
apart: read them. With 0.3.36 these are encoders, draft heads, models without a feed-forward, and lfm2, which skips.
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
        re.findall(r"\{\s*(LLM_ARCH_\w+),\s*\"([^\"]+)\"", (source / "llama-arch.cpp").read_text())
    )
    cases = re.findall(
        r"case (LLM_ARCH_\w+):\s*return new (\w+)\(", (source / "llama-model.cpp").read_text()
    )
    return {names[arch]: class_name for arch, class_name in cases if arch in names}


def graph_of(name: str, text: str, header: str) -> str:
    """The source of the graph of a class, or of the class whose graph it uses; "" where there is none."""
    start = re.search(rf"{name}::graph(?:<\w+>)?::graph\(", text)
    if start:
        end = text.find("\n}\n", start.start())
        return re.sub(r"//[^\n]*", "", text[start.start() : end])
    other = re.search(rf"struct {name} : public (llama_model_\w+) ", header)
    used = re.search(rf"struct {name} .*?\n\}};", header, re.DOTALL)
    alias = re.search(r"using graph = (\w+)::graph", used[0]) if used else None
    following = alias or other
    return (
        graph_of(following[1], text, header)
        if following and following[1] != "llama_model_base"
        else ""
    )


def judged(graph: str) -> str:
    """Whether a graph picks the rows before the last layer's feed-forward."""
    loop = re.search(r"for \(int il = 0; il < \w+", graph)
    fed = FEED_FORWARD.search(graph, loop.end()) if loop else None
    if not loop or not fed or "inp_out_ids" not in graph:
        return UNCLEAR
    named = dict(re.findall(r"const bool (\w+)\s*= ([^;]*);", graph))
    is_late = False
    for picked in re.finditer(r"ggml_get_rows\([^;]*inp_out_ids\)", graph[loop.end() :]):
        at = loop.end() + picked.start()
        asked = ["", *re.findall(r"if \((.*)\) \{", graph[:at])][-1]
        for name, meaning in named.items():
            asked = asked.replace(name, meaning)
        is_plain = "embeddings_nextn_masked" not in asked or "||" in asked
        if re.search(r"\w*n_layer\w* - 1", asked) and is_plain:
            if at < fed.start():
                return SKIPS
            is_late = True
    return UNCLEAR if is_late else NEVER


def main() -> None:
    source = Path(sys.argv[1]) / "src"
    text = "\n".join(path.read_text() for path in sorted((source / "models").glob("*.cpp")))
    header = (source / "models" / "models.h").read_text()
    found: dict[str, list[str]] = {SKIPS: [], NEVER: [], UNCLEAR: []}
    for arch, name in sorted(architectures(source).items()):
        found[judged(graph_of(name, text, header))].append(arch)
    for verdict, names in found.items():
        print(f"{verdict} ({len(names)}): {' '.join(names)}")
    print(f"cost.NEVER_SKIPS lacks: {sorted({*found[NEVER]} - {*cost.NEVER_SKIPS})}")


if __name__ == "__main__":
    main()
