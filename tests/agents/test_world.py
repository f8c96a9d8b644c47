"""The world of a user's program: modules named like each file and folder of this repository are the user's."""

import os
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from agent_case import started

from config import AgentConfig
from judges.pool import GraderPool
from records import Problem

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, json, sys
NAMES = json.load(open(__file__ + ".json"))
modules = [importlib.import_module(name) for name in NAMES]

def solve():
    wrong = [module.__file__ for module in modules if getattr(module, "owner", "") != OWNER]
    return {"reward": 1.0, "extracted": str(wrong)}

def grade(job):
    return solve()["extracted"]

if __name__ == "__main__":
    json.load(sys.stdin)
    print(json.dumps(solve()))
"""
PROBLEM = Problem(0, [], "", "a", [])
GIVEN = dict.fromkeys(("base_url", "seed", "is_validation", "tools"), "")


def submit(agent, **row):
    return agent.submit(agent.rollout_job(replace(PROBLEM, fields=row), GIVEN))


def result_of(agent, number):
    graded = {}
    while number not in graded:
        graded |= agent.poll(1.0)
    return agent.result(None, graded[number])


NOT_OF_USERS = {"__init__", "sitecustomize"}  # Python imports these itself


def names_of_the_repository():
    """(stems of the modules, folders): what a user may have, too; not what the standard library has."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines()]
    folders = {part for path in paths for part in path.parts[:-1] if part.isidentifier()}
    modules = {path.stem for path in paths if path.suffix == ".py" and path.stem.isidentifier()}
    return sorted(modules - folders - sys.stdlib_module_names - NOT_OF_USERS), sorted(folders)


def is_ours(name):
    """Whether the repository has a module or package of this name on top."""
    return (ROOT / f"{name}.py").exists() or (ROOT / name / "__init__.py").exists()


def make_folder(folder):
    """An agent's folder: its program, agent.py, checks that it has imported the folder's modules."""
    modules, folders = names_of_the_repository()
    assert {"config", "model", "loss", "worker"} <= set(modules) and {"tools", "judges", "base", "run"} <= set(folders)
    owner = f"owner = {folder.name!r}\n"
    folder.mkdir()
    for name in modules:
        (folder / f"{name}.py").write_text(owner)
    for name in folders:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(owner)
    taken = ", ".join(name for name in (*modules, *folders) if is_ours(name))
    test = f"all(name.owner == {folder.name!r} for name in [{taken}])"
    body = f"    assert {test}\n    return [float(len(text)) for text in completions]\n"
    (folder / "reward.py").write_text(f"import {taken}\n\ndef reward(completions):\n{body}")
    (folder / "agent.py").write_text(f"OWNER = {folder.name!r}\n{PROGRAM}")
    (folder / "agent.py.json").write_text(str([*modules, *folders]).replace("'", '"'))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    work = tmp_path_factory.mktemp("agents")
    return make_folder(work / "one"), make_folder(work / "two")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


def grade_all(programs):
    """All at once: each imports nothing but the modules of its own folder."""
    agents = [started(AgentConfig(name="a", num_workers=1, **program)) for program in programs]
    numbers = [submit(agent) for agent in agents]
    for agent, number, program in zip(agents, numbers, programs, strict=True):
        result = result_of(agent, number)
        assert (result.outcome, result.extracted) == ("ok", "[]"), (program, result)
        agent.close()


def test_agents_find_their_own_modules(folders, interpreter, monkeypatch):
    """Two agents of each kind at once, from two folders."""
    one, two = folders
    monkeypatch.setenv("PYTHONPATH", str(one))
    monkeypatch.syspath_prepend(one)  # as if it had been set from the start
    programs = []
    for python in (None, interpreter):
        programs += [{"function": f"{folder}/agent.py:solve", "python": python} for folder in folders]
        programs.append({"function": "agent:solve", "python": python})
        programs += [{"command": (python or sys.executable, f"{folder}/agent.py")} for folder in folders]
    grade_all(programs)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(one)])
    monkeypatch.chdir(two)
    programs = []
    for python in (None, interpreter):
        programs.append({"function": "agent:solve", "python": python})
        programs.append({"command": (python or sys.executable, "-m", "agent")})
    grade_all(programs)


