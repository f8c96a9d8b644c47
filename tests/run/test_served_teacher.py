"""A teacher behind an endpoint gives the numbers of one in memory; what cannot be a teacher is told in a sentence."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from dist_case import make_samples, settings
from loop import CPU, train_once
from ranks import ranks
from tiny import VOCAB_SIZE, make_tiny
from transformers import AutoModelForCausalLM

from base.hf.tokenizer import Tokenizer
from base.inputs import teacher_server
from base.inputs.teacher_server import ServerError, find_teacher
from base.system.exits import StopRun
from base.system.ranks import start_process_group
from config import ConfigError, GenerationConfig, SequencePackingConfig
from head import HeadOptions
from model import load_policy
from pack import make_minibatches
from reference import Teacher
from run.served_teacher import ServedTeacher


class StandIn(ThreadingHTTPServer):
    """What the client reads of vLLM's server, computed by transformers. `spoil` changes an answer by its path."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = Tokenizer(folder)
        self.spoil = lambda path, answer: answer
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "teacher", "max_model_len": 65}]}
        assert body["model"] == "teacher"
        if path == "/tokenize":
            assert not body["add_special_tokens"]
            return {"tokens": self.tokenizer.backend.encode(body["prompt"], add_special_tokens=False).ids}
        assert path == "/v1/completions" and body["max_tokens"] == 1
        ids = body["prompt"]
        with self.lock, torch.no_grad():
            logp_TV = self.model(torch.tensor([ids])).logits[0, :, :VOCAB_SIZE].log_softmax(-1)
        rank_TV = logp_TV.argsort(descending=True).argsort() + 1
        entries = [None]
        for place, token in enumerate(ids[1:]):
            likeliest = logp_TV[place].topk(min(body["prompt_logprobs"], 20)).indices.tolist()
            entries.append({})
            for other in dict.fromkeys([token, *likeliest]):
                logprob, rank = float(logp_TV[place, other]), int(rank_TV[place, other])
                entries[-1][str(other)] = {"logprob": logprob, "rank": rank, "decoded_token": "?"}
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        answer = self.server.spoil(self.path, self.server.answer(self.path, body))
        if isinstance(answer, int):
            self.send_error(answer)
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("teacher")
    make_tiny(made, seed=3)
    return made


@pytest.fixture
def server(folder):
    with StandIn(folder) as running:
        yield running
        running.shutdown()


def config_of(top_k, max_tokens=100):
    return settings(
        loss_fn={"reference_policy_kl_penalty": 1.0, "topk_logits_k": top_k},
        policy={
            "generation": GenerationConfig(temperature=1.0, max_new_tokens=24),
            "sequence_packing": SequencePackingConfig(train_mb_tokens=max_tokens),
        },
    )


def compare(url, folder, policy_folder, one_rank, top_k, limit):
    """Scores of each target, in packs that share prompts, then a whole step."""
    ranks_of_one, _, mesh = one_rank
    policy, teacher = (load_policy(file, device="cpu", mesh=mesh) for file in (policy_folder, folder))
    cfg = config_of(top_k)
    samples, adv_B = make_samples(VOCAB_SIZE)
    served = ServedTeacher(find_teacher(url, Tokenizer(policy_folder), 64, top_k))
    found = []
    for reference in (Teacher(teacher), served):
        (minibatch,) = make_minibatches(samples, adv_B, cfg, ranks_of_one, CPU)
        with torch.no_grad():
            reference.score(minibatch.micros, policy, HeadOptions(vocab=VOCAB_SIZE), top_k)
        metrics, _ = train_once(policy, samples, adv_B, cfg, ranks_of_one, reference=reference)
        found.append((minibatch.micros, metrics))
    (in_memory, expected), (over_http, metrics) = found
    assert len(in_memory) > 2 and any(max(micro.layout.prefixes) >= 0 for micro in in_memory)
    for one, other in zip(in_memory, over_http, strict=True):
        torch.testing.assert_close(other.ref_logp_R, one.ref_logp_R, rtol=0, atol=limit)
        if top_k:
            assert torch.equal(other.ref_ids_RJ, one.ref_ids_RJ)
            torch.testing.assert_close(other.ref_logp_RJ, one.ref_logp_RJ, rtol=0, atol=limit)
    assert metrics["kl_penalty"] == pytest.approx(expected["kl_penalty"], rel=1e-4) and expected["kl_penalty"] > 0.01
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_served_teacher_gives_the_numbers_of_one_in_memory(server, folder, tiny, one_rank, top_k):
    compare(server.url + "/v1/", folder, tiny[0], one_rank, top_k, 1e-4)


