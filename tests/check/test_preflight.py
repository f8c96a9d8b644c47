"""Model against config, and how much of the data is looked at: checked without torch, on folders made by hand."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_folders import QWEN2

import config
from base.check import preflight, rules, summary
from base.check.preflight import check
from base.hf.folder import from_hf
from base.inputs import reader, run_inputs
from base.inputs.run_inputs import check_fits, check_reward_names, read_inputs, start_environments
from config import ConfigError

ROOT = Path(__file__).resolve().parents[2]

SIZES = dict(hidden_size=96, intermediate_size=96, num_attention_heads=12, vocab_size=100, max_position_embeddings=64)
MODEL = from_hf({**QWEN2, "model_type": "llama", **SIZES})  # 2 key heads


def fits(tmp_path, model=MODEL, *, length=64, tensor=1, vocab_size=100, stop_token_ids=None):
    vllm_cfg = config.VllmConfig(tensor_parallel_size=tensor)
    generation = config.GenerationConfig(vllm_cfg=vllm_cfg, stop_token_ids=stop_token_ids)
    policy = config.PolicyConfig(max_total_sequence_length=length, generation=generation)
    try:
        check_fits(config.Config(policy=policy), tmp_path, model, SimpleNamespace(vocab_size=vocab_size))
    except ConfigError as error:
        return str(error)
    return "fits"


def test_length_and_vocabulary_against_the_model(tmp_path):
    assert fits(tmp_path) == fits(tmp_path, vocab_size=80) == "fits"
    assert fits(tmp_path, replace(MODEL, max_position_embeddings=None), length=10**6) == "fits"
    message = fits(tmp_path, length=65)
    assert message.startswith("policy.max_total_sequence_length=65 is more than the model's max_position_embeddings=64")
    assert message.endswith("use 64 or less")
    assert "tokenizer.json has ids up to 100, config.json vocab_size=100" in fits(tmp_path, vocab_size=101)


def test_tensor_parallel_sizes_are_those_that_vllm_takes(tmp_path):
    """vLLM: ranks divide the query heads, and divide the key heads or are a multiple of them."""

    def taken(model):
        return [tensor for tensor in range(1, 13) if fits(tmp_path, model, tensor=tensor) == "fits"]

    assert taken(MODEL) == [1, 2, 4, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=6)) == [1, 2, 3, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=1)) == [1, 2, 3, 4, 6, 12]
    assert taken(replace(MODEL, num_attention_heads=4)) == [1, 2, 4]
    assert taken(replace(MODEL, intermediate_size=98)) == [1, 2]
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    assert fits(tmp_path, tensor=5).startswith(f"{key}=5 does not divide the model's num_attention_heads=12")
    assert fits(tmp_path, tensor=3).startswith(f"{key}=3 does not divide the model's num_key_value_heads=2")


# ------------------------------------------------------------------------------------------ gdpo's rewards

COUNTDOWN = "examples.envs.countdown:Countdown"
GDPO = """
grpo: {num_prompts_per_step: 2, max_num_steps: 1, val_period: 0, adv_estimator: {name: gdpo}}
policy:
  model_name: %s
  max_total_sequence_length: 32
  generation: {max_new_tokens: 8}
data:
  train:
    - {data_path: countdown.jsonl, output_key: answer, env_name: "examples.envs.countdown:Countdown"}
    - {data_path: countdown.jsonl, output_key: answer, env_name: "examples.envs.countdown:Countdown", name: again}
  validation: {data_path: countdown.jsonl, output_key: answer, env_name: exact, name: held_out}
