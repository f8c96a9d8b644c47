"""Keys of validation, shaping and scaling: sets in a list, overrides of them, settings that contradict each other."""

from check import reader, rules

TRAIN = ["data.train.data_path=train.jsonl"]


def load(tmp_path, text, *overrides, parent=None):
    if parent is not None:
        (tmp_path / "parent.yaml").write_text(parent)
        text = "defaults: parent.yaml\n" + text
    (tmp_path / "run.yaml").write_text(text)
    return reader.load(tmp_path / "run.yaml", [*TRAIN, *overrides])


def paths(cfg):
    return [dataset.data_path for dataset in cfg.data.validation]


TWO = "data: {validation: [{data_path: a/x.jsonl, env_name: e}, {data_path: b.jsonl, name: hard}]}"


def test_validation_is_one_mapping_or_a_list(tmp_path):
    assert paths(load(tmp_path, "data: {validation: {data_path: a.jsonl}}")) == ["a.jsonl"]
    cfg = load(tmp_path, TWO)
    assert paths(cfg) == ["a/x.jsonl", "b.jsonl"] and [d.set_name for d in cfg.data.validation] == ["x", "hard"]
    assert cfg.data.validation[0].env_name == "e" and cfg.data.validation[1].env_name is None
    assert load(tmp_path, reader.to_yaml(cfg)) == cfg


def test_overrides_of_a_list(tmp_path):
    assert paths(load(tmp_path, TWO, "data.validation.1.data_path=c")) == ["a/x.jsonl", "c"]
    assert paths(load(tmp_path, TWO, "data.validation.data_path=c")) == ["c", "b.jsonl"]
    assert paths(load(tmp_path, "data: {validation: [{data_path: z}]}", parent=TWO)) == ["z"]  # a list is one value
    assert load(tmp_path, "data: {validation: [{data_path: z}]}", parent=TWO).data.validation[0].env_name is None
    assert paths(load(tmp_path, "data: {validation: {data_path: z}}", parent=TWO)) == ["z", "b.jsonl"]


ONE = "data: {validation: {data_path: v.jsonl}}"


def test_nemo_rls_yaml_with_shaping_off_is_accepted(tmp_path):
    """Its files set keys of what is off, max_response_length to the whole sequence among them."""
    off = ["grpo.reward_shaping.max_response_length=512", "grpo.reward_scaling.source_max=0"]
    rules.check_config(load(tmp_path, ONE, *off), 1)
