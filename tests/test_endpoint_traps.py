"""Every known trap of measuring endpoints, against a server whose answers are known.

Times have one bound: the null server sends nothing early, so what arrived later than that is true
on any machine.
"""

import dataclasses
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab.core import request as kinds, request_times as times
from lab.core.record import FAILED, OK
from lab.core.request import (
    CHAT,
    COMPLETIONS,
    REASONING,
    ROLE,
    USAGE,
    Asked,
    Request,
    short_name,
)
from lab.core.request_times import figures
from lab.errors import LabError
from lab.remote import client as client_module, formats as options
from lab.remote.access import Access, access, name_or_none
from lab.remote.client import Client
from lab.remote.examination import MOST_PROBES, choose_model, connect, named_models
from lab.remote.formats import Ask, SendPlan, ask_for
from tests.support.null_server import (
    ACCEPT,
    ALWAYS,
    NEVER,
    RUNNING,
    TEMPLATE_TOKENS,
    Behaviour,
    NullSettings,
    null_server,
)

MS = 1_000_000
FAST: dict[str, Any] = {"first_ms": 4.0, "gap_ms": 1.0}
FAILING = {
    "429": kinds.RATE_LIMITED,
    "500": kinds.SERVER_ERROR,
    "400": kinds.BAD_REQUEST,
    "html": kinds.NO_STREAM,
    "whole": kinds.NO_STREAM,
    "error": kinds.ERROR_INSIDE,
    "late error": kinds.ERROR_INSIDE,
    "wrong JSON": kinds.WRONG_JSON,
    "half a line": kinds.HALF_LINE,
    "cut off": kinds.CUT_OFF,
    "lost": kinds.LOST,
    "endless line": kinds.LONG_LINE,
    "stall": kinds.STALLED,
    "never": kinds.TIMEOUT,
}
MODELS = {name: Behaviour(fails=name, **FAST) for name in FAILING} | {
    "echo": Behaviour(fails="echo", **FAST),
    "plain": Behaviour(**FAST),
    "bundled": Behaviour(
        bundle=3,
        n_held=1,
        usage=RUNNING,
        first_ms=4.0,
        gap_ms=40.0,
    ),
    "bundled, uncounted": Behaviour(bundle=3, n_held=1, first_ms=4.0, gap_ms=40.0),
    "role at accept": Behaviour(role=ACCEPT, first_ms=60.0, gap_ms=1.0),
    "no usage": Behaviour(usage=NEVER, **FAST),
    "always usage": Behaviour(usage=ALWAYS, **FAST),
    "cache": Behaviour(has_cache=True, **FAST),
    "silent cache": Behaviour(
        has_cache=True,
        gives_cached=False,
        **FAST,
    ),
    "short": Behaviour(
        stops_after=3,
        obeys_ignore_eos=False,
        **FAST,
    ),
    "obedient": Behaviour(stops_after=3, **FAST),
    "reasoning": Behaviour(
        n_reasoning=2,
        first_ms=4.0,
        gap_ms=20.0,
        usage=RUNNING,
    ),
    "slow": Behaviour(first_ms=80.0, gap_ms=1.0),
    "timings": Behaviour(timings=True, bundle=2, **FAST),
    "strict": Behaviour(strict=True, **FAST),
}
SECRET = "sk-very-secret-0123456789"


@pytest.fixture(scope="module")
def asked() -> Iterator[Access]:
    with null_server(NullSettings(models=MODELS, n_slots=4)) as server:
        yield access(server.url)


@pytest.fixture(scope="module")
def client(asked: Access) -> Iterator[Client]:
    with Client(asked) as open_client:
        yield open_client


def make_ask(
    model: str, n_gen: int = 8, prompt: str = "a b c", api: str = CHAT, **changes: Any
) -> Ask:
    used = changes.pop("options", options.OPTIONS)
    return ask_for(api, model, prompt, Asked(n_prompt=None, n_gen=n_gen, **changes), used)


def send(
    client: Client,
    model: str,
    n_gen: int = 8,
    prompt: str = "a b c",
    api: str = CHAT,
    **changes: Any,
) -> Request:
    (reply,) = client.run(
        SendPlan(asks=(make_ask(model, n_gen, prompt, api, **changes),), api=api)
    )
    return reply.request