"""


def test_check_names_the_environment_that_lacks_a_reward_for_gdpo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    starter = Path(__file__).resolve().parents[2] / "examples/arithmetic/starter"
    Path("run.yaml").write_text(GDPO % starter)
    Path("countdown.jsonl").write_text(json.dumps({"input": "1+2=", "answer": "3", "nums": [1, 2]}) + "\n")
    cfg = reader.load("run.yaml", [])
    assert set(read_inputs(cfg).environments) == {COUNTDOWN, "exact"}, "validation's environments need no parts"
    mixed = replace(
        cfg, data=replace(cfg.data, train=(cfg.data.train[0], replace(cfg.data.train[1], env_name="exact")))
    )
    with pytest.raises(ConfigError, match=r"name=gdpo needs .*'exact': \[\].*grpo.adv_estimator.name=grpo"):
        read_inputs(mixed)
    assert read_inputs(replace(mixed, grpo=replace(mixed.grpo, adv_estimator=config.AdvEstimatorConfig())))


def test_reading_starts_no_process():
    """Who needs the graders starts them."""

    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    before = children()
    inputs = read_inputs(reader.load(ROOT / "configs/three_tasks.yaml", ["env.math.num_workers=1"]))
    assert children() == before
    start_environments(inputs)
    assert len(children()) > len(before)
    for environment in inputs.environments.values():
        environment.close()


@pytest.mark.parametrize(
    ("declared", "weights", "message"),
    [
        ({"a": ("x", "y"), "b": ("y", "x")}, (1.0, 2.0), None),
        ({"a": ("x", "y"), "b": ("y",)}, None, r"the same in every .*'a': \['x', 'y'\], 'b': \['y'\].*StepResult"),
        ({"a": ("x",), "b": ("x",)}, None, r"at least two .*'a': \['x'\]"),
        ({"a": ()}, None, r"at least two .*'a': \[\]"),
        ({"a": ("x", "y")}, (1.0,), r"\['x', 'y'\].*reward_weights .*\(now 1\)"),
        ({"a": None}, None, r"'a': \[\]"),
    ],
)
def test_gdpo_needs_the_same_two_rewards_of_each_environment(declared, weights, message):
    environments = {
        name: SimpleNamespace() if names is None else SimpleNamespace(reward_names=names)
        for name, names in declared.items()
    }
    if message is None:
        check_reward_names(environments, weights)
    else:
        with pytest.raises(ConfigError, match=message):
            check_reward_names(environments, weights)


def test_stop_tokens_are_ids_of_the_tokenizer(tmp_path):
    assert fits(tmp_path, vocab_size=90, stop_token_ids=(0, 89)) == "fits"
    message = fits(tmp_path, vocab_size=90, stop_token_ids=(0, 90))
    assert message.startswith("policy.generation.stop_token_ids: 90 is not a token id") and "ids up to 89" in message


def without_plan(summary):
    """The lines before the memory plan, which tests/plan/test_memory_plan.py holds, without ranks and disk."""
    return [line for line in summary.split("\nmemory ")[0].splitlines() if not line.startswith(("ranks ", "disk "))]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Loads a recipe that ships, with the starter model; from the repository, as paths in recipes are."""
    monkeypatch.chdir(ROOT)

    def load(name, *words):
        words = ["policy.model_name=examples/arithmetic/starter", f"logger.log_dir={tmp_path}", *words]
        cfg = reader.load(f"configs/{name}", words)
        rules.check_config(cfg, 8)
        return cfg

    return load


def test_check_says_how_much_it_looked_at(recipe, tmp_path, monkeypatch):
    for module in (preflight, summary):
        monkeypatch.setattr(module, "MAX_ROWS", 10)
    file = tmp_path / "rows.jsonl"
    rows = [{"input": f"{i}+1=", "answer": str(i + 1)} for i in range(100)]
    rows[2]["input"] = "x" * 2000
    rows[98]["answer"] = "no number"  # seed 42 does not draw it
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[3:13]))
    cfg = recipe("smoke.yaml", f"data.train.data_path={file}", f"data.validation.data_path={held_out}")
    assert without_plan(check(cfg))[1:] == [
        f"train      {file}, graded by exact: at most 99 prompts, 10 rows checked (the first 5, the others at random; "
        f"--all: every row), 1 left out: over 24 tokens (first: {file}:3)",
        f"validation {held_out}, graded by exact: 10 prompts",
        "first      row 0 of rows: '<|user|>0+1=<|end|><|assistant|>', expected answer '1'",
        "steps      120, each with 16 prompts x 16 samples",
    ]
    for read in (lambda: check(cfg, all_rows=True), lambda: read_inputs(cfg)):
        with pytest.raises(ConfigError, match=r"rows\.jsonl:99: answer 'no number' is not one plain number"):
            read()


