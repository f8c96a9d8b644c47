"""What surrounds the steps: restoring a run, and what is due after a step."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

import config
from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset
from base.system.exits import Saved, StopRun
from base.system.ranks import Ranks
from run import job, restore, steps
from run.log import Timers

ALONE = Ranks(rank=0, world_size=1, local_rank=0, tp_size=1)


def restored(cfg, mixture, checkpoints):
    """The counters of a run that begins with this config and these data; saver.saved is their step if it resumes."""
    values = dict.fromkeys(job.Run.__dataclass_fields__)
    values |= {"cfg": cfg, "inputs": SimpleNamespace(train=mixture), "ranks": ALONE}
    values |= {"saver": SimpleNamespace(folder=checkpoints, saved=None)}
    run = job.Run(**values | {"state": job.RunState(mixture.start(), mixture.fingerprints)})
    job.restore(run)
    assert run.saver.saved == (run.state.step if cfg.checkpointing.resume_from else None)
    return run.state


def test_other_data_are_read_from_their_start_where_that_is_allowed(monkeypatch, tmp_path, capsys):
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from="logs/exp_001"))
    before = Mixture([Dataset("a.jsonl", [], "1", name="a")], cfg)
    now = Mixture([Dataset("b.jsonl", [], "2", name="b")], cfg)
    cursor = before.start() | {"position": 56}
    saved = job.RunState(cursor, before.fingerprints, step=7, total_valid_tokens=99)
    monkeypatch.setattr(restore, "load", lambda *_, **__: asdict(saved))

    def counters(cfg, mixture):
        return restored(cfg, mixture, tmp_path)

    assert counters(cfg, before) == saved
    with pytest.raises(config.ConfigError, match=r"'a' .*logs/exp_001.*checkpointing\.allow_changes=true"):
        counters(cfg, now)
    allowed = replace(cfg, checkpointing=replace(cfg.checkpointing, allow_changes=True))
    assert counters(allowed, before) == saved
    capsys.readouterr()
    state = counters(allowed, now)
    assert state == replace(saved, cursor=now.start(), fingerprints=now.fingerprints)
    assert capsys.readouterr().out.startswith("WARNING: the data have changed")


def test_a_new_run_starts_at_nothing_and_not_over_anothers_checkpoints(tmp_path):
    cfg = config.Config()
    mixture = Mixture([Dataset("a.jsonl", [], "1", name="a")], cfg)
    state = restored(cfg, mixture, tmp_path)
    assert state == job.RunState(mixture.start(), mixture.fingerprints) and state.step == 0
    (tmp_path / "step_000010").mkdir()
    with pytest.raises(config.ConfigError, match="holds checkpoints of another run: choose another checkpoint_dir"):
        restored(cfg, mixture, tmp_path)


class Saver:
    """saved: the newest step of a checkpoint, as that of run/checkpoint.py."""

    def __init__(self, enabled=True):
        self.cfg = config.CheckpointingConfig(enabled=enabled, save_period=4)
        self.saved = None
        self.saved_steps = []

    def save(self, step, *_):
        self.saved = step
        self.saved_steps.append(step)

    def finish(self):
        pass


def run_after(
    step, *, num_steps=10, num_bad_steps=0, saver=None, told_to_stop=False, num_problems=10**9, position=0, **grpo
):
    """A run between two steps."""
    saver = saver or Saver()
    cfg = config.Config(grpo=config.GRPOConfig(**grpo), checkpointing=saver.cfg)
    rows = SimpleNamespace(train=SimpleNamespace(num_problems=num_problems, saved_selections=dict))
    state = job.RunState({"position": position}, {}, step=step, num_bad_steps=num_bad_steps)
    values = dict.fromkeys(job.Run.__dataclass_fields__)
    values |= {"cfg": cfg, "inputs": rows, "state": state, "saver": saver, "num_steps": num_steps, "metrics": {}}
    values |= {"told_to_stop": told_to_stop, "folder": "logs/exp_001", "timer": Timers(lambda phase: None)}
    return job.Run(**values)


def test_data_ends_where_a_whole_step_does_not_fit():
    def is_finished(position, **grpo):
        options = {"num_prompts_per_step": 4} | grpo
        return run_after(5, num_problems=50, position=position, **options).is_finished

    spare = {"max_num_epochs": 2, "use_dynamic_sampling": True, "batch_multiplier": 1.5}
    assert [is_finished(position, **spare) for position in (0, 94, 95, 100)] == [False, False, True, True]
    assert [is_finished(4 * step) for step in (11, 12)] == [False, True]  # as without it: steps = 50 // 4
    assert run_after(10).is_finished and not run_after(9).is_finished


def test_when_validation_is_due():
    def due(step, **options):
        return steps.validation_is_due(run_after(step, **options))

    assert [step for step in range(11) if due(step, val_period=4)] == [4, 8]
    assert [step for step in range(11) if due(step, val_period=4, val_at_start=True, val_at_end=True)] == [0, 4, 8, 10]
    assert [step for step in range(11) if due(step, val_period=0, val_at_end=True)] == [10]
    assert not due(4, val_period=4, told_to_stop=True)


def test_when_a_checkpoint_is_due():
    saver = Saver()
    for step in range(1, 11):
        steps.save_if_due(run_after(step, saver=saver))
    assert saver.saved_steps == [4, 8, 10]
    steps.save_if_due(run_after(8, saver=(bad := Saver()), num_bad_steps=1))
    steps.save_if_due(run_after(8, saver=(off := Saver(enabled=False))))
    assert bad.saved_steps == off.saved_steps == []


def test_what_a_check_stops_is_saved_and_exported_between_steps_alone(monkeypatch, tmp_path):
    """volcengine/verl#953. With weights that may be half an update further nothing is written."""
    exported = []
    monkeypatch.setattr(steps, "export", lambda *_: exported.append(True))

    def stopped(step=3, amid=False, cursor=None, **options):
        run = replace(run_after(step, **options), ranks=ALONE, watchdog=SimpleNamespace(enter=lambda phase: None))
        stop = StopRun("why", cursor)
        if amid:
            with run.timer("policy_training"):
                pass
        return run, str(steps.stop_early(run, stop))

    run, said = stopped(cursor={"position": 8})
    assert run.saver.saved_steps == [3] and run.state.cursor == {"position": 8} and exported == [True]
    assert said == "why. Step 3: saved, exported; continue with checkpointing.resume_from=logs/exp_001"
    saver = Saver()
    saver.saved, saver.update = 3, lambda state: saver.saved_steps.append(state["cursor"])
    stopped(saver=saver, cursor={"position": 9})
    assert saver.saved_steps == [{"position": 9}], "the same weights: their checkpoint gets the cursor"
    _, said = stopped(saver=Saver(enabled=False))
    assert "not saved, exported" in said and len(exported) == 3
    for options in ({"step": 0}, {"amid": True}):
        run, said = stopped(**options)
        assert said == "why" and run.saver.saved_steps == [] and len(exported) == 3

    def refuse(*_):
        raise OSError(28, "No space left on device", "hf_model")

    monkeypatch.setattr(steps, "export", refuse)
    assert "saved, not exported (hf_model: the disk is full)" in stopped()[1]


def test_a_run_told_to_stop_says_whether_its_last_step_is_saved():
    saver = Saver()
    reason = steps.save_early(run_after(3, saver=saver))
    assert isinstance(reason, Saved) and saver.saved_steps == [3]
    assert str(reason) == "stopped on request, after step 3; continue with checkpointing.resume_from=logs/exp_001"
    for options, why in (
        ({"saver": Saver(enabled=False)}, "checkpointing.enabled=false"),
        ({"num_bad_steps": 1}, "it was a bad step"),
    ):
        reason = steps.save_early(run_after(3, **options))
        assert isinstance(reason, StopRun) and str(reason).endswith(f"step 3, which is not saved ({why})")
