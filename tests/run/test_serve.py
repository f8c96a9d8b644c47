"""run/serve.py: a client of the served model measures what validation measures, and asks for what it wants."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Thread

import httpx
import pytest
from one_process import run_in_this_process
from processes import signal_amid
from small_run import STARTER, arguments, write_rows

import eval as eval_module
import grpo
from base.agents.endpoint import Endpoint
from base.agents.server import Server
from run import serve

pytestmark = pytest.mark.slow
SHORT = ["grpo.max_num_steps=1", "checkpointing.save_period=1", "grpo.val_period=0", "grpo.val_at_start=false"]
SHORT += [
    "logger.tensorboard_enabled=false",
    "checkpointing.save_hf_at_end=false",
    "grpo.val_num_generations_per_prompt=1",
]


@pytest.fixture
def answers_of(one_rank, monkeypatch, tmp_path):
    """answers_of(words, client): what the client makes of the base URL of the model that these words serve."""
    run_in_this_process(monkeypatch, one_rank)
    told, urls, open_rollout = [], Queue(), Endpoint.open

    class Told:
        def pending(self):
            return bool(told)

    def open_and_tell(*args, **options):
        opened = open_rollout(*args, **options)
        urls.put(opened[1])
        return opened

    monkeypatch.setattr(serve, "Signals", Told)
    monkeypatch.setattr(Endpoint, "open", open_and_tell)

    def answers_of(words, client):
        told.clear()
        found = []

        def ask():
            try:
                found.append(client(urls.get(timeout=100)))
            finally:
                told.append(True)

        thread = Thread(target=ask)
        thread.start()
        monkeypatch.setattr(sys, "argv", ["eval.py", "--serve", *words, f"logger.log_dir={tmp_path}"])
        code = eval_module.main()
        thread.join()
        assert code == 0
        return found[0]

    return answers_of


def ask(url, content, **options):
    body = {"model": "policy", "messages": [{"role": "user", "content": content}], **options}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def text_of(response):
    return response.json()["choices"][0]["message"]["content"]


def test_a_served_checkpoint_scores_as_its_validation(answers_of, monkeypatch, tmp_path, capfd):
    write_rows(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments(tmp_path), *SHORT])
    assert grpo.main() == 0
    run = tmp_path / "exp_001"
    monkeypatch.setattr(sys, "argv", ["eval.py", f"{run}/config.yaml", f"checkpointing.resume_from={run}"])
    assert eval_module.main() == 0
    (numbers,) = json.loads((tmp_path / "eval_001" / "eval.json").read_text())["sets"].values()
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()][:20]

    def score(url):
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, url, row["messages"][0]["content"], temperature=0) for row in rows]
        return sum(text_of(a.result()) == row["answer"] for a, row in zip(asked, rows, strict=True)) / len(rows)

    found = answers_of([str(run)], score)
    assert found == numbers["greedy"]["accuracy"] and 0 < found < 1
    said = capfd.readouterr().out
    assert (
        f"serving {run}/checkpoints, step 1 as the model 'policy' at http://127.0.0.1:" in said and "NOTE" not in said
    )


def test_the_client_decides_how_replies_are_drawn(answers_of):
    """Of a folder, without data or config."""

    def client(url):
        greedy = [text_of(ask(url, "37+48=", temperature=0)) for _ in range(2)]
        likeliest = [text_of(ask(url, "37+48=", temperature=5.0, top_k=1)) for _ in range(2)]
        narrow = [text_of(ask(url, "37+48=", temperature=5.0, top_p=1e-6)) for _ in range(2)]
        free = {text_of(ask(url, "37+48=", temperature=5.0, top_k=-1, max_tokens=4)) for _ in range(4)}
        wrong = [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 2}, {"top_k": 1.5}, {"top_k": -2}]
        refused = [ask(url, "37+48=", **options) for options in wrong]
        length = ask(url, "37+48=", temperature=0, max_tokens=1).json()["usage"]["completion_tokens"]
        return greedy, likeliest, narrow, free, [(response.status_code, response.text) for response in refused], length

    words = [str(STARTER), "policy.max_total_sequence_length=32", "policy.precision=float32"]
    greedy, likeliest, narrow, free, refused, length = answers_of(words, client)
    assert len({*greedy, *likeliest, *narrow}) == 1 and greedy[0].isdigit()
    assert len(free) > 1 and length == 1
    for status, text in refused:
        assert status == 400 and ("temperature" in text or "top_" in text)


def test_a_signal_as_a_wait_ends_is_no_wait_without_end(monkeypatch):
    """An endpoint that nobody asks: Ctrl-C had no effect until the next request."""
    server = Server(lambda key: True, print, ["127.0.0.1"])
    rescue = Thread(target=lambda: server.thread.join(20) or server.inbox.put("late"), daemon=True)
    rescue.start()
    handled = []
    with signal_amid(0.05, lambda: handled.append(time.sleep(0.3))):
        assert server.take(0.2) == [] and handled
    server.shut_down()
