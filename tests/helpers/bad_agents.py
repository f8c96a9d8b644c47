"""Agents that do what they should not, and one that does. They run in worker processes: the standard library only."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor


def ask(base_url, text="hi", **options):
    body = json.dumps({"messages": [{"role": "user", "content": text}]} | options).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def good(base_url, row, seed):
    time.sleep(seed % 7 / 100)
    return float(len(ask(base_url, row["input"])) % 2)


async def three_turns(base_url, messages, answer, is_validation, deadline_s, tools, near=0.5):
    messages = list(messages)
    for _ in range(3):
        reply = ask(base_url, messages[-1]["content"])
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and?"}]
    parts = {"near": near, "half": 0.5}
    return {"reward": near + 0.25, "outcome": "wrong", "rewards": parts, "extracted": reply}


def wrong_number_of_rewards(base_url):
    ask(base_url)
    return {"reward": 1, "call_rewards": [1, 0]}


def slow_to_start(base_url, file):
    """Writes when it began, when it asked first, and when it ended."""
    times = [time.time()]
    time.sleep(0.3)
    times.append(time.time())
    ask(base_url)
    time.sleep(1.0)
    times.append(time.time())
    with open(file, "a") as stream:
        stream.write(json.dumps(times) + "\n")
    return {"reward": 1, "extracted": base_url}


def where_am_i(base_url, prefix):
    ask(base_url)
    has_torch = importlib.util.find_spec("torch") is not None
    found = [sys.prefix, os.environ.get("AGENT_SECRET"), "HOME" in os.environ, has_torch]
    assert found == [prefix, "s", False, False], found
    return 1


def bad(base_url, row):
    """What the row's input says; most ask once before."""
    kind = row["input"]
    reply = "" if kind in ("never", "late key") else ask(base_url)
    if kind == "raises":
        raise RuntimeError("no luck")
    if kind == "exits":
        sys.exit(3)
    if kind == "dies":
        os._exit(9)
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "closes":
        os.closerange(3, 1000)
        time.sleep(1000)
    if kind == "hangs":
        time.sleep(1000)
    if kind == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if kind == "forks":
        for _ in range(3):
            subprocess.Popen(["sleep", "987"], start_new_session=True)
        time.sleep(1000)
    if kind == "leaves a child":
        subprocess.Popen(["sleep", "987"], start_new_session=True)
        return 1.0
    if kind == "text":
        return "much"
    if kind == "nan":
        return float("nan")
    if kind == "none":
        return None
    if kind == "object":
        return {"points": 3}
    if kind == "outcome":
        return {"reward": 1, "outcome": "great"}
    if kind == "big prompt":
        try:
            ask(base_url, "x" * (1 << 20))
        except urllib.error.HTTPError as error:
            return float(error.code == 400)
    if kind == "broken json":
        try:
            urllib.request.urlopen(f"{base_url}/chat/completions", b"{", timeout=60)
        except urllib.error.HTTPError as error:
            return float(error.code == 400)
    if kind == "many":
        codes = []
        for _ in range(20):
            try:
                ask(base_url)
            except urllib.error.HTTPError as error:
                codes.append(error.code)
        return float(set(codes) == {429})
    if kind.startswith("crowd"):
        with ThreadPoolExecutor(1000) as pool:
            codes = Counter(pool.map(status_of, [base_url] * 1000))
        if kind == "crowd that waits":
            time.sleep(1000)
        return float(codes == {200: 3, 429: 997})
    return float(reply is not None)


def status_of(base_url):
    try:
        ask(base_url)
        return 200
    except urllib.error.HTTPError as error:
        return error.code
