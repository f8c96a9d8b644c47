"""Jobs of `grpo.main`, split and not, with a stand-in for vLLM: split_worker.py FOLDER JOB ...

One process that has imported everything forks the ranks of each job, as torchrun starts them. A fault is put into one
rank. Writes answer.json: for each job its run folder, the exit codes of its ranks and what they printed.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import fake_vllm

fake_vllm.install()
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from small_run import STARTER, arguments, write_rows
from transformers import AutoModelForCausalLM

import engine
import grpo
from base.system import exits, watchdog
from base.system.exits import StopRun
from rollout import Sampler

SETTINGS = ("checkpointing.save_period=2", "checkpointing.keep_latest=9", "grpo.max_num_steps=10", "grpo.val_period=5")
SETTINGS += ("logger.tensorboard_enabled=false", "checkpointing.save_hf_at_end=false", "grpo.canary_period=3")
SETTINGS += ("grpo.max_val_samples=4", "logger.dump_rollouts=5")
COLOCATED = "policy.generation.colocated"
SPLIT = (f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node=1")
HASTY = ("watchdog.min_seconds=3", "watchdog.factor=2")
JOBS = {  # name -> (ranks, overrides, the job whose run it goes on with, rank with a fault, fault)
    "colocated": (1, (), None, None, None),
    "split": (2, SPLIT, None, None, None),
    "killed generator": (2, SPLIT, None, 1, "killed"),
    "resumed": (2, SPLIT, "killed generator", None, None),
    "signalled trainer": (2, SPLIT, None, 0, "signalled"),
    "stopped generator": (2, SPLIT, None, 1, "stopped"),
    "colocated 2": (2, (), None, None, None),
    "split 2 + 1": (3, SPLIT, None, None, None),
    "split 1 + 2": (3, (f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node=2"), None, None, None),
}
AGE_0 = (*SPLIT, "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")
ASYNC = (*SPLIT, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
IN_FLIGHT = (*ASYNC, "grpo.async_grpo.in_flight_weight_updates=true")
TWO_GENERATORS = (f"{COLOCATED}.resources.gpus_per_node=2",)
JOBS |= {
    "async 0": (2, AGE_0, None, None, None),
    "async": (2, IN_FLIGHT, None, None, None),
    "async drained": (2, ASYNC, None, None, None),
    "async 1 + 2": (3, (*IN_FLIGHT, *TWO_GENERATORS, "grpo.async_grpo.max_trajectory_age_steps=2"), None, None, None),
    "async lost group": (2, IN_FLIGHT, None, 1, "lost"),
    "async found": (2, ASYNC, "async lost group", None, None),
    "async 2 lost group": (3, (*IN_FLIGHT, *TWO_GENERATORS, *HASTY), None, 2, "lost"),
    "async killed generator": (2, IN_FLIGHT, None, 1, "killed"),
    "async resumed": (2, IN_FLIGHT, "async killed generator", None, None),
    "async killed trainer": (2, IN_FLIGHT, None, 0, "killed"),
    "async hung generator": (2, (*IN_FLIGHT, *HASTY), None, 1, "hung"),
    "async hung trainer": (2, (*IN_FLIGHT, *HASTY), None, 0, "hung"),
    "async signalled generator": (2, IN_FLIGHT, None, 1, "signalled"),
    "async went on": (2, IN_FLIGHT, "async signalled generator", None, None),
}
DYNAMIC = ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2", "grpo.max_num_steps=4")
JOBS |= {"dynamic": (1, DYNAMIC, None, None, None), "split dynamic": (2, (*SPLIT, *DYNAMIC), None, None, None)}
SECOND_TRY = "examples.arithmetic.second_try:SecondTry"
TWO_TURNS = ("grpo.max_rollout_turns=2", "policy.max_total_sequence_length=48", f"data.train.env_name={SECOND_TRY}")
TWO_TURNS += (f"data.validation.env_name={SECOND_TRY}",)
JOBS |= {"async dynamic": (2, (*IN_FLIGHT, *DYNAMIC), None, None, None)}
JOBS |= {"async two turns": (2, (*IN_FLIGHT, *TWO_TURNS), None, None, None)}
FAULT_STEP = 6
SAMPLE = Sampler._converse
START = Sampler.start
LOSS = grpo.compute_loss


def put_in(fault: str) -> None:
    """Into this process: a generator has it amid the samples of FAULT_STEP, a trainer amid its update."""

    def go_wrong() -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "signalled":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "stopped":
            raise StopRun("the graders say nothing")
        else:
            time.sleep(1000)

    def begin(self, prompts, num_samples, options, seed_key, step=0):
        conversations = START(self, prompts, num_samples, options, seed_key, step)
        if len(seed_key) == 1 and step == FAULT_STEP and fault == "lost":
            self.engine.llm.llm_engine.abort_request([next(c.request_id for c in conversations if c.request_id)])
        elif len(seed_key) == 1 and step == FAULT_STEP:  # amid what is generated ahead, for which no trainer waits
            self.engine.step = lambda: go_wrong() or engine.VLLMEngine.step(self.engine)
        return conversations

    def converse(self, share):
        if share and share[0].key[1:-2] == (FAULT_STEP,):
            go_wrong()
        return SAMPLE(self, share)

    def compute_loss(model, micro, *others):
        if TRAINED.append(1) or len(TRAINED) == FAULT_STEP:  # one pack to a step
            go_wrong()
        return LOSS(model, micro, *others)

    TRAINED: list[int] = []
    Sampler._converse = converse
    Sampler.start = begin
    grpo.compute_loss = compute_loss


def start(folder: Path, words: list[str], environment: dict[str, str], fault: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    exits.job_rank = int(environment["RANK"])
    if fault:
        put_in(fault)
    sys.argv = ["grpo.py", *words]
    code = grpo.main()
    sys.stdout.flush()
    os._exit(code)


def run(folder: Path, num_ranks: int, overrides: tuple[str, ...], faulty: int | None, fault: str | None) -> dict:
    folder.mkdir(exist_ok=True)
    write_rows(folder)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    job["GRPO_EXIT_FILE"] = str(folder / "exit_of_script.json")
    pids = []
    for rank in range(num_ranks):
        words = [*arguments(folder), *SETTINGS, *overrides]
        environment = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids.append(start(folder, words, environment, fault if rank == faulty else None))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"run": str(folder / "exp_001"), "codes": codes, "log": (folder / "log").read_text()}


def main(work: Path, names: list[str]) -> None:
    os.chdir(ROOT)
    AutoModelForCausalLM.from_pretrained(STARTER)  # imports here, once, what each rank's stand-in would
    watchdog.POLL_SECONDS, watchdog.GRACE_SECONDS = 0.05, 0.8
    answers = {}
    step = engine.VLLMEngine.step
    for name in names:
        slow = 0.05 if name.startswith("async") else 0.0  # so that steps begin and end amid responses
        engine.VLLMEngine.step = lambda self, slow=slow: time.sleep(slow) or step(self)
        num_ranks, overrides, before, faulty, fault = JOBS[name]
        if before:
            exit_file = Path(answers[before]["run"]).parent / "exit_of_script.json"
            exit_file.unlink()
            overrides = (*overrides, f"checkpointing.resume_from={answers[before]['run']}")
        folder = Path(answers[before]["run"]).parent if before else work / name.replace(" ", "_")
        end = run(folder, num_ranks, overrides, faulty, fault)
        answers[name] = end | {"exit": json.loads((folder / "exp_001" / "exit.json").read_text())}
        (work / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
