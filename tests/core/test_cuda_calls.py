"""Every call of torch, Triton and vLLM in the product and in bench/, against two sets of versions: the
installed one, and the oldest that GPU machines have (tests/helpers/old_versions/, read out of the wheels).

Most of these calls run on no CPU, so nothing else would see a keyword that a version does not know. For a new call of
what is not recorded yet, tests/helpers/signatures.py says how to.
"""

import ast
import contextlib
import importlib
import inspect
import json
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from signatures import OPERATORS, RECORDS, Sources
from their_calls import (
    ENVIRONMENT,
    LAUNCH,
    PASSED_ON,
    RUNNERS,
    WORKER,
    Call,
    assigned,
    calls,
    environment,
    imported,
    nodes,
    plain,
    reads,
    trees,
)
from torch.torch_version import TorchVersion

import model

OLD = {"torch": "2.11.0", "triton": "3.6.0", "vllm": "0.24.0"}
VERSIONS = ("installed", "old")
RECORD = {package: json.loads((RECORDS / f"{package}-{version}.json").read_text()) for package, version in OLD.items()}
INSTALLED = Sources(Path(torch.__file__).parents[1])
OPERATORS_OF_BOTH = {*plain()} - {*RECORD["torch"]["absent"]}  # they need no record


class Form(NamedTuple):
    """One way to call a function. defaults: of the parameters that have one."""

    positional: list[str]
    by_keyword: list[str]
    defaults: dict[str, str]
    takes_more: bool
    takes_any_keyword: bool

    @classmethod
    def of(cls, text: str) -> "Form":
        """Of "(a, b=1, *, c=None)"."""
        args = ast.parse(f"def f{text}: ...").body[0].args
        before_star = [*args.posonlyargs, *args.args]
        last = before_star[len(before_star) - len(args.defaults) :]
        values = [*zip(last, args.defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        defaults = {arg.arg: ast.unparse(value) for arg, value in values if value}
        by_keyword = [arg.arg for arg in [*args.args, *args.kwonlyargs]]
        return cls([arg.arg for arg in before_star], by_keyword, defaults, bool(args.vararg), bool(args.kwarg))

    def misfit(self, call: Call, given: list[str]) -> str:
        """Why it cannot be called so; "" if it can."""
        unknown = [keyword for keyword in given if keyword not in self.by_keyword]
        if unknown and not self.takes_any_keyword:
            return f"has no {unknown}"
        if call.positional is None or call.unknown:  # not all of the call is written out
            return ""
        if call.positional > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments"
        passed = {*self.positional[: call.positional]}
        missing = {*self.positional, *self.by_keyword} - passed - {*given} - self.defaults.keys()
        if missing or passed & {*given}:
            return f"needs {sorted(missing)}, gets {sorted(passed & {*given})} twice"
        return ""


@cache
def forms(version: str, name: str) -> list[Form]:
    """[] for what the version does not have."""
    record = RECORD[name.split(".")[0]]["forms"].get(name, []) if version == "old" else INSTALLED.forms(name)
    return [Form.of(text) for text in record[1:]]


@cache
def attributes(version: str, owner: str) -> list[str]:
    return RECORD[owner.split(".")[0]]["attributes"][owner] if version == "old" else INSTALLED.attributes(owner)


def problem(version: str, call: Call, given: list[str], name: str) -> str:
    """Why the version cannot be called so; "" if it can."""
    if not (known := forms(version, name)):
        is_plain = version == "old" and name in OPERATORS_OF_BOTH
        return "" if is_plain else f"{call.where}: no {name} in the {version} version (or it is not recorded)"
    if all(misfits := [form.misfit(call, given) for form in known]):
        return f"{call.where}: {version} {name} {misfits[-1]}"
    for further in PASSED_ON.get(name, []) if known[0].takes_any_keyword else []:
        rest = [keyword for keyword in given if keyword not in known[0].by_keyword]
        if wrong := problem(version, Call(call.where, [further], positional=None), rest, further):
            return wrong
    return ""


def problems(version: str, call: Call) -> list[str]:
    """[] if one of its names fits; keywords that depend on the version aside."""
    always = [keyword for keyword, by_version in call.given.items() if not by_version]
    wrong = [problem(version, call, always, name) for name in call.names]
    return wrong if all(wrong) else []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_fits(version):
    assert len(calls()) > 500
    assert [text for call in calls() if not call.by_version for text in problems(version, call)] == []
    assert [call for call in calls() if call.unknown] == [], "say in EXPANDED of their_calls.py what `**` stands for"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_import_is_there(version):
    old = {name for record in RECORD.values() for name in record["imports"]}
    assert [name for name in imported() if not (name in old if version == "old" else INSTALLED.has(name))] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_attribute_is_there(version):
    wrong = []
    for read in reads():
        pairs = [name.rsplit(".", 1) for name in read.names]
        if not read.by_version and not any(name in attributes(version, owner) for owner, name in pairs):
            wrong.append(f"{read.where}: {version} has no {read.names}")
    assert wrong == []


def test_what_depends_on_the_version_does():
    """A keyword or a call behind a question for the version: one version must have it and one must lack it, or the
    question is needless, or asks for what nobody has."""
    for call in calls():
        for keyword in [keyword for keyword, by_version in call.given.items() if by_version]:
            knows = [not all(problem(v, Call("", [n], None), [keyword], n) for n in call.names) for v in VERSIONS]
            assert sorted(knows) == [False, True], (call.where, keyword, knows)
        if call.by_version:
            assert not all(problems(version, call) for version in VERSIONS), call.where


@pytest.mark.parametrize("version", VERSIONS)
def test_words_that_vllm_reads(version):
    assert environment() <= {*attributes(version, ENVIRONMENT)}
    modes = [node.value.value for node in nodes(trees()["engine.py"]) if getattr(node, "arg", "") == "logprobs_mode"]
    assert modes and {*modes} <= {*attributes(version, "vllm.config.model.LogprobsMode")}


# Parameters that calls leave out and whose defaults differ -> why it is all the same.
CHANGED = {
    "torch.compile backend": "None is inductor",
    "vllm.engine.arg_utils.EngineArgs cp_kv_cache_interleave_size": "of context parallelism, which is off",
    "vllm.engine.arg_utils.EngineArgs dcp_comm_backend": "of context parallelism",
    "vllm.engine.arg_utils.EngineArgs disable_cascade_attn": "it was disabled in 0.24, and is no more in 0.32",
}


def test_what_is_left_out_has_the_same_default():
    changed = set()
    for call in calls():
        for name in {*call.names, *(further for called in call.names for further in PASSED_ON.get(called, []))}:
            old, new = (
                {k: v for f in forms(version, name) for k, v in f.defaults.items()} for version in ("old", "installed")
            )
            left_out = old.keys() & new.keys() - call.given.keys()
            changed |= {f"{name} {parameter}" for parameter in left_out if old[parameter] != new[parameter]}
    assert changed <= CHANGED.keys()


# ------------------------------------------------------------------------------------- both sides of a version's branch


def varlen_options(version):
    """What model.VARLEN_GQA is where torch has the version: the expression in model.py, computed for it."""
    (expression,) = [value for value in assigned("VARLEN_GQA", trees()["model.py"].body[-1])]
    torch_of_version = SimpleNamespace(__version__=TorchVersion(version))
    return eval(compile(ast.Expression(expression), "model.py", "eval"), {"torch": torch_of_version})


@pytest.mark.parametrize("version, takes_gqa", [("2.11.0+cu130", False), ("2.12.0", True), ("2.13.0+cpu", True)])
@pytest.mark.parametrize("prefix_S", [None, [-1, 0, 0, -1]])
def test_attention_on_cuda_in_both_versions(version, takes_gqa, prefix_S, monkeypatch):
    """What varlen_attn is given there says what attends to what: its formula, in float64, gives what the branch for CPU
    gives."""
    given = []

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options):
        given.append(options)
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max())) and cu_q.dtype == torch.int32
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        outs = []
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            score_NQK = torch.einsum("qnh,knh->nqk", query[q0:q1], key[k0:k1]) / query.shape[-1] ** 0.5
            later_QK = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
            weight_NQK = score_NQK.masked_fill(later_QK, -torch.inf).softmax(-1)
            outs.append(torch.einsum("nqk,knh->qnh", weight_NQK, value[k0:k1]))
        return torch.cat(outs)

    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(13, n, 8, dtype=torch.float64, generator=random) for n in (4, 2, 2))
    prefix_S = None if prefix_S is None else np.array(prefix_S)
    layout = model.PackLayout.of(np.array([0, 5, 8, 12, 13]), prefix_S, 13, torch.device("cpu"))
    expected = model.packed_attention(query, key, value, layout)
    monkeypatch.setattr(model, "uses_flash_attention", lambda *_: True)
    monkeypatch.setattr(model, "varlen_attn", varlen_attn)
    monkeypatch.setattr(model, "VARLEN_GQA", varlen_options(version))
    torch.testing.assert_close(model.packed_attention(query, key, value, layout), expected)
    assert given == [{"window_size": (-1, 0)} | ({"enable_gqa": True} if takes_gqa else {})]


