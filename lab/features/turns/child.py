"""In the child: a request rendered by the chat template of the loaded model, and its tokens."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from lab.engine import llama
from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext
from lab.errors import LabError, printable
from lab.features.turns.rendered import RenderedPrompt

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of a model that has none, as in llama-server."""

TOOL_USE = b"tool_use"  # the name of a second template, which some models have
MOST_SHOWN = 120  # letters of a template's own error


def render(context: LlamaContext, body: str) -> RenderedPrompt:
    """The prompt of a request, given as JSON. LabError if the template refuses it."""
    fields = json.loads(body)
    loaded = context.loaded
    lib = llama_cpp()
    is_chat = "messages" in fields
    text = rendered(context, fields) if is_chat else str(fields["prompt"])
    if loaded.bos is not None:
        text = text.removeprefix(token_text(lib, loaded.vocab, loaded.bos))
    return RenderedPrompt(text, tuple(llama.tokenize(loaded, text, is_prompt=True)))


def rendered(context: LlamaContext, fields: dict[str, Any]) -> str:
    from jinja2 import TemplateError
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    lib = llama_cpp()
    loaded = context.loaded
    source = lib.llama_model_chat_template(loaded.model, None)
    if fields.get("tools"):
        source = lib.llama_model_chat_template(loaded.model, TOOL_USE) or source
    template = source.decode(errors="replace") if source else CHATML
    has_generation_prompt = fields.pop("add_generation_prompt", True)
    fields |= fields.pop("chat_template_kwargs", {})
    try:
        formatter = Jinja2ChatFormatter(
            template,
            eos_token=token_text(lib, loaded.vocab, lib.llama_vocab_eos(loaded.vocab)),
            bos_token=token_text(lib, loaded.vocab, lib.llama_vocab_bos(loaded.vocab)),
            add_generation_prompt=has_generation_prompt,
        )
        return str(formatter(**fields).prompt)
    except (TemplateError, ValueError, TypeError, ArithmeticError, LookupError) as problem:
        reason = printable(str(problem)[:MOST_SHOWN])
        raise LabError(
            f"The model's chat template cannot render a request: {reason}",
            "Replay it through a server (--url), which knows more templates.",
        ) from None


def token_text(lib: ModuleType, vocab: object, token: int) -> str:
    """The text of a special token; nothing if the model has none."""
    if token < 0:
        return ""
    return str((lib.llama_vocab_get_text(vocab, token) or b"").decode(errors="replace"))