def n_sent(client: Client) -> int:
    """Requests for tokens that the server has had."""
    return int(str(client.object_at("/null/sent")["n_requests"]))


# 1: a chunk is not a token


def test_trap_1_tokens_that_came_together_are_counted_apart(client: Client) -> None:
    request = send(client, "bundled", 10)
    indices = times.generated(request)
    assert request.tokens_by == "usage"
    assert [request.events.n_tokens[i] for i in indices] == [4, 3, 3]  # type: ignore[index]
    assert len(times.itl_ns(request) or ()) == 9
    assert (times.itl_ns(request) or ()).count(0) >= 7
    assert figures(request).tpot_ns == sum(times.chunk_gaps_ns(request)) / 6


def test_trap_1_uncounted_chunks_give_no_itl(client: Client) -> None:
    request = send(client, "bundled, uncounted", 10)
    assert request.tokens_by is None
    assert request.events.n_tokens is None
    assert times.itl_ns(request) is None
    assert len(times.chunk_gaps_ns(request)) == 2
    low, high = figures(request).tpot_bounds_ns or (0, 0)
    assert low <= sum(times.chunk_gaps_ns(request)) / 6 <= high


# 2: an empty chunk with the role comes first


def test_trap_2_the_role_is_not_the_first_token(client: Client) -> None:
    request = send(client, "role at accept")
    assert request.events.kind[0] == ROLE
    assert (figures(request).ttft_ns or 0) >= max(60 * MS, request.events.arrive_ns[0])
    assert request.headers_ns is not None
    assert request.headers_ns <= request.events.arrive_ns[0]


# 3: usage must be asked for, comes in any chunk, or not at all


def test_trap_3_usage_is_read_where_choices_are_empty(client: Client) -> None:
    request = send(client, "plain", 8)
    assert USAGE in request.events.kind
    assert request.usage
    assert request.usage.prompt_tokens == 3 + TEMPLATE_TOKENS
    assert times.n_generated(request) == 8
    assert times.n_generated(send(client, "plain", options=())) is None
    assert times.n_generated(send(client, "always usage", options=())) == 8


# 4: prefix caches


def test_trap_4_a_repeated_prompt_is_warm(client: Client) -> None:
    allowed = tuple(option for option in options.OPTIONS if option != options.NO_CACHE)
    assert [
        figures(
            send(
                client,
                "cache",
                prompt="x y z",
                options=allowed,
            )
        ).is_warm
        for _ in range(2)
    ] == [False, True]
    assert (
        figures(send(client, "cache", prompt="x y z")).is_warm is False
    )  # with cache_prompt: false
    assert (
        figures(
            send(
                client,
                "silent cache",
                prompt="x y z",
                options=allowed,
            )
        ).is_warm
        is None
    )


def test_trap_4_prompts_with_a_nonce_are_cold(client: Client, asked: Access) -> None:
    with connect(asked.url, "cache") as server:
        ask = server.ask(30, 4, "the same words each time")
        with_cache = ask.body.replace('"cache_prompt": false, ', "")
        ask = dataclasses.replace(ask, body=with_cache)
        replies = list(server.client.run(SendPlan(asks=(ask,) * 3, api=CHAT)))
    for reply in replies:
        usage = reply.request.usage
        assert usage is not None
        assert usage.prompt_tokens == 30
        assert (usage.cached_tokens or 0) < 8  # another nonce each time


# 5: ignore_eos is not everywhere


def test_trap_5_short_answers_are_known(client: Client) -> None:
    short = send(client, "short", ignore_eos=True)
    full = send(client, "obedient", ignore_eos=True)
    assert figures(short).is_short is True
    assert short.finish_reason == "stop"
    assert figures(full).is_short is False
    assert full.finish_reason == "length"


# 6: reasoning