# ------------------------------------------------------------------------------- do these tests see what they should?


@pytest.mark.parametrize(
    "name, positional, given, versions",
    [  # and the versions that must refuse it
        ("vllm.LLM", 0, ["model", "sleep_level"], VERSIONS),
        ("vllm.LLM", 0, ["max_model_len"], VERSIONS),  # no model
        ("vllm.LLM", 0, ["model", "sleep_mode_offload_cudagraph"], ["old"]),
        ("vllm.LLM.sleep", 3, [], VERSIONS),
        ("vllm.LLM.sleep_all", 0, [], VERSIONS),
        ("vllm.SamplingParams", 0, ["flat_logprobs", "top_logprobs"], VERSIONS),
        (f"{WORKER}.reload_weights", 0, ["weights"], VERSIONS),
        (f"{WORKER}.reload_weights", 0, ["weights_iterator"], []),
        ("torch.mm", 2, ["out_dtype", "out"], []),
        ("torch.mm", 3, ["out_dtype", "out"], VERSIONS),
        ("torch.addmm", 3, ["out_type", "out"], VERSIONS),
        ("torch.nn.attention.varlen.varlen_attn", 7, ["window_size", "enable_gqa"], ["old"]),
        ("torch.nn.attention.varlen.varlen_attn", 6, ["window_size"], VERSIONS),
        ("torch.distributed.fsdp.MixedPrecisionPolicy", 0, ["param_dtype", "cast_root_forward_inputs"], VERSIONS),
        ("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", 0, [], VERSIONS),
        ("torch.optim.AdamW", 1, ["lr", "fused", "fused_step"], VERSIONS),
        ("triton.language.range", 3, ["flatten", "num_stages"], []),
        ("triton.language.range", 3, ["flat"], VERSIONS),
        (LAUNCH, 0, ["num_warps", "num_stages"], []),
        (LAUNCH, 0, ["warps"], VERSIONS),
    ],
)
def test_a_call_that_does_not_fit_is_seen(name, positional, given, versions):
    call = Call("here", [name], positional, dict.fromkeys(given, False))
    assert [version for version in VERSIONS if problems(version, call)] == [*versions]


