"""Parts of the loop that no run of a test reaches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import config
from system.ranks import Ranks


def test_other_data_are_read_from_their_start_where_that_is_allowed(monkeypatch, tmp_path, capsys):
    import grpo
    from dataset.mixing import Mixture
    from dataset.problems import Dataset

    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from="logs/exp_001"))
    before = Mixture([Dataset("a.jsonl", [], 0, "1", name="a")], cfg)
    now = Mixture([Dataset("b.jsonl", [], 0, "2", name="b")], cfg)
    saved = {"step": 7, "cursor": before.start() | {"position": 56}, "fingerprints": before.fingerprints}
    saved |= {"consumed_samples": 56, "total_valid_tokens": 99}
    monkeypatch.setattr(grpo.checkpoint, "load", lambda *_, **__: dict(saved))

    def restore(cfg, mixture):
        ranks = Ranks(rank=0, world_size=1, local_rank=0, tp_size=1)
        return grpo.restore(cfg, SimpleNamespace(train=mixture), None, None, {}, ranks, tmp_path)

    assert restore(cfg, before) == saved
    with pytest.raises(config.ConfigError, match=r"'a' .* is not as in .* checkpointing\.allow_changes=true"):
        restore(cfg, now)
    allowed = replace(cfg, checkpointing=replace(cfg.checkpointing, allow_changes=True))
    assert restore(allowed, before) == saved
    state = restore(allowed, now)
    assert state == saved | {"cursor": now.start(), "fingerprints": now.fingerprints, "consumed_samples": 0}
    assert capsys.readouterr().out.startswith("WARNING: other data than before")