def test_trap_6_reasoning_is_the_first_token_and_not_the_first_output(client: Client) -> None:
    request = send(client, "reasoning", 5)
    assert request.events.kind.count(REASONING) == 2
    assert times.n_generated(request) == 5
    assert (
        figures(request).first_output_ns or 0
    ) >= 44 * MS  # 4 ms and two gaps of 20 after the request
    assert request.events.arrive_ns[times.generated(request)[0]] == figures(request).ttft_ns


# 7: prompts of exactly n tokens


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("has_tokenize", [True, False])
def test_trap_7_prompts_have_exactly_n_tokens(api: str, has_tokenize: bool) -> None:
    settings = NullSettings(models={"null": Behaviour(**FAST)}, has_tokenize=has_tokenize)
    with null_server(settings) as started, connect(started.url, api=api) as server:
        assert server.counter
        assert server.counter.by == ("tokenize" if has_tokenize else "usage")
        for n in (13, 100, 2000):
            ask = server.ask(n, 1, "some words of a text")
            usage = server.send(ask).request.usage
            assert usage
            assert usage.prompt_tokens == ask.asked.n_prompt_counted == n
        with pytest.raises(
            LabError, match="A prompt of 7 tokens is not possible: the shortest one has"
        ):
            server.ask(7, 1, "words")


# 10: failures are classes of their own


@pytest.mark.parametrize("model", FAILING)
def test_trap_10_a_failure_has_its_class_and_the_rest_goes_on(
    client: Client, model: str
) -> None:
    before = n_sent(client)
    asks = (make_ask(model), make_ask("plain"))
    plan = SendPlan(
        asks=asks,
        api=CHAT,
        timeout_s=1.0 if model == "never" else 30.0,
        stall_s=0.3,
    )
    failed, good = sorted(client.run(plan), key=lambda reply: reply.index)
    assert failed.request.status == FAILED
    assert failed.request.failure == FAILING[model]
    assert failed.request.error
    assert good.request.status == OK
    assert n_sent(client) == before + 2  # nothing is sent twice


def test_nothing_is_waited_for_after_the_last_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "POLL_S", 20.0)
    began_s = time.monotonic()
    assert {send(client, "plain").status for _ in range(5)} == {OK}
    assert time.monotonic() - began_s < 20


def test_trap_10_a_refused_connection_is_a_class() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(access(f"http://127.0.0.1:{port}")) as client:
        request = send(client, "plain")
    assert request.failure == kinds.REFUSED
    assert request.sent_ns is None
    assert request.http_status is None


# What a server can do


def test_what_a_model_can_is_found_in_few_requests(client: Client, asked: Access) -> None:
    before = n_sent(client)
    with connect(asked.url, "timings") as server:
        endpoint = server.endpoint
    assert n_sent(client) - before <= MOST_PROBES
    assert endpoint.api == CHAT
    assert endpoint.server == "llama-server"
    names = (
        "streaming",
        "usage in streams",
        "token ids",
        "tokens per event",
        "tokenize",
        "settings",
        "server timings",
    )
    assert {name: endpoint.can(name) for name in names} == dict.fromkeys(names, "yes") | {
        "token ids": "no"
    }
    assert options.TIMINGS in endpoint.accepted
    assert options.TOKEN_IDS not in endpoint.accepted


@pytest.mark.parametrize(
    ("model", "name", "answer"),
    [
        ("obedient", "ignore_eos", "yes"),
        ("short", "ignore_eos", "no"),
        ("strict", "ignore_eos", "no"),
        ("cache", "cached tokens", "yes"),
        ("silent cache", "cached tokens", "no"),
        ("no usage", "usage in streams", "no"),
    ],
)
def test_what_a_model_can_is_yes_or_no(
    asked: Access,
    model: str,
    name: str,
    answer: str,
) -> None:
    with connect(asked.url, model) as server:
        assert server.endpoint.can(name) == answer
        assert all(capability.how for capability in server.endpoint.capabilities)


def test_a_model_that_does_not_answer_is_refused(asked: Access) -> None:
    with (
        pytest.raises(LabError, match="does not stream an answer of 500"),
        connect(asked.url, "500"),
    ):
        pass


# Keys