@pytest.mark.long
def test_vllm_serves_one(folder, tiny, one_rank, tmp_path):
    """The teacher has no padding: vLLM's softmax is over all rows of the weight."""
    from safetensors.torch import load_file, save_file

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    described = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] > VOCAB_SIZE and "embed" in name:
            tensors[name] = tensor[:VOCAB_SIZE].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tmp_path), "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "80", "--host", "127.0.0.1"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(300):
                time.sleep(1)
                try:
                    find_teacher(url, Tokenizer(folder), 64, 4)
                    break
                except ConfigError as error:
                    assert "did not answer" in str(error) and running.poll() is None, (
                        error,
                        (tmp_path / "log").read_text(),
                    )
            compare(url, tmp_path, tiny[0], one_rank, 4, 1e-4)
            with pytest.raises(ConfigError, match="max allowed: 20"):
                find_teacher(url, Tokenizer(folder), 64, 21)
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def other_ids(path, answer):
    if path == "/tokenize":
        answer["tokens"][-1] += 1
    return answer


SPOILED = {
    "other ids": (other_ids, "gives other ids than the policy's"),
    "an older server": (lambda path, answer: 404 if path == "/tokenize" else answer, "/tokenize answered 404"),
    "no log-probabilities": (
        lambda path, answer: {"choices": [{"text": ""}]} if "completions" in path else answer,
        "no prompt_logprobs for each id",
    ),
    "another API": (lambda path, answer: {"models": []}, "are not those of vLLM"),
    "no model": (lambda path, answer: {"data": []}, "are not those of vLLM"),
    "a page": (lambda path, answer: b"<html>", "did not answer"),
    "broken": (lambda path, answer: 503, "answered 503"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_cannot_be_a_teacher_is_told(name, server, tiny):
    server.spoil, sentence = SPOILED[name]
    with pytest.raises(ConfigError, match=f"policy.reference_server_url=.*{re.escape(sentence)}"):
        find_teacher(server.url, Tokenizer(tiny[0]), 64, 4)


@pytest.mark.parametrize(
    "max_tokens, top_k, sentence",
    [(65, 4, "start it with --max-model-len 66"), (64, 21, "start it with --max-logprobs 21")],
)
def test_a_teacher_that_is_too_small_is_told(max_tokens, top_k, sentence, server, tiny):
    with pytest.raises(ConfigError, match=sentence):
        find_teacher(server.url, Tokenizer(tiny[0]), max_tokens, top_k)


@pytest.mark.parametrize("url", ["", "abc", "localhost:1", "http://[::1", "http://a b", "http://127.0.0.1:1/v1/"])
def test_an_address_of_no_server_is_told(url, tiny):
    with pytest.raises(ConfigError, match=r"did not answer .*correct the address"):
        find_teacher(url, Tokenizer(tiny[0]), 64, None)


def test_check_tells_that_no_server_answers():
    words = ["policy.reference_server_url=http://127.0.0.1:1", "loss_fn.reference_policy_kl_penalty=1"]
    command = [sys.executable, "grpo.py", "--check", "configs/smoke.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did not answer" in done.stdout + done.stderr


def test_a_server_that_fails_for_a_while_costs_no_run(server, tiny, monkeypatch):
    monkeypatch.setattr(teacher_server, "PAUSE", 0.01)
    teacher = find_teacher(server.url, Tokenizer(tiny[0]), 64, 4)
    failures = iter([503, 503, 503])
    server.spoil = lambda path, answer: next(failures, answer)
    assert len(teacher.score([1, 2, 3], 4).logp_T) == 2
    server.spoil = lambda path, answer: 503
    with pytest.raises(ServerError, match="answered 503"):
        teacher.score([1, 2, 3], 4)


class FailsOnRank1:
    url = "http://teacher"

    def __init__(self, rank):
        self.rank = rank

    def score_all(self, sequences, top_k):
        if self.rank == 1:
            raise ServerError("it is gone")
        return []


@ranks(2)
def stops_on_both():
    place, _ = start_process_group(tp_size=1)
    try:
        ServedTeacher(FailsOnRank1(place.rank)).score([], None, None, None)
    except StopRun as stop:
        return str(stop)


@pytest.mark.slow
def test_if_it_fails_one_rank_all_stop():
    assert all("it is gone" in said for said in stops_on_both())
