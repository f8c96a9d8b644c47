"""An environment of verifiers by its id, as an agent: each rollout is an episode, its tasks are rows.

    .venv/bin/python -m venv ../verifiers && ../verifiers/bin/pip install "verifiers[openenv]==0.4.0" uv
    ./train.sh examples/agents/verifiers_env.yaml

verifiers changes packages that the trainer pins, so it has an interpreter of its own (env.agents' python).
"""


def rows(cfg):
    """A row for each number of a task in the subset, such as "0:1000"."""
    first, last = map(int, cfg.subset.split(":"))
    return [{"problem": f"task {i}", "answer": "", "task": i} for i in range(first, last)]


async def solve(base_url, row, environment):
    """The sum of the rewards of all traces. environment: as the table [env] of a config of verifiers."""
    import verifiers.v1 as vf

    env = vf.load_environment(vf.resolve_env_config(environment))
    [task] = env.taskset.include(idx=[str(row["task"])])
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = episode.errors + [error for trace in episode.traces for error in trace.errors]
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
    return sum(trace.reward for trace in episode.traces)
