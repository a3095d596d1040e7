"""Bodies of other interfaces as bodies of a chat: a request of the Messages API (`system`, parts of
content that are tool calls and results) and of the Responses API (`instructions`, `input`).

    body = as_chat(body)

A server that offers these interfaces converts their requests itself before its template renders
them, so whoever asks it to render one sends the converted body. A body without their fields is a
chat already, and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from lab.remote.formats import as_dict, as_list

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
TOOL = "tool"
PASSED_ON = ("model", "chat_template_kwargs", "reasoning_effort", "tool_choice")
"""Fields of a request of the Messages API that a template may see."""

NOT_OF_A_CHAT = ("input", "instructions", "max_output_tokens", "reasoning")
"""Fields of a request of the Responses API that a chat has under other names."""

Message = dict[str, object]


def as_chat(body: Mapping[str, object]) -> dict[str, object]:
    """The body of a chat with the prompt of `body`."""
    messages = [message for _, message in messages_of(body)]
    if is_of_messages_api(body):
        messages = list(map(with_known_parts, messages))
        chat: dict[str, object] = {name: body[name] for name in PASSED_ON if name in body}
    elif is_of_responses_api(body):
        chat = {name: value for name, value in body.items() if name not in NOT_OF_A_CHAT}
        messages = merged(messages)
        effort = as_dict(body.get("reasoning")).get("effort")
        if effort is not None:
            chat["reasoning_effort"] = effort
    else:
        return dict(body)
    chat["messages"] = messages
    tools = [as_chat_tool(tool) for tool in as_list(body.get("tools")) if is_function(tool)]
    if tools:
        chat["tools"] = tools
    else:
        chat.pop("tools", None)
    return chat


def is_of_messages_api(body: Mapping[str, object]) -> bool:
    """Whether a body has what only the Messages API has: `system`, or its parts of content."""
    if "messages" not in body:
        return False
    if "system" in body or any(
        "input_schema" in as_dict(t) for t in as_list(body.get("tools"))
    ):
        return True
    for message in as_list(body["messages"]):
        for part in as_list(as_dict(message).get("content")):
            kind = as_dict(part).get("type")
            if kind in ("tool_use", "tool_result", "thinking") or "source" in as_dict(part):
                return True
    return False


def is_of_responses_api(body: Mapping[str, object]) -> bool:
    return "input" in body and "messages" not in body


def messages_of(body: Mapping[str, object]) -> Iterator[tuple[int, Message]]:
    """The messages of a chat with this prompt, each with the number of the message or item of the
    body from which it comes; the system prompt of a field is number 0."""
    first = 0
    system = body.get("system") or body.get("instructions")
    if system:
        yield 0, {"role": SYSTEM, "content": joined_text(system)}
        first = 1
    if is_of_responses_api(body):
        items = body["input"]
        if isinstance(items, str):
            items = [{"role": USER, "content": items}]
        for index, item in enumerate(as_list(items), first):
            yield index, message_of_item(as_dict(item))
        return
    has_parts = is_of_messages_api(body)
    for index, message in enumerate(as_list(body.get("messages")), first):
        parts = as_dict(message).get("content")
        if has_parts and isinstance(parts, list):
            for converted in messages_of_parts(str(message.get("role")), parts):
                yield index, converted
        else:
            yield index, as_dict(message)


def messages_of_parts(role: str, parts: list[object]) -> Iterator[Message]:
    """A message of the Messages API: its results of tools are messages of their own."""
    message: Message = {"role": role}
    content: list[object] = []
    calls: list[object] = []
    results: list[Message] = []
    thoughts = ""
    for part in map(as_dict, parts):
        kind = part.get("type")
        if kind == "tool_use":
            calls.append(call_of(part.get("id"), part.get("name"), part.get("input", {})))
        elif kind == "tool_result":
            results.append(result_of(part.get("tool_use_id"), part.get("content")))
        elif kind == "thinking":
            thoughts += str(part.get("thinking", ""))
        elif kind != "redacted_thinking":
            content.append(as_chat_part(part))
    if content or calls or thoughts:
        message["content"] = content or ""
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        yield message
    yield from results


def with_known_parts(message: Message) -> Message:
    """A message without the parts that no template knows, such as documents."""
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == TOOL:
        return message
    known = [part for part in content if part.get("type") in ("text", "image_url")]
    return {**message, "content": known}


def message_of_item(item: dict[str, object]) -> Message:
    """An item of the Responses API: a message, a call of a tool, its result, or reasoning."""
    kind = item.get("type")
    if kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
        return {"role": ASSISTANT, "tool_calls": [call]}
    if kind == "function_call_output":
        return result_of(item.get("call_id"), item.get("output"))
    if kind == "reasoning":
        texts = as_list(item.get("content")) or as_list(item.get("summary"))
        return {"role": ASSISTANT, "reasoning_content": joined_text(texts[:1])}
    content = item.get("content")
    if content is None and kind not in (None, "message"):  # of another kind of tool
        of_tool = {name: item[name] for name in item if name not in ("id", "status")}
        role = TOOL if str(kind).endswith("_output") else ASSISTANT
        content = json.dumps(of_tool, ensure_ascii=False)
        item = {"role": role}
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    content = list(map(as_chat_part, map(as_dict, as_list(content))))
    return {"role": str(item.get("role") or kind or ""), "content": content}


def merged(messages: Iterable[Message]) -> list[Message]:
    """The messages of the Responses API; what the model wrote in one turn is a single one."""
    chat: list[Message] = []
    for message in messages:
        last = chat[-1] if chat else {}
        if message.get("role") != ASSISTANT or last.get("role") != ASSISTANT:
            chat.append(dict(message))
            continue
        for name in ("content", "tool_calls"):
            if name in message:
                last[name] = [*as_list(last.get(name)), *as_list(message[name])]
        if "reasoning_content" in message:
            last["reasoning_content"] = message["reasoning_content"]
    return chat


def call_of(number: object, name: object, arguments: object) -> dict[str, object]:
    """A call of a tool as a chat has it."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def result_of(number: object, content: object) -> Message:
    """The result of a tool as a message: a text, unless it has images."""
    parts = list(map(as_chat_part, map(as_dict, as_list(content))))
    if isinstance(content, list) and any(part.get("type") != "text" for part in parts):
        return {"role": TOOL, "tool_call_id": number, "content": parts}
    return {"role": TOOL, "tool_call_id": number, "content": joined_text(content)}


def as_chat_part(part: dict[str, object]) -> dict[str, object]:
    """A part of content as a chat has it: a text, or an image by its address."""
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = {} if part.get("type") == "document" else as_dict(part.get("source"))
    address = part.get("image_url") or source.get("url")
    if source.get("data"):
        address = f"data:{source.get('media_type', 'image/jpeg')};base64,{source['data']}"
    if isinstance(address, str):
        return {"type": "image_url", "image_url": {"url": address}}
    return part


def as_chat_tool(tool: dict[str, object]) -> dict[str, object]:
    """A tool as a chat has it."""
    if "function" in tool:
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    if "input_schema" in tool:
        function = {
            "name": tool.get("name", ""),
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
    elif tool.get("type") == "function":
        function.setdefault("strict", True)
    return {"type": "function", "function": function}


def is_function(tool: object) -> bool:
    """Whether a tool is one of the client, not one that a provider would execute."""
    fields = as_dict(tool)
    return "input_schema" in fields or fields.get("type", "function") == "function"


def joined_text(value: object) -> str:
    """A text, the texts of a list of parts without anything between them, or an object's JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    texts = [as_dict(part).get("text") for part in as_list(value)]
    return "".join(text for text in texts if isinstance(text, str))