def test_no_key_is_in_anything_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_KEY", SECRET)
    models = {name: MODELS[name] for name in ("plain", "echo")}
    with null_server(NullSettings(models=models, api_key=SECRET)) as started:
        with connect(
            started.url, "plain", api_key_env="LAB_TEST_KEY", header=["X-Team: another-secret"]
        ) as server:
            assert "secret" not in repr(server.client.access)
            assert send(server.client, "plain").status == OK
            echoed = send(server.client, "echo")
            assert echoed.failure == kinds.BAD_REQUEST
            assert "does not accept a field" in (echoed.error or "")
            assert "secret" not in repr(echoed) + repr(server.endpoint)
        wrong = f"Authorization: Bearer wrong-{SECRET}"
        with Client(access(started.url, None, [wrong])) as client:
            refused = send(client, "plain")
            assert refused.http_status == 401
            assert refused.error == "401 Unauthorized: the server rejects this key"
        with pytest.raises(LabError) as problem, connect(started.url, "plain", header=[wrong]):
            pass
        assert "secret" not in str(problem.value)


def test_a_password_in_the_address_is_not_shown() -> None:
    asked = access("http://me:very-secret@127.0.0.1:9/v1/chat/completions?key=abc")
    assert asked.url == "http://127.0.0.1:9/v1"
    assert "secret" not in repr(asked)
    with Client(asked) as client:
        answer = client.ask(f"{asked.url}/props")
    assert answer.status is None
    assert "secret" not in str(answer.error)


@pytest.mark.parametrize(
    ("text", "is_shown"),
    [
        ("meta-llama/Llama-3.2-3B", True),
        ("b9999-0c1e570", True),
        ("C:\\models\\tiny.gguf", True),
        ("x" * 300, False),
        ("two\nlines", False),
        ("\x1b[2J", False),
        ("<b>", False),
        (7, False),
        (f"m-{SECRET}", False),
        (f"m-{SECRET.upper()}", False),
        (f"m-{SECRET[:9]}", False),
        ("joe.pass-9876", False),
    ],
)
def test_a_servers_text_is_shown_if_it_is_a_name_without_a_secret(
    text: object, is_shown: bool
) -> None:
    basic = "Authorization: Basic am9lOnBhc3MtOTg3Ng=="  # joe:pass-9876
    address = access("http://h/v1", None, [basic, f"X-Key: {SECRET}"])
    assert (name_or_none(text, address) == text) is is_shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:port",
        "http://a\x1b[2J",
        "http://h/ü",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LabError, match="not a valid server address"):
        access(url)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/home/someone/models/tiny.Q4_0.gguf", "tiny.Q4_0.gguf"),
        ("C:\\models\\tiny.gguf", "tiny.gguf"),
        ("~/models/tiny.gguf", "tiny.gguf"),
        ("../models/tiny.gguf", "tiny.gguf"),
        ("\\\\nas\\share\\tiny model (1).gguf", "tiny model (1).gguf"),
        ("/srv/models/Llama-3.2-3B/", "Llama-3.2-3B"),
        (
            f"/home/user/.cache/hub/models--Qwen--Qwen3-8B/snapshots/{'0123456789' * 4}",
            "Qwen/Qwen3-8B",
        ),
        ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B"),
    ],
)
def test_a_models_path_is_nobodys_business(model: str, name: str) -> None:
    models = named_models([model, "another"], access("http://h/v1"))
    assert short_name(model) == name
    assert choose_model(models, name) == choose_model(models[:1], None) == (model, name)


