"""Rows to ids to packs: against transformers (templates), numpy (order) and naive loops (packs)."""

import json
from itertools import chain

import numpy as np
import pytest
import tokenizers
from dist_case import make_samples
from tokenizers import decoders, models, pre_tokenizers, processors

import data
from config import DatasetConfig

CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|user|>' + messages[0].content + '<|end|>\\n' }}
{%- else %}
    {{- 'Be brief.\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role != 'system' %}
{{ bos_token }}{{ message.role | upper }}: {{ message['content'] | trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
NAMESPACE = """{%- set ns = namespace(last=-1, seen=0) -%}
{%- for message in messages[::-1] -%}
  {%- set index = (messages | length - 1) - loop.index0 -%}
  {%- if message.role == 'user' and ns.last < 0 -%}{%- set ns.last = index -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if loop.index0 == ns.last -%}<|user|>{%- endif -%}
  {{- {'text': m.content.split('</x>')[-1].lstrip('\\n'), 'role': m.role} | tojson -}}
  {%- if tools %} tools{% endif -%}
  {%- if not loop.last %}{{ "\\n" }}{% endif %}
{%- endfor -%}
"""
REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
)
CONVERSATIONS = [
    [{"role": "user", "content": " 1+1 =\n"}],
    [
        {"role": "system", "content": 'Füge <b>"hinzu"</b>.\n'},
        {"role": "user", "content": "日本 </x>\n\n🧮 'q' & <|end|>"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def write_tokenizer(folder, *, vocab=None, **settings):
    """A byte-level tokenizer.json (ids 0..255, then the specials), and tokenizer_config.json of `settings`."""
    vocab = vocab or {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} | settings))
    return backend


@pytest.fixture
def tokenizer(tmp_path):
    """No template: the prompt is the messages' text, an id per byte."""
    write_tokenizer(tmp_path)
    return data.Tokenizer(tmp_path)


# ------------------------------------------------------------------------------------------------------- tokenizer


def test_vocab_size_is_one_past_the_largest_id(tmp_path):
    backend = write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')  # padded: not the tokenizer's
    assert data.Tokenizer(tmp_path).vocab_size == 259 == backend.token_to_id("<|end|>") + 1
    backend.add_tokens(["<more>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert data.Tokenizer(tmp_path).vocab_size == 260
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    write_tokenizer(tmp_path, vocab=alphabet | {"aa": 400})  # ids 256..399 are not those of any token
    assert data.Tokenizer(tmp_path).vocab_size == 401


def test_eos_ids_of_every_source(tmp_path):
    def ids(generation=None, model=None, token=None):
        for name, value in (("generation_config.json", generation), ("config.json", model)):
            (tmp_path / name).unlink(missing_ok=True)
            if value is not None:
                (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
        write_tokenizer(tmp_path, eos_token=token)
        return data.Tokenizer(tmp_path).eos_token_ids

    assert ids(generation=[7, 3]) == [3, 7]
    assert ids(generation=0) == [0]
    assert ids(model=5) == [5]
    assert ids(token="<|end|>") == ids(token={"content": "<|end|>"}) == [258]
    assert ids(generation=[258, 3], model=5, token="<|end|>") == [3, 5, 258]
    with pytest.raises(data.DataError, match=r"no eos_token_id in generation_config\.json, config\.json or"):
        ids(token="<not a token>")
    for value in ([None], [3, "4"], -1, 2.0, True, "258", {"id": 3}):
        for source in ("generation", "model"):
            with pytest.raises(data.DataError, match=r"config\.json: eos_token_id: expected an id or a list of"):
                ids(**{source: value})


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "pad_token", "unk_token"])
@pytest.mark.parametrize("value", [{"token": "<|end|>"}, {"content": 5}, ["<|end|>"], 7])
def test_special_tokens_that_are_no_text(tmp_path, key, value):
    write_tokenizer(tmp_path, **{key: value})
    with pytest.raises(data.DataError) as error:
        data.Tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/tokenizer_config.json: {key}: expected text or {{content: text}}")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ([{"template": "x"}], "chat_template: a list must be of {name, template}"),
        ([{"name": "default"}], "chat_template: a list must be of {name, template}"),
        (["x"], "chat_template: a list must be of {name, template}"),
        ([{"name": "default", "template": 5}], "chat_template: expected text, got int"),
        (5, "chat_template: expected text, got int"),
        ({"default": "x"}, "chat_template: expected text, got dict"),
    ],
)
def test_templates_that_are_no_text(tmp_path, template, problem):
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(data.DataError) as error:
        data.Tokenizer(tmp_path)
    assert str(error.value) == f"{tmp_path}/tokenizer_config.json: {problem}"


def test_files_of_the_tokenizer_that_hold_nothing_usable(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(data.DataError, match=r"tokenizer_config\.json: not valid JSON \(maximum recursion depth"):
        data.Tokenizer(tmp_path)
    tokenizers.Tokenizer(models.BPE(vocab={}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(data.DataError, match=r"tokenizer\.json: its vocabulary is empty"):
        data.Tokenizer(tmp_path)


LLAMA_STYLE = processors.Sequence(  # as Llama 3's tokenizer.json
    [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single="<|user|> $A", pair="<|user|> $A <|user|> $B", special_tokens=[("<|user|>", 256)]
        ),
    ]
)


@pytest.mark.parametrize(
    ("processor", "opening"), [(LLAMA_STYLE, [256]), (processors.ByteLevel(trim_offsets=False), []), (None, [])]
)
def test_without_a_template_a_prompt_opens_as_transformers_opens_a_text(tmp_path, processor, opening):
    """Llama 3 base models were never trained on a text without BOS; Qwen's have none."""
    from transformers import AutoTokenizer

    backend = write_tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|user|>")
    if processor is not None:
        backend.post_processor = processor
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = data.Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (" 1+1 =\n", "aaa", "<|user|>ü", "<|end|>"):
        ids = ours.render([{"role": "system", "content": text[:2]}, {"role": "user", "content": text[2:]}])
        assert ids == theirs(text).input_ids == opening + backend.encode(text, add_special_tokens=False).ids
    assert ours.render([{"role": "user", "content": ""}]) == []  # refused as empty, with BOS or without


def test_without_a_template_a_prompt_is_left_open(tmp_path):
    """A tokenizer that closes texts with the end token: after it there would be no reply."""
    backend = write_tokenizer(tmp_path)
    specials = [("<|user|>", 256), ("<|end|>", 258)]
    backend.post_processor = processors.TemplateProcessing(single="<|user|> $A <|end|>", special_tokens=specials)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a<|end|>"
    expected = [256, *backend.encode("a", add_special_tokens=False).ids, 258]
    assert data.Tokenizer(tmp_path).render([{"role": "user", "content": text}]) == expected


@pytest.mark.parametrize("template", [CHATML, NAMESPACE, REFUSING])
def test_rendering_equals_transformers(tmp_path, template):
    from transformers import AutoTokenizer

    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|user|>"}
    backend = write_tokenizer(tmp_path, chat_template=template, **settings)
    backend.enable_truncation(5)  # what a tokenizer.json may ask for, and what transformers does not do
    backend.enable_padding(length=64)
    # And what a template writes itself, if the model wants it:
    backend.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = data.Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rendered = set()
    for messages in CONVERSATIONS[::2] if template == REFUSING else CONVERSATIONS:
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.decode(ours.render(messages)) == theirs.decode(
            theirs.encode(text, add_special_tokens=False), skip_special_tokens=True
        )
        assert ours.render(messages) == theirs.encode(text, add_special_tokens=False)
        rendered.add(text)
    assert len(rendered) >= 2


def test_where_the_template_comes_from(tmp_path):
    def text(**settings):
        write_tokenizer(tmp_path, **settings)
        tokenizer = data.Tokenizer(tmp_path)
        return tokenizer.decode(tokenizer.render([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]))

    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named {{ messages[1].content }}"}]
    assert text() == "xy"
    assert text(chat_template="config {{ messages[0].content }}") == "config x"
    assert text(chat_template=named) == "named y"
    assert text(chat_template=named[:1]) == "xy"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert text(chat_template=named) == "file x"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for %}", "does not parse"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "does not parse"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        (REFUSING, "no system role"),
        ("{{ 1 // 0 }}", r"refuses .*ZeroDivisionError"),
        ("{{ '%d' % 'x' }}", r"refuses .*TypeError"),
        ("{{ 'x'.encode('no-codec') }}", r"refuses .*LookupError"),
        ("{{ 'x'.index('y') }}", r"refuses .*ValueError"),
        ("{{ 10.0 ** 400 }}", r"refuses .*OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"refuses .*RecursionError"),
        ("{{ messages | map(attribute='content') | sum }}", r"refuses .*TypeError"),
    ],
)
def test_template_errors(tmp_path, template, problem):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": CONVERSATIONS[1], "output": "1"}) + "\n")
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(data.DataError, match=problem) as error:
        data.load_dataset(DatasetConfig(data_path=str(file)), data.Tokenizer(tmp_path), 100)
    assert str(error.value).startswith(str(tmp_path) if "parse" in problem else f"{file}:1: ")


def test_malformed_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(data.DataError, match=r"tokenizer\.json: not a usable tokenizer"):
        data.Tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------------------- dataset


def load(tokenizer, folder, lines, max_prompt_tokens=10, **cfg):
    file = folder / "rows.jsonl"
    file.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return data.load_dataset(DatasetConfig(data_path=str(file), **cfg), tokenizer, max_prompt_tokens)


def test_rows_in_both_forms(tokenizer, tmp_path):
    (tmp_path / "prompt.txt").write_text("<{}>{x}")
    (tmp_path / "system.txt").write_text("Sys ü")
    rows = [
        {"question": "1+{}", "answer": 2},
        b"",  # blank lines are no rows, but are counted as lines
        {"messages": [{"role": "user", "content": "hi"}], "answer": "#### 3", "question": "unused"},
    ]
    files = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    dataset = load(tokenizer, tmp_path, rows, 100, input_key="question", output_key="answer", **files)
    system = {"role": "system", "content": "Sys ü"}
    assert [row.messages for row in dataset.rows] == [
        [system, {"role": "user", "content": "<1+{}>{x}"}],
        [system, {"role": "user", "content": "hi"}],
    ]
    assert [(row.row_id, row.answer, row.env_name) for row in dataset.rows] == [
        (0, "2", "exact"),
        (2, "#### 3", "exact"),
    ]
    assert dataset.rows[1].prompt_ids == tokenizer.backend.encode("Sys ühi").ids and dataset.num_too_long == 0


def test_prompts_over_the_limit_are_left_out_and_counted(tokenizer, tmp_path):
    rows = [{"input": "x" * length, "output": "1"} for length in (9, 10, 11, 30, 1)]
    dataset = load(tokenizer, tmp_path, rows, 10)
    assert [(row.row_id, len(row.prompt_ids)) for row in dataset.rows] == [(0, 9), (1, 10), (4, 1)]
    assert dataset.num_too_long == 2


def test_fingerprint_is_of_what_is_trained_on(tokenizer, tmp_path):
    rows = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    first = load(tokenizer, tmp_path, rows).fingerprint
    assert load(tokenizer, tmp_path, [row | {"note": "x"} for row in rows]).fingerprint == first
    changed = [rows[::-1], rows[:1], [rows[0], rows[1] | {"output": "5"}], [rows[0], rows[1] | {"input": "2+3"}]]
    assert len({first, *(load(tokenizer, tmp_path, other).fingerprint for other in changed)}) == 5


GOOD = {"input": "1+1", "output": "2"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"input": "1+1", "output"', "not valid JSON"),
        (b'{"input": "\xff", "output": "2"}', "not valid JSON .'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["1+1"]', "expected a JSON object, got list"),
        (b'{"input": "\\ud800", "output": "2"}', "refuses these messages"),  # half a surrogate pair
        ({"input": "1+1", "answer": "2"}, "no key 'output'; keys: input, answer .see output_key"),
        (
            {"problem": "1+1", "output": "2"},
            "neither 'messages' nor text under 'input'; keys: problem, output .see inp",
        ),
        ({"input": 5, "output": "2"}, "neither 'messages' nor text under 'input'"),
        ({"input": "", "output": "2"}, "the prompt is empty"),
        ({"messages": [], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": [{"role": "user", "content": None}], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": [{"role": "user"}], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": CONVERSATIONS[2][:2], "output": "2"}, "the last message is the assistant's"),
    ],
)
def test_every_error_of_a_row_names_file_and_line(tokenizer, tmp_path, line, problem):
    with pytest.raises(data.DataError, match=problem) as error:
        load(tokenizer, tmp_path, [GOOD, b"", line, GOOD])
    assert str(error.value).startswith(f"{tmp_path / 'rows.jsonl'}:3: ") and "\n" not in str(error.value)


def test_files_without_a_usable_row(tokenizer, tmp_path):
    with pytest.raises(data.DataError, match=r"rows\.jsonl: no usable row: it is empty"):
        load(tokenizer, tmp_path, [b"", b"  "])
    with pytest.raises(data.DataError, match="no usable row: all 2 prompts are longer than 2 tokens"):
        load(tokenizer, tmp_path, [GOOD, GOOD], 2)
    with pytest.raises(data.DataError, match=r"not_there\.jsonl: cannot be read \(No such file"):
        data.load_dataset(DatasetConfig(data_path=str(tmp_path / "not_there.jsonl")), tokenizer, 10)


def test_prompt_files(tokenizer, tmp_path):
    prompt = tmp_path / "prompt.txt"
    for text, number in (("no place", 0), ("{} and {}", 2)):
        prompt.write_text(text)
        with pytest.raises(data.DataError, match=rf"prompt\.txt: needs exactly one .* has {number}"):
            load(tokenizer, tmp_path, [GOOD], prompt_file=str(prompt))
    prompt.write_bytes(b"\xff{}")
    with pytest.raises(data.DataError, match=r"prompt\.txt: cannot be read .*0xff"):
        load(tokenizer, tmp_path, [GOOD], prompt_file=str(prompt))
    with pytest.raises(data.DataError, match=r"absent\.txt: cannot be read .*No such file"):
        load(tokenizer, tmp_path, [GOOD], system_prompt_file=str(tmp_path / "absent.txt"))


# ----------------------------------------------------------------------------------------------------------- order


def test_order_is_numpys_permutation_of_each_epoch():
    orders = [np.random.Generator(np.random.PCG64([3, epoch])).permutation(5) for epoch in range(4)]
    assert data.rows_at(5, 3, 14, seed=3, shuffle=True) == np.concatenate(orders)[3:17].tolist()
    assert data.rows_at(5, 3, 9, seed=3, shuffle=False) == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_order_resumes_anywhere_and_does_not_depend_on_the_batch():
    whole = data.rows_at(7, 0, 70, seed=42, shuffle=True)
    for batch in (1, 3, 7, 10, 14):
        parts = [
            data.rows_at(7, position, batch, seed=42, shuffle=True) for position in range(0, 70 - batch + 1, batch)
        ]
        assert list(chain(*parts)) == whole[: len(parts) * batch]
    epochs = [whole[i : i + 7] for i in range(0, 70, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 5 and whole != data.rows_at(7, 0, 70, seed=43, shuffle=True)


# ----------------------------------------------------------------------------------------------- samples and packs


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 30])
def test_ranks_get_every_sample_once_and_equal_loads(world_size):
    lengths = np.random.default_rng(0).integers(1, 100, 25).tolist()
    shares = data.assign_to_ranks(lengths, world_size)
    assert sorted(chain(*shares)) == list(range(25)) and len(shares) == world_size
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths) and shares == data.assign_to_ranks(lengths, world_size)


def test_rank_shares_by_hand():
    assert data.assign_to_ranks([5, 9, 5, 4], 2) == [[1, 3], [0, 2]]
    assert data.assign_to_ranks([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert data.assign_to_ranks([3], 3) == [[0], [], []]


def naive_tokens(sample, adv):
    """(row, target, sampler's logp, advantage) of each sampled token, one at a time."""
    prompt, found = len(sample.prompt_ids), []
    for k in range(len(sample.output_ids)):
        if sample.mask[k]:
            found.append((prompt + k - 1, int(sample.output_ids[k]), sample.sampler_logps[k], np.float32(adv)))
    return found


@pytest.mark.parametrize("max_tokens", [29, 40, 64, 1000])
def test_packs_hold_every_sampled_token_once(max_tokens):
    samples, adv_B = make_samples(100_000)
    samples[7].mask[:] = False  # not one token sampled: context only
    packs, seen = data.pack_samples(samples, adv_B, max_tokens), []
    by_ids = {(*s.prompt_ids, *map(int, s.output_ids)): (s, adv) for s, adv in zip(samples, adv_B, strict=True)}
    by_inputs = {ids[:-1]: ids for ids in by_ids}
    assert len(by_inputs) == len(samples)
    for pack in packs:
        starts, lengths = pack.cu_seqlens[:-1], np.diff(pack.cu_seqlens)
        assert len(pack.token_T) == pack.cu_seqlens[-1] <= max_tokens and pack.cu_seqlens[0] == 0
        assert sorted(lengths, reverse=True) == lengths.tolist()
        assert pack.position_T.tolist() == [p for length in lengths for p in range(length)]
        for s, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ids = by_inputs[tuple(pack.token_T[start : start + length].tolist())]  # whole, or a KeyError
            of_s = pack.seq_R == s
            columns = (pack.row_R - start, pack.target_R, pack.sampler_logp_R, pack.adv_R)
            assert list(zip(*(x[of_s].tolist() for x in columns), strict=True)) == naive_tokens(*by_ids[ids])
            seen.append(ids)
        kinds = {name: getattr(pack, name).dtype for name in pack.__slots__}
        floats = dict.fromkeys(("sampler_logp_R", "adv_R", "reward_R"), np.float32)
        assert kinds == {name: np.int64 for name in kinds} | {"cu_seqlens": np.int32} | floats
    assert sorted(seen) == sorted(by_ids)


def sample_of(length):
    ids = np.arange(length, dtype=np.int32)
    return data.Sample(0, 0, 0, [1], ids, np.zeros(length, np.float32), np.ones(length, bool), "stop", 0)


def test_packing_by_hand():
    """First fit, longest first; a sequence of n + 1 ids is n input tokens."""
    packs = data.pack_samples([sample_of(n) for n in (3, 6, 5, 2, 4)], [0.0] * 5, 10)
    assert [np.diff(pack.cu_seqlens).tolist() for pack in packs] == [[6, 4], [5, 3, 2]]
    with pytest.raises(AssertionError, match="sample of 11 tokens, packs of 10"):
        data.pack_samples([sample_of(11)], [0.0], 10)


def test_empty_pack_is_one_token_without_a_response():
    pack = data.empty_pack()
    assert pack.token_T.shape == pack.position_T.shape == (1,) and pack.cu_seqlens.tolist() == [0, 1]
    assert all(len(getattr(pack, name)) == 0 for name in pack.__slots__ if name.endswith("_R"))
