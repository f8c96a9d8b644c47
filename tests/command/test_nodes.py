"""Training on two nodes, which are two folders of this machine: by hand, and under stand-ins of Slurm's commands.

First with a grpo.py that only plays a run; what is marked `long` trains, with a stand-in for vLLM.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_life import at_step, newest_step, steps
from safetensors.torch import load_file
from small_run import write_rows
from torch import equal
from two_nodes import ROOT, Job, copy_of_repository, environment, free_port, last_line, run_words, start, wait_until

from base.system import exits, failure

PLAYED_RUN = """
import json, os, signal, sys, time
if sys.argv[1] == "--check":
    print("checked", os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"], *sys.argv[2:], file=sys.stderr)
    sys.exit()
rank, part, seen = int(os.environ["RANK"]), os.environ.get("SLURM_RESTART_COUNT", "0"), []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
print("offline", os.environ["HF_HUB_OFFLINE"], "on", os.environ["GRPO_HOST_NAME"], flush=True)
open("started", "w").close()
while part == "0" and not seen:
    time.sleep(0.02)
time.sleep(0.3)  # time for a second one to show
code = {"0": 75, "1": 0}[part]
print("signals", len(seen), "of", os.environ["WORLD_SIZE"], flush=True)
with open(os.environ["GRPO_EXIT_FILE"], "w") as file:
    json.dump({"code": code, "reason": "played", "rank": rank, "host": os.environ["GRPO_HOST_NAME"]}, file)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A job by slurm.sh that is told to save in its first part: (folder, exit code of each part and whether it was
    queued again); and meanwhile (exit code, output) of a node that finds no other one."""
    work = tmp_path_factory.mktemp("slurm")
    for number in (0, 1):
        copy_of_repository(work / f"node-{number}")
        (work / f"node-{number}" / "grpo.py").write_text(PLAYED_RUN)
    job = Job(work, ["my.yaml", "grpo.seed=2"])
    codes = []
    words = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "grpo.py"]
    command = [sys.executable, "-m", "base.system.launch", "--rdzv_conf=is_host=0,read_timeout=1", *words]
    env = environment(work, GRPO_EXIT_FILE=str(work / "exit.json"))
    lonely = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    part = job.start_part()
    wait_until(lambda: len(list(work.glob("node-*/started"))) == 2, part)
    part.send_signal(signal.SIGUSR1)
    codes.append((part.wait(timeout=60), job.is_queued_again()))
    part = job.start_part()
    codes.append((part.wait(timeout=60), job.is_queued_again()))
    _, errors = lonely.communicate(timeout=60)
    return work, codes, (lonely.returncode, errors)


@pytest.mark.long
def test_slurm_passes_the_signal_on_and_queues_a_saved_run_again(played):
    work, codes, _ = played
    assert codes == [(75, True), (0, False)], (work / "batch.log").read_text()
    said = (work / "batch.log").read_text()
    assert re.findall(r"part (\d) ended after step 0 with exit code (\d+)", said) == [("1", "75"), ("2", "0")]


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_each_node_has_a_log_and_ends_with_the_code_of_the_run(played, number):
    log = (played[0] / f"slurm-4711-{number}.log").read_text()
    assert log.count("checked 2 1 my.yaml grpo.seed=2 checkpointing.resume=auto\n") == 2
    assert log.count(f"offline 1 on node-{number}\n") == 2
    assert re.findall(r"signals (\d) of 2", log) == ["1", "0"]
    assert re.findall(r"train\.sh: exit code (\d+): played", log) == ["75"]
    endpoint = 29500 + 4711 % 1000
    torchrun = f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{endpoint} --rdzv_conf=is_host={1 - number},"
    assert log.count(torchrun) == 2 and log.count(" --max-restarts=0 ") == 2


@pytest.fixture
def job(tmp_path):
    """A job whose nodes end with the code in the file `code`, once there is a file `end`."""
    job = Job(tmp_path, ["my.yaml"])
    (tmp_path / "bin" / "srun").write_text(
        "#!/bin/sh\ntouch runs\nwhile [ ! -e end ]; do sleep 0.02; done\nexit $(cat code)\n"
    )
    job.say_step(0)
    return job


QUEUED_AGAIN = [(75, None, True), (75, signal.SIGTERM, False), (1, None, True), (1, signal.SIGTERM, False)]
QUEUED_AGAIN += [(4, None, True), (137, None, True), (2, None, False), (3, None, False), (5, None, False)]


@pytest.mark.parametrize(("code", "number", "again"), QUEUED_AGAIN)
def test_a_job_is_queued_again_unless_somebody_cancelled_it_or_must_mend_it(job, code, number, again):
    (job.work / "code").write_text(str(code))
    part = job.start_part()
    wait_until((job.work / "runs").exists, part)
    if number:
        part.send_signal(number)
    (job.work / "end").touch()
    assert (part.wait(timeout=60), job.is_queued_again()) == (code, again)


def test_a_job_that_fails_is_queued_again_at_most_three_times_without_a_new_checkpoint(job):
    (job.work / "end").touch()
    (job.work / "code").write_text("1")
    # Each part begins where the one before has ended: the script asks at both ends.
    step_at_end_of_part = [0, 0, 5, 5, 5, 5, 5]
    queued = []
    for step in step_at_end_of_part:
        (job.work / "bin" / "srun").write_text(f"#!/bin/sh\nprintf '#!/bin/sh\\necho {step}\\n' >bin/python\nexit 1\n")
        part = job.start_part()
        assert part.wait(timeout=60) == 1
        queued.append(job.is_queued_again())
    assert queued == [True, True, True, True, True, True, False]


def test_the_log_with_the_step_lines_is_named(job):
    """Rank 0 runs on the node whose name comes first in the alphabet, which may not be Slurm's first."""
    (job.work / "bin" / "scontrol").write_text("#!/bin/sh\nprintf 'node-2\\nnode-10\\n'\n")
    (job.work / "end").touch()
    (job.work / "code").write_text("0")
    assert job.start_part().wait(timeout=60) == 0
    assert "tail -F slurm-4711-1.log" in (job.work / "batch.log").read_text()


@pytest.mark.parametrize(
    "words", [["--nnodes=2"], ["--nnodes", "2", "--node-rank=2", "--rdzv_endpoint=a:1"], ["--nnodes=2", "--node_rank=0",
    "--rdzv-endpoint=a"], ["--nnodes"]]
)  # fmt: skip
def test_incomplete_nodes_are_refused(tmp_path, words):
    for name in ("train.sh", "setup.sh", "requirements"):
        (shutil.copytree if name == "requirements" else shutil.copy)(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["./train.sh", *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("train.sh: ") and "--nnodes" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def on_node_0(monkeypatch, tmp_path):
    """This process is a rank on the first of several nodes. Its run folder."""
    monkeypatch.setenv("GRPO_HOST_NAME", "node-0")
    return tmp_path


def test_a_crash_on_one_of_several_nodes_says_how_to_go_on(on_node_0):
    """The process at the other end of the connection may be gone with its node, and nobody here can know."""
    peers = exits.Peers({0: ("node-0", os.getpid()), 1: ("node-1", os.getpid())})
    code, reason = failure.describe_failure(RuntimeError("Connection closed by peer [10.0.0.2]:4"), on_node_0, peers)
    assert code == 1 and reason.startswith("crashed: RuntimeError: Connection closed by peer")
    assert f"continue with checkpointing.resume_from={on_node_0}" in reason


@pytest.mark.parametrize("local_rank", [0, 1])
def test_train_sh_of_each_node_hears_of_a_good_end(on_node_0, monkeypatch, local_rank):
    """From the node's first rank; the run folder's exit.json is rank 0's."""
    monkeypatch.setattr(exits, "job_rank", 4)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("GRPO_EXIT_FILE", str(on_node_0 / "of_train_sh.json"))
    exits.report_exit(75, "saved", on_node_0)
    assert (on_node_0 / "of_train_sh.json").exists() == (local_rank == 0)
    assert not (on_node_0 / "exit.json").exists()


@pytest.mark.long
def test_a_rendezvous_that_fails_is_a_sentence(played):
    *_, (code, output) = played
    line = output.splitlines()[-1]
    assert code == 1 and "Traceback" not in output and line.startswith("train.sh: exit code 1: ")
    assert "RendezvousConnectionError" in line and "--rdzv_endpoint" in line


# ---------------------------------------------------------------------------------------------------------- real runs

NUM_STEPS = 30
LEARN = (f"grpo.max_num_steps={NUM_STEPS}", "checkpointing.save_period=5", "checkpointing.keep_latest=9")
LEARN += ("policy.optimizer.kwargs.lr=3e-4", "grpo.num_generations_per_prompt=16", "logger.num_samples_to_log=64")


def prepare(work: Path) -> Path:
    for number in (0, 1):
        copy_of_repository(work / f"node-{number}")
    write_rows(work)
    return work


def test_two_nodes_train_in_one_run_folder(tmp_path):
    work = prepare(tmp_path)
    short = ("grpo.max_num_steps=2", "grpo.val_at_start=false", "grpo.val_at_end=false")
    nodes = start(work, run_words(work, work / "shared", *short))
    ends = [node.wait(200) for node in nodes]
    assert ends == [(0, "trained to step 2")] * 2, nodes[0].log.read_text()[-3000:]
    assert [path.name for path in (work / "shared").iterdir()] == ["exp_001"]
    assert steps(work / "shared" / "exp_001") == [1, 2]
    tensors, *_ = at_step(work / "shared" / "exp_001", 2)
    assert {name.split("/")[0] for name in tensors} == {"rank_00000.safetensors", "rank_00001.safetensors"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run folder of an unbroken run on two nodes."""
    work = prepare(tmp_path_factory.mktemp("whole"))
    nodes = start(work, run_words(work, work / "shared", *LEARN))
    ends = [node.wait(200) for node in nodes]
    assert ends == [(0, f"trained to step {NUM_STEPS}")] * 2, nodes[0].log.read_text()[-3000:]
    assert steps(work / "shared" / "exp_001") == list(range(1, NUM_STEPS + 1))
    return work / "shared" / "exp_001"


def assert_bitwise(folder: Path, whole: Path) -> None:
    (tensors, cursor, samples), (of_whole, *others) = at_step(folder, NUM_STEPS), at_step(whole, NUM_STEPS)
    assert tensors.keys() == of_whole.keys() and {name.split("/")[0] for name in tensors} == {
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    }
    assert [name for name in tensors if not equal(tensors[name], of_whole[name])] == []
    assert [cursor, samples] == others and len(samples) == 64 * NUM_STEPS
    one, other = (load_file(run / "hf_model" / "model.safetensors") for run in (folder, whole))
    assert all(equal(one[name], other[name]) for name in other)


@pytest.mark.long
def test_a_run_goes_on_when_a_node_is_gone(whole, tmp_path):
    """First the node of the rendezvous, then the other one; what goes on is at the end the unbroken run, to the bit."""
    work = prepare(tmp_path)
    folder = work / "shared" / "exp_001"
    words = run_words(work, work / "shared", *LEARN, "checkpointing.resume=auto")
    for life, (gone, step) in enumerate(((0, 7), (1, 17))):
        nodes = start(work, words, life)
        wait_until(lambda step=step: step in steps(folder), nodes[0].process)
        nodes[gone].kill_all()
        code, line = nodes[1 - gone].wait(60)
        assert code == 1, nodes[1 - gone].log.read_text()[-3000:]
        assert line.startswith("train.sh: exit code 1: crashed: "), line
        assert f"continue with checkpointing.resume_from={folder}" in line
        assert newest_step(folder) in (step - 2, step - 7, step + 3)
    nodes = start(work, words, 2)
    assert [node.wait() for node in nodes] == [(0, f"trained to step {NUM_STEPS}")] * 2
    assert_bitwise(folder, whole)


@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_falls_silent_ends_the_run(tmp_path, gone):
    """Also the node of the rendezvous and the one of rank 0: torchrun and the ranks ask a store there."""
    work = prepare(tmp_path)
    folder = work / "shared" / "exp_001"
    nodes = start(work, run_words(work, work / "shared", *LEARN, "grpo.max_num_steps=100000"))
    wait_until(lambda: 2 in steps(folder), nodes[0].process)
    nodes[gone].signal_all(signal.SIGSTOP)
    begin = time.monotonic()
    try:
        code, line = nodes[1 - gone].wait(90)
    finally:
        nodes[gone].signal_all(signal.SIGKILL)
    assert code == 4 and line.startswith(f"train.sh: exit code 4: hung: node-{gone} does not answer"), line
    assert f"continue with checkpointing.resume_from={folder}" in line
    assert time.monotonic() - begin < 75


@pytest.mark.long
def test_a_slurm_job_that_is_told_to_save_goes_on_in_its_next_part(whole, tmp_path):
    work = prepare(tmp_path)
    folder = work / "shared" / "exp_001"
    job = Job(work, run_words(work, work / "shared", *LEARN))
    part = job.start_part()
    wait_until(lambda: 7 in steps(folder), part)
    part.send_signal(signal.SIGUSR1)
    assert (part.wait(timeout=60), job.is_queued_again()) == (75, True), (work / "slurm-4711-0.log").read_text()[-3000:]
    assert newest_step(folder) == steps(folder)[-1] < NUM_STEPS, "the last whole step was saved"
    part = job.start_part()
    assert (part.wait(timeout=120), job.is_queued_again()) == (0, False)
    for number in (0, 1):
        log = work / f"slurm-4711-{number}.log"
        assert "train.sh: exit code 75: saved: stopped on request" in log.read_text()
        assert last_line(log).endswith(f"trained to step {NUM_STEPS}")
    assert_bitwise(folder, whole)