def test_our_calls_are_read_right():
    """Those with `*`, `**`, an alias, a dict that is filled later, a question for the version."""
    by_name = {call.names[0]: call for call in calls() if not call.where.startswith("bench")}
    attention = by_name["torch.nn.attention.varlen.varlen_attn"]
    assert attention.positional == 7 and attention.given == {"window_size": False, "enable_gqa": True}
    assert {"model", "hf_overrides", "enable_sleep_mode", "max_num_batched_tokens"} <= by_name["vllm.LLM"].given.keys()
    assert by_name[f"{WORKER}.reload_weights"].given == {"weights_iterator": False}
    assert by_name["vllm.v1.engine.llm_engine.LLMEngine.add_request"].positional == 3
    assert by_name["torch.optim.AdamW"].given.keys() >= {"lr", "betas", "fused"}
    assert next(call.given.keys() for call in calls() if call.names == [LAUNCH]) >= {"num_warps"}
    assert {"out_dtype", "out"} == by_name["torch.mm"].given.keys() | by_name["torch.addmm"].given.keys()


def object_of(name):
    """The object of a dotted name; of a Triton kernel the function that it is made of."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
            return getattr(found, "fn", found)
    raise AssertionError(name)


@pytest.mark.parametrize("package", ["torch", "triton", pytest.param("vllm", marks=pytest.mark.slow)])
def test_the_reader_of_sources_agrees_with_python(package):
    """What it finds in the installed files is what Python says of the imported functions, names, order and defaults:
    so what it finds in a wheel is right, too. Workers and runners, which only CUDA can import, aside."""
    num_compared = 0
    for name in RECORD[package]["forms"]:
        if name.startswith((OPERATORS, WORKER, *RUNNERS)):
            continue
        try:
            parameters = [p for p in inspect.signature(object_of(name)).parameters.values() if p.name != "self"]
        except ValueError:  # compiled
            continue
        (form,) = forms("installed", name)
        assert [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD] == form.positional, name
        named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        assert named.keys() == {*form.by_keyword}, name
        assert {key for key, default in named.items() if default is not inspect.Parameter.empty} == {*form.defaults}
        written = {key: ast.literal_eval(text) for key, text in form.defaults.items() if text != "..."}
        assert written == {key: named[key] for key in written}, name
        num_compared += 1
    assert num_compared >= {"torch": 40, "triton": 15, "vllm": 8}[package]


@pytest.mark.parametrize("name", ["mm", "addmm", "embedding_dense_backward"])
def test_the_reader_of_operators_agrees_with_torch(name):
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    expected = {tuple(argument.name for argument in schema.arguments if not argument.is_out) for schema in schemas}
    read = [tuple(form.by_keyword) for form in forms("installed", OPERATORS + name)]
    assert {tuple(key for key in names if key != "out") for names in read} == expected