ORDINARY_IDS = """
/models/x.gguf|/srv/llm/Qwen3-8B-Q4_K_M.gguf|~/models/x.gguf|./x.gguf|../x.gguf|/x.gguf
C:\\models\\x.gguf|d:/LLM/x.gguf|\\\\nas\\llm\\x.gguf|C:\\Jörg Groß\\x y.gguf|/c/模型/x.gguf
/models/Llama 3 (8B) [Q4].gguf|/models/a+b=c.gguf|/data/x-00001-of-00002.gguf|/opt/m/x.GGUF|/a/b
模型-8B|通义千问-7B|ルミ-13b|saiga-мини-7b|modèle-été|größe-3b|نموذج-7b|한국어-모델
ไทย-llm|🦙-8b
gpt-4o|gpt-4o-mini-2024-07-18|o4-mini|ft:gpt-4o-mini-2024-07-18:org:name:id|chatgpt-4o-latest
llama3.2|llama3.2:latest|llama3.2:3b-instruct-q4_K_M|qwen3:0.6b|hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M
meta-llama/Llama-3.2-3B-Instruct|Qwen/Qwen3-8B-AWQ|google/gemma-3-4b-it|mistralai/Mistral-7B-v0.1
@cf/meta/llama-3-8b-instruct|@hf/thebloke/x-awq|accounts/fireworks/models/llama-v3p1-8b-instruct
anthropic/claude-3.5-sonnet|openai/gpt-4o:online|deepseek/deepseek-r1:free|x-ai/grok-2-vision-1212
models/gemini-2.0-flash|projects/p/locations/l/models/m|arn:aws:bedrock:us-east-1::model/x-v1:0
anthropic.claude-3-5-sonnet-20240620-v1:0|us.meta.llama3-2-1b-instruct-v1:0|azure/my deployment
bedrock/converse/x|vertex_ai/gemini-pro|ollama/llama3|together_ai/x|huggingface/org/x|openrouter/auto
lmstudio-community/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf|qwen3-8b@q4_k_m|text-embedding-nomic-embed
koboldcpp/x.gguf|koboldcpp|tabby-model|model.safetensors|x.llamafile|LLaMA_CPP|default|model|_|0|7B
mlx-community/Qwen3-8B-4bit|mlx-community/x 4-bit (DWQ)|local-model|any|null|gpt-3.5-turbo#1|a&b
Model's best|"quoted"|a;b|a|x=1|50%|{name}|$MODEL|`x`|a*b|what?|wow!|x^2|~x|-dash|.hidden|a,b|[x]
mistral.rs|TheBloke/x-GPTQ:gptq-4bit-32g-actorder_True|x/y/z/w|v1.0.0-rc.1+build.5|CamelCase_Name-9
file:///models/x.gguf|s3://bucket/x|hf://org/x|/home/user/.cache/hub/models--a--b/snapshots/x/y.gguf
"""


def test_a_hundred_ordinary_ids_are_shown_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_KEY", SECRET)
    server = access("http://h/v1", "LAB_TEST_KEY")
    ids = [one for line in ORDINARY_IDS.split("\n") for one in line.split("|") if one]
    assert len(ids) >= 100
    for model_id in ids:
        (listed,) = named_models([model_id], server)
        assert listed == (model_id, short_name(model_id).strip())
        assert choose_model([listed], listed.name).id == model_id
        assert choose_model([listed], model_id).id == model_id


def test_an_entry_that_may_not_be_shown_is_still_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAB_TEST_KEY", SECRET)
    server = access("http://h/v1", "LAB_TEST_KEY")
    ids = [f"m-{SECRET}", "x" * 300, "<b>", f"/home/{SECRET}/tiny.gguf", "\x1b[2J", "", "../"]
    models = named_models(ids, server)
    shown = ["model-1", "model-2", "model-3", "tiny.gguf", "?[2J", "model-6", "model-7"]
    assert [model.name for model in models] == shown
    for model in models:
        assert choose_model(models, model.name) == model


def test_paths_with_one_file_name_are_told_apart() -> None:
    ids = ["/models/q4/model.gguf", "/models/q8/model.gguf", "/models/q8/tiny.gguf"]
    models = named_models(ids, access("http://h/v1"))
    assert [model.name for model in models] == ["q4/model.gguf", "q8/model.gguf", "tiny.gguf"]
    with pytest.raises(LabError, match="lists 3 models") as problem:
        choose_model(models, None)
    assert "--model q4/model.gguf, q8/model.gguf, tiny.gguf" in str(problem.value)
    with pytest.raises(LabError, match=r"no model model\.gguf"):
        choose_model(models, "model.gguf")


def test_a_tag_that_every_user_leaves_out_is_found() -> None:
    models = named_models(["llama3.2:latest", "llama3.2:1b"], access("http://h/v1"))
    assert choose_model(models, "llama3.2").id == "llama3.2:latest"
