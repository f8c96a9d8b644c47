"""Agents for tests: a tiny model of bytes with a chat template, an endpoint over a real engine, programs that ask."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import torch
from tiny import VOCAB_SIZE, make_tiny

import config
import records
from base.agents.endpoint import Endpoint
from base.agents.environment import Agent
from base.agents.parser import Parsed
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors
from engine import VLLMEngine
from head import HeadOptions, response_logps
from model import load_policy
from records import SamplingOptions
from rollout import Sampler

TEMPERATURE = 0.8
HEAD = HeadOptions(TEMPERATURE, VOCAB_SIZE)
MAX_TOKENS = 768
OPTIONS = SamplingOptions(TEMPERATURE, 16)
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{{ tools | tojson if loop.first and tools }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def as_calls(text, tools, *_):
    """A stand-in for a parser: with tools every reply that has an even length is a call."""
    if tools and len(text) % 2 == 0:
        return Parsed(None, None, [{"name": "f", "arguments": f'{{"q": {len(text)}}}'}])
    return Parsed(None, text, [])


as_calls.needs_special_tokens = as_calls.reads_calls = True
as_calls.content_of_beginning = lambda text, tools, *_: "" if tools else text


def start(folder, ranks, device, mesh, max_tokens=MAX_TOKENS):
    """Engine, policy and tokenizer over a new tiny model; random weights hardly ever end a reply, so many ids do."""
    oracle = make_tiny(folder, max_position_embeddings=max_tokens)
    tokenizer = Tokenizer(folder, TEMPLATE)
    policy = config.PolicyConfig(precision="float32", max_total_sequence_length=max_tokens)
    llm = VLLMEngine(folder, read_model_config(folder), tokenizer, config.Config(policy=policy))
    model = load_policy(folder, device=device, mesh=mesh)
    llm.sync(full_tensors(model, llm.dtype), 3)
    llm.stop_token_ids = [*llm.stop_token_ids, *range(0, 250, 10)]
    return SimpleNamespace(engine=llm, policy=model, tokenizer=tokenizer, ranks=ranks, oracle=oracle)


@torch.no_grad()
def gap_of(case, micro):
    """Largest |sampler - trainer| of a micro-batch's tokens."""
    logp_R, _ = response_logps(case.policy, micro.model_inputs, micro.target_R, HEAD)
    return (logp_R - micro.sampler_logp_R).abs().max()


def endpoint_of(case, parse=as_calls, agents=()):
    return Endpoint(case.engine, case.tokenizer, case.ranks, parse, agents)


def record_draws(engine, monkeypatch):
    """What the engine draws from now on, counted: (ids of the prompt, ids of the reply)."""
    drawn, prompts = Counter(), {}
    start_of_engine, step = engine.start, engine.step

    def recorded_start(asked, *rest):
        names = start_of_engine(asked, *rest)
        prompts.update(zip(names, map(tuple, asked), strict=True))
        return names

    def recorded_step():
        before = set(engine.unclaimed)
        step()
        for name in engine.unclaimed.keys() - before:
            drawn[prompts[name], tuple(engine.unclaimed[name].ids)] += 1

    monkeypatch.setattr(engine, "start", recorded_start)
    monkeypatch.setattr(engine, "step", recorded_step)
    return drawn


def serve(endpoint, programs, seconds=120.0):
    """What the programs return or raise, each in a thread, while this thread steps the engine."""
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(program) for program in programs]
        while not all(future.done() for future in futures):
            endpoint.before_step()
            endpoint.engine.step()
            assert time.monotonic() < end, "the programs have not ended"
        return [future.exception() or future.result() for future in futures]


def chat(base_url, messages, **options):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return client.chat.completions.create(**{"model": "policy", "messages": messages} | options)


def post(base_url, body, path="/chat/completions", **options):
    return httpx.post(base_url + path, **({"content": body} if isinstance(body, bytes) else {"json": body}), **options)


def eight_calls(base_url, number, wait=lambda: None):
    """A tool turn, parts, a stream, a question to another system prompt, compaction, two branches of one request."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number}+7?"}]
    wait()
    first = chat(base_url, messages, tools=TOOLS).choices[0].message
    messages.append(first)  # the object, as most programs do
    for call in first.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": call.function.arguments})
    messages.append({"role": "user", "content": [{"type": "text", "text": "Sure?"}]})
    wait()
    text = ""
    for chunk in chat(base_url, messages, tools=TOOLS, tool_choice="none", stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "So?"}]
    wait()
    chat(base_url, messages, tools=TOOLS, max_tokens=5)
    chat(base_url, messages[:2], temperature=0.1)  # without tools: another root
    chat(base_url, [{"role": "user", "content": f"In short: {text}"}])
    wait()
    chat(base_url, [*messages[:-1], {"role": "user", "content": "Another?"}], tools=TOOLS, n=2)
    chat(base_url, messages[:2], tools=TOOLS, extra_body={"train": False})


def started(cfg, kwargs=None):
    """The agent of a config, with its workers."""
    agent = Agent(cfg, kwargs or {}, 1)
    agent.start_workers()
    return agent


def sample(case, agents, inputs, num_samples=2, key=(7,), max_error_fraction=1.0, max_crashed_fraction=1.0, **kwargs):
    """Of a problem for each input, whose agent is the one of that number. The case's endpoint, unless it is None."""
    environments = {agent.name: started(agent, kwargs.get(agent.name, {})) for agent in agents}
    endpoint = case.endpoint or endpoint_of(case, agents=[*environments.values()])
    problems = []
    for i, (name, text) in enumerate(inputs):
        messages = [{"role": "user", "content": str(text)}]
        row = text if isinstance(text, dict) else {"input": text, "seed": i, "task": i}
        problems.append((i, records.Problem(i, messages, "5", name, case.tokenizer.render(messages), row)))
    sampler = Sampler(
        case.engine,
        case.tokenizer,
        environments,
        case.ranks,
        max_error_fraction=max_error_fraction,
        max_crashed_fraction=max_crashed_fraction,
        endpoint=endpoint,
    )
    try:
        return sampler.sample(problems, num_samples, OPTIONS, key)
    finally:
        if endpoint is not case.endpoint:
            endpoint.shut_down()
        for environment in environments.values():
            environment.close()