def test_graders_find_their_own_modules(folders, monkeypatch):
    monkeypatch.chdir(folders[0])
    pool = GraderPool("agent:grade", num_workers=1, deadline_s=60, memory_mib=None)
    assert pool.grade([0])[0].value == "[]"
    pool.close()


def test_a_reward_function_has_its_own_modules(folders):
    """By the real command, which calls it on a row."""
    words = ["configs/smoke.yaml", "data.default.env_name=reward:reward", "data.train.env_name=reward:reward"]
    command = [sys.executable, "grpo.py", "--check", *words, "data.validation.env_name=reward:reward"]
    env = os.environ | {"PYTHONPATH": str(folders[0])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


def test_a_command_has_the_users_search_path(tmp_path, monkeypatch):
    """Not one entry of ours, and none where the user has none."""
    program = "import os; print(int(os.environ.get('PYTHONPATH') == %r))"
    for path in (str(tmp_path), None):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path:
            monkeypatch.setenv("PYTHONPATH", path)
        agent = started(AgentConfig(name="a", num_workers=1, command=(sys.executable, "-c", program % path)))
        result = result_of(agent, submit(agent))
        assert result.reward == 1, result
        agent.close()


KEEPS_A_CLIENT = """
import asyncio
from contextvars import ContextVar

CLIENT = {}
TRACE = ContextVar("trace", default=None)


async def echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)


async def solve(base_url, row):
    assert TRACE.get() is None
    TRACE.set("of this rollout")
    if row["is_cancelled"]:
        raise asyncio.CancelledError
    if not CLIENT:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        CLIENT.update(server=server, reader=reader, writer=writer)
    CLIENT["writer"].write(b"hi\\n")
    return float(await CLIENT["reader"].readline() == b"hi\\n")
"""


def test_agents3_4_a_client_of_the_process_lives_as_long_as_the_process(tmp_path):
    """NeMo Gym's keeps one aiohttp session, which belongs to the event loop of its first rollout."""
    (tmp_path / "keeps.py").write_text(KEEPS_A_CLIENT)
    agent = started(AgentConfig(name="a", num_workers=1, function=f"{tmp_path}/keeps.py:solve"))
    for is_cancelled in (False, False, True, False):
        result = result_of(agent, submit(agent, is_cancelled=is_cancelled))
        assert result.outcome == ("error" if is_cancelled else "ok"), result.state
        assert ("cancelled" in result.state.get("message", "")) == is_cancelled
    agent.close()


EXITS = """
import os, subprocess, sys


def solve(base_url, row):
    exec(row["code"])


async def solve_async(base_url, row):
    exec(row["code"])


if __name__ == "__main__":
    import json
    exec(json.load(sys.stdin)["code"])
"""
CODES = {  # what an agent does before it ends -> what is said of it
    "print('no such config', file=sys.stderr); sys.exit(1)": "no such config",
    "print('first'); print('to stdout'); sys.exit(1)": "to stdout",
    "os.write(2, b'by its number\\n\\n'); sys.exit(1)": "by its number",
    "subprocess.run(['sh', '-c', 'echo by a child >&2']); sys.exit(1)": "by a child",
    "print('ValueError: the cause', file=sys.stderr); print('  behind it', file=sys.stderr); sys.exit(1)": "ValueError",
    "sys.exit(1)": "it wrote nothing",
    "print('\\ud800', file=sys.stderr); sys.exit(1)": "\\ud800",
    "sys.stdout = None; sys.stderr.write('no stdout'); sys.exit(1)": "no stdout",
}


@pytest.mark.parametrize("kind", ["solve", "solve_async", "command"])
def test_agents3_5_6_an_exit_says_what_was_printed_last(tmp_path, kind):
    file = tmp_path / "exits.py"
    file.write_text(EXITS)
    program = {"command": (sys.executable, str(file))} if kind == "command" else {"function": f"{file}:{kind}"}
    agent = started(AgentConfig(name="a", num_workers=1, **program))
    for code, said in CODES.items():
        result = result_of(agent, submit(agent, code=code))
        message = result.state["message"]
        assert said in message and ("code 1" in message or "with 1" in message), (code, message)
        assert result.state["crashed"]
    for code, said in (("sys.exit('bye')", "bye"), ("sys.exit(3)", "3: it wrote nothing")):
        result = result_of(agent, submit(agent, code=code))
        assert said in result.state["message"], result.state
    agent.close()