@pytest.mark.parametrize("size", [200, 8])
def test_the_first_prompt_is_what_training_draws_first(recipe, tmp_path, monkeypatch, size):
    """Of several sets, with weights, after some steps; line ends and escapes stay in one printable line."""
    monkeypatch.setattr(summary, "SHOWN_CHARS", size)
    rows = {"a": ["1+1=\n\x1b[2J", "5+5="], "b": ["2+2=", "3+3="]}
    for name, texts in rows.items():
        lines = (json.dumps({"input": text, "answer": "9" * 300}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    cfg = recipe("smoke.yaml", "data.shuffle=false")
    sets = [config.DatasetConfig(data_path=f"{tmp_path}/{name}.jsonl", weight=ord(name) - 96) for name in rows]
    cfg = replace(cfg, data=replace(cfg.data, train=tuple(sets)))
    inputs = read_inputs(cfg)
    cursor = inputs.train.start()
    for _ in range(6):
        (problem,), after = inputs.train.draw(cursor, 1)
        *_, line = summary.data_lines(cfg, inputs, cursor)
        text = f"<|user|>{problem.messages[0]['content']}<|end|><|assistant|>"
        text = repr(text if size == 200 else "<|user|> ... istant|>")
        nines = repr(f"{'9' * (size // 4)} ... {'9' * (size // 4)}")
        assert line == f"first      row {problem.row_id} of {problem.dataset}: {text}, expected answer {nines}"
        assert line.isprintable()
        cursor = after


def test_a_warmup_of_more_than_a_third_of_the_run_is_told():
    def told(warmup_steps, num_steps, **keys):
        scheduler = config.SchedulerConfig(warmup_steps=warmup_steps, **keys)
        return summary.notes(config.Config(policy=config.PolicyConfig(scheduler=scheduler)), MODEL, num_steps)

    (note,) = told(50, 60)
    assert "policy.scheduler.warmup_steps=50" in note and "60 steps" in note
    silent = [(20, 60), (0, 1), (1, 3), (50, 150), (50, 10**6)]
    assert not any(told(*numbers) for numbers in silent)
    assert all(told(*numbers) for numbers in [(21, 60), (1, 2), (50, 149), (1, 1)])
    assert not told(50, 60, warmup_start_factor=1.0)  # the rate is the whole one from the first step
    for num_steps in range(1, 100):  # who does as told does not hear of it again, once a third is left
        assert told(num_steps // 3 + 1, num_steps) and not told(num_steps // 3, num_steps)


def test_trials4_f9_epochs_that_end_a_run_before_its_steps_are_told():
    """24 rows and 8 prompts a step are 3 steps of the 10 asked for."""

    def told(num_steps, **grpo):
        return summary.notes(config.Config(grpo=config.GRPOConfig(**grpo)), MODEL, num_steps)

    (note,) = [note for note in told(3, max_num_steps=10) if "max_num_epochs" in note]
    assert "max_num_epochs=1 ends the run after 3 steps" in note and "max_num_steps=10" in note
    for num_steps, keys in ((10, {"max_num_steps": 10}), (3, {}), (3, {"max_num_epochs": 3})):
        assert not any("max_num_epochs" in note for note in told(num_steps, **keys))


def test_a_learning_rate_below_published_ones_for_lora_is_told():
    """The rates of tinker-cookbook 0.6.1; its get_lr gives 4.7e-4 for Qwen3-8B and 2.9e-4 for Llama-3.1-8B."""

    def told(lr, model=MODEL, **lora):
        kwargs = config.OptimizerKwargs(lr=lr)
        tensors = config.DTensorConfig(lora_cfg=config.LoRAConfig(**{"enabled": True} | lora))
        policy = config.PolicyConfig(optimizer=config.OptimizerConfig(kwargs=kwargs), dtensor_cfg=tensors)
        return summary.notes(config.Config(policy=policy), model, 1000)

    for kind, rate in (("qwen3", "4.7e-04"), ("llama", "2.9e-04")):
        (note,) = told(5e-6, replace(MODEL, hidden_size=4096, hf=MODEL.hf | {"model_type": kind}))
        assert "policy.optimizer.kwargs.lr=5e-06" in note and rate in note and "1e-05 to 4e-05" in note
    (note,) = told(9e-6, replace(MODEL, hf=MODEL.hf | {"model_type": "gemma3_text"}))
    assert "formula" not in note
    assert told(1e-5, alpha=16.0) and not told(1e-5, alpha=64.0) and not told(1e-5) and not told(6e-6, alpha=64.0)
    assert not told(1e-7, enabled=False)


def test_r7_a_turns_end_that_ends_no_reply_is_told(tmp_path, monkeypatch):
    """Qwen3#927: base models end a reply with another token than their template's; every reply is then cut off."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "arithmetic" / "starter", folder)

    def notes(*words, **files):
        for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
            given = json.loads((ROOT / "examples" / "arithmetic" / "starter" / name).read_text())
            (folder / name).write_text(json.dumps(given | files.get(name.removesuffix(".json"), {})))
        words = ["configs/smoke.yaml", f"policy.model_name={folder}", *words]
        lines = preflight.check(preflight.parse_command_line(words, "usage")).splitlines()
        return [line.removeprefix("note").strip() for line in lines if line.startswith("note") and "template" in line]

    other = {"generation_config": {"eos_token_id": 256}, "config": {"eos_token_id": 256}}
    other["tokenizer_config"] = {"eos_token": "<|pad|>"}
    assert notes() == []
    (note,) = notes(**other)
    assert "'<|end|>' (257)" in note and "policy.generation.stop_token_ids=[257, 256]" in note
    assert notes("policy.generation.stop_token_ids=[257, 256]", **other) == []
    assert notes("policy.generation.stop_token_ids=[256]") != []
    assert notes(**other | {"config": {"eos_token_id": [256, 257]}}) == []
    for template, is_told in (
        ("{% for m in messages %}{{ m.content }}\n {{ '<|end|>' if m.role == 'assistant' }}{% endfor %}", True),
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", False),  # nothing ends a turn
        ("{{ messages[0].content }}", False),
        # The last turn is left open: vLLM's template for ChatML
        ("{% for m in messages %}<|user|>{{ m.content }}{{ '<|end|>' if not loop.last }}{% endfor %}", True),
        ("{% for m in messages %}<|user|>{{ m.content }}{{ '<|user|>' if not loop.last }}{% endfor %}", False),
        (
            "{{ raise_exception('no') if messages[-1].role == 'assistant' }}"
            "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
            True,
        ),
        ("{{ raise_exception('no') if messages | length == 2 }}{{ messages[0].content }}", False),
        # A reply is always opened
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>", False),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>\n", False),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>", True),
        ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", True),  # one mark between all messages
        (  # a system message of the template's own
            "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|pad|>s<|end|>{% endif %}"
            "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
            True,
        ),
    ):
        found = other | {"tokenizer_config": {"eos_token": "<|pad|>", "chat_template": template}}
        assert bool(notes(**found)) == is_told


def test_tools_that_the_template_leaves_out_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    words = [
        "configs/smoke.yaml",
        "grpo.num_prompts_per_step=2",
        "policy.max_total_sequence_length=512",
        f"data.train.data_path={tmp_path}/rows.jsonl",
    ]
    asked = [{"role": "user", "content": "1+1="}]
    by_system = [{"role": "system", "content": "s"}, *asked]
    bare_talk = "{{ messages[0].content }}<|end|>"
    shown = "{{ tools }}" + bare_talk
    first_only = "{{ tools[0] if tools }}" + bare_talk
    named = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + bare_talk
    system_only = "{{ tools if messages[0].role == 'system' }}" + bare_talk
    wrapped, bare, none = {"tools": tools}, {"tools": [tools[0]["function"]]}, {"tools": None}
    for template, rows, told_at in (
        (None, [(asked, wrapped), (asked, wrapped)], 1),
        (shown, [(asked, wrapped), (asked, wrapped)], None),
        (None, [(asked, none), (asked, wrapped)], 2),
        (shown, [(asked, none), (by_system, bare)], None),
        (system_only, [(by_system, wrapped), (by_system, wrapped), (asked, wrapped)], 3),
        (system_only, [(by_system, wrapped), (asked, none)], None),
        (named, [(asked, bare), (by_system, bare)], None),
        (named, [(asked, bare), (asked, wrapped)], 2),  # "[]" says no name
        (first_only, [(asked, wrapped), (asked, {"tools": [{"name": "mul"}, *tools]})], 2),
        (named, [(asked, {"tools": [*tools, {"name": "mul", "parameters": {}}]}), (asked, none)], 1),
    ):
        lines = [json.dumps({"messages": messages, "answer": "2"} | more) for messages, more in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        more = [f"policy.tokenizer.chat_template={json.dumps(template)}"] if template else []
        found = preflight.check(preflight.parse_command_line([*words, *more], "usage"))
        told = [line for line in found.splitlines() if "leaves out the tools" in line]
        assert len(told) == (told_at is not None), (template, rows, found)
        assert not told or f"rows.jsonl:{told_at}:" in told[0]


def test_all_goes_with_check(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert preflight.parse_command_line(["--check", "--all", "configs/smoke.yaml"], "usage").data.train
    for words in (["--all", "configs/smoke.yaml"], ["configs/smoke.yaml", "--all"], ["--check"], []):
        with pytest.raises(ConfigError):
            preflight.parse_command_line(words, "usage")


@pytest.mark.parametrize("edit", [None, "exchanged", "one more", "no tokenizer", "no folder", "few positions"])
def test_a_teacher_has_the_policys_vocabulary(tmp_path, edit):
    """marin#5853: the KL compares the probabilities of ids."""
    starter, teacher = ROOT / "examples" / "arithmetic" / "starter", tmp_path / "teacher"
    shutil.copytree(starter, teacher)
    words = json.loads((teacher / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    if edit == "exchanged":
        first, second, *_ = vocab
        vocab[first], vocab[second] = vocab[second], vocab[first]
    elif edit == "one more":
        vocab["1234"] = 1 + max(*vocab.values(), *(token["id"] for token in words["added_tokens"]))
    (teacher / "tokenizer.json").write_text(json.dumps(words))
    if edit == "few positions":
        options = json.loads((teacher / "config.json").read_text())
        (teacher / "config.json").write_text(json.dumps(options | {"max_position_embeddings": 16}))
    elif edit == "no tokenizer":
        (teacher / "tokenizer.json").unlink()
    elif edit == "no folder":
        shutil.rmtree(teacher)
    words = [f"policy.model_name={starter}", f"policy.reference_model_name={teacher}", f"logger.log_dir={tmp_path}"]
    cfg = reader.load("configs/smoke.yaml", [*words, "loss_fn.reference_policy_kl_penalty=1"])
    if edit is None:
        assert read_inputs(cfg, max_rows=20).reference_model[0] == teacher
        return
    with pytest.raises(ConfigError, match=str(teacher)):
        read_inputs(cfg, max_rows=20)


def test_a_tokenizer_of_its_own(tmp_path):
    starter, key = ROOT / "examples/arithmetic/starter", "policy.tokenizer.name"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((starter / name).read_bytes())
    template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "1+2"}]

    def read(name):
        return run_inputs.read_tokenizer(config.TokenizerConfig(name=name), key, starter)

    assert read(str(tmp_path)).file == tmp_path / "tokenizer.json" and read(None).file == starter / "tokenizer.json"
    assert read(str(tmp_path)).render(chat) != read(None).render(chat) == read(str(starter)).render(chat)
    with pytest.raises(ConfigError, match=rf"^{key}: no folder '{tmp_path}/missing'"):
        read(f"{tmp_path}/missing")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "overrides", "ranks"),
    [
        ({}, [], 2),  # the starter
        ({"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49_152}, [], 1),
        ({"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49_152}, ["tensor_parallel_size=2"], 2),
    ],
)
def test_on_a_cpu_the_model_decides_how_many_ranks_start(monkeypatch, capsys, sizes, overrides, ranks):
    monkeypatch.setenv("GRPO_DEVICE", "cpu")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shapes = replace(run_inputs.read_model_config(ROOT / "examples/arithmetic/starter"), **sizes)
    cfg = reader.load(
        str(ROOT / "configs/smoke.yaml"), [f"policy.generation.vllm_cfg.{override}" for override in overrides]
    )
    assert preflight.ranks_on_cpu(cfg, shapes)[0] == ranks
    if not sizes:
        monkeypatch.chdir(ROOT)
        assert f"ranks      {ranks} " in check(cfg)
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert "ranks  " not in check(cfg)


# ------------------------------------------------------------------------------------------ what a user wrote is called

MODULE = """
from envs import Environment, StepResult
CALLS = []

def right(completions, answer, level, **columns):
    CALLS.append((completions, answer, level, columns))
    return [float(gold in text) for text, gold in zip(completions, answer)]

def raises(completions, answer):
    return [1 / len(text[9999:]) for text in completions]

def one(completions):
    return [1.0]

def text(completions):
    return "ab"

class Rude(Environment):
    def step(self, turns):
        return [turn.fields["absent"] for turn in turns]

class Tested(Rude):
    self_tests = (("1", "1", "ok"),)
    def step(self, turns):
        CALLS.append(turns)
        return [StepResult(1.0, "ok") for _ in turns]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("right", None),
        ("Tested", None),
        ("raises", ["ZeroDivisionError", "mine.py:10", "row 0 of rows"]),
        ("one", ["1 rewards for 2 completions"]),
        ("text", ["raised TypeError"]),
        ("Rude", ["KeyError: 'absent'", "mine.py:20", "row 0 of rows"]),
    ],
)
def test_what_a_user_wrote_is_called_before_a_run(name, words, recipe, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input": "1+1=", "answer": "2", "level": 3}) + "\n" for _ in range(8))
    )
    words_of = [f"data.train.data_path={tmp_path}/rows.jsonl", f"data.train.env_name=mine:{name}"]
    cfg = recipe("smoke.yaml", *words_of, "grpo.num_prompts_per_step=8")
    if words is None:
        check(cfg)
        call = sys.modules["mine"].CALLS[-1]  # a self-test may have been one before
        if name == "right":
            assert call[1:3] == (["2", "2"], [3, 3]) and len(call[0]) == 2 and "2" in call[0][0] not in call[0][1]
    else:
        with pytest.raises(ConfigError) as error:
            check(cfg)
        assert all(word in str(error.value) for word in [*words, f"mine:{name}"]), error.value


def test_a_plan_without_weights(recipe, tmp_path, monkeypatch):
    """`--check --gpu_memory` by hand plans from config.json and tokenizer alone; a run, and its check, refuse."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples/arithmetic/starter" / name, folder)
    cfg = recipe("smoke.yaml", f"policy.model_name={folder}")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    text = check(cfg, gpu_bytes=80 * 2**30)
    assert "on each of 8 GPUs" in text and "model.safetensors" in text and "\nmemory " in text
    index = {"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(4)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-0.safetensors and 3 more files" in check(cfg, gpu_bytes=80 * 2**30)
    shutil.copy(ROOT / "examples/arithmetic/starter/model.safetensors", folder)
    assert "\nmissing " not in check(cfg, gpu_bytes=80 * 2**30)
    (folder / "model.safetensors").unlink()
    for world, gpu_bytes in (("1", 80 * 2**30), (None, None)):
        if world:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
        with pytest.raises(ConfigError, match="safetensors"):
            check(cfg, gpu_bytes=gpu_bytes)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "9" * 30, "\u0661"])
def test_a_number_of_ranks_that_is_none(monkeypatch, capsys, name, text):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(name, text)
    assert preflight.answer(["--check", str(ROOT / "configs/smoke.yaml")], "") == 2
    assert f"{name}=" in capsys.readouterr().err


LOOPS = """
from envs import Environment, StepResult

class Loops(Environment):
    self_tests = (("no", "1", "wrong"),)

    def step(self, turns):
        again = ({"role": "user", "content": "again"},)
        return [StepResult(0.0, "wrong", done=False, observation=again) for _ in turns]
"""


def test_another_turn_that_cannot_come_is_noted(recipe, tmp_path, monkeypatch):
    """Prompts of 9 tokens and replies of 8: 18 tokens leave a turn of the user no room, 32 do."""
    (tmp_path / "loops.py").write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "12+34=", "answer": "46"}) + "\n")

    def noted(name, *words):
        data = [f"data.train.data_path={tmp_path}/rows.jsonl", f"data.train.env_name={name}", "grpo.max_num_epochs=16"]
        lines = check(recipe("smoke.yaml", *data, *words)).splitlines()
        return [line for line in lines if line.startswith("note ") and "loops:Loops" in line]

    (line,) = noted("loops:Loops")
    assert "grpo.max_rollout_turns=1" in line
    (line,) = noted("loops:Loops", "grpo.max_rollout_turns=2", "policy.max_total_sequence_length=18")
    assert "policy.max_total_sequence_length=18" in line
    assert not noted("loops:Loops", "grpo.max_rollout_turns=2", "policy.max_total_sequence_length=64")
    assert not noted("exact")
