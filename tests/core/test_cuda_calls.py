"""Calls of torch, Triton and vLLM, most of which no CPU runs: the installed versions take them, and so do the oldest
versions that GPU machines have, whose signatures are in tests/helpers/old_versions/.

    python tests/core/test_cuda_calls.py torch-2.11.0 NAME ...     where the old version is installed: records functions

A function is found by the imports of the file that calls it, a method by what its object is called (OBJECTS).
"""

import ast
import importlib
import inspect
import json
import re
import sys
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {path.name.split("-")[0]: path for path in (ROOT / "tests" / "helpers" / "old_versions").glob("*.json")}
OLD = {package: json.loads(path.read_text()) for package, path in RECORDS.items()}
WORKER = "vllm.v1.worker.gpu_worker.Worker"
OBJECTS = {  # the end of an object's text -> its class
    "llm": "vllm.LLM",
    "llm.llm_engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "llm.model_config": "vllm.config.ModelConfig",
    "output": "vllm.outputs.RequestOutput",
    "RequestOutputKind": "vllm.sampling_params.RequestOutputKind",
}
FSDP_METHODS = {name for name in dir(FSDPModule) if name not in dir(object)}
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
PASSED_ON = {  # what gets the function's **kwargs
    "vllm.LLM": "vllm.engine.arg_utils.EngineArgs",
    f"{WORKER}.reload_weights": f"{RUNNER}.reload_weights",
}
NO_SIGNATURE = inspect.signature(lambda *args, **kwargs: None)


class Call(NamedTuple):
    where: str
    name: str
    num_positional: int | None = 0  # None: there is a `*`
    keywords: tuple[str, ...] = ()


def asks_for_version(node: ast.AST) -> bool:
    return bool(re.search(r"__version__|hasattr\(|inspect\.signature\(", ast.unparse(node)))


def keys_filled_in(name: str, function: ast.AST) -> list[str]:
    """Keys of the dict literals that a function assigns to the name; not those behind a question for the version."""
    asking = [node for node in ast.walk(function) if isinstance(node, ast.If) and asks_for_version(node.test)]
    asked = {part for node in asking for part in ast.walk(node)}
    keys = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                keys += [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and node not in asked:
            if ast.unparse(node.value) == name and isinstance(node.slice, ast.Constant):
                keys.append(node.slice.value)
    return keys


def callee(function: ast.expr, imports: dict[str, str]) -> str | None:
    """Its dotted name, if it is one of torch's, Triton's or vLLM's."""
    text = ast.unparse(function)
    first, _, rest = text.partition(".")
    if first in imports and re.fullmatch(r"[\w.]+", text):
        return ".".join(filter(None, [imports[first], rest]))
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value).removeprefix("self.")
        if owner in OBJECTS and "vllm" in {name.split(".")[0] for name in imports.values()}:
            return f"{OBJECTS[owner]}.{function.attr}"
        if function.attr in FSDP_METHODS:
            return f"torch.distributed.fsdp.FSDPModule.{function.attr}"
    return None


def imports_of(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
            names |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: dotted for name, dotted in names.items() if dotted.split(".")[0] in OLD}


def calls_in(tree: ast.Module, where: str) -> list[Call]:
    imports, found = imports_of(tree), []
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] or [tree]:
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or (name := callee(node.func, imports)) is None:
                continue
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            for keyword in node.keywords:
                keywords += [] if keyword.arg else keys_filled_in(ast.unparse(keyword.value), function)
            is_whole = not any(isinstance(arg, ast.Starred) for arg in node.args)
            is_whole = is_whole and all(k.arg or keys_filled_in(ast.unparse(k.value), function) for k in node.keywords)
            num_positional = len(node.args) if is_whole else None
            found.append(Call(f"{where}:{node.lineno}", name, num_positional, tuple(keywords)))
            if name == "vllm.LLM.collective_rpc" and isinstance(node.args[0], ast.Constant):
                kwargs = next(keyword.value for keyword in node.keywords if keyword.arg == "kwargs")
                given = tuple(key.value for key in kwargs.keys)
                found.append(Call(f"{where}:{node.lineno}", f"{WORKER}.{node.args[0].value}", 0, given))
    return found


@cache
def trees() -> dict[str, ast.Module]:
    paths = [path for pattern in ("*.py", "*/*.py", "support/*/*.py") for path in ROOT.glob(pattern)]
    names = [str(path.relative_to(ROOT)) for path in paths]
    names = [name for name in names if name.split("/")[0] not in ("tests", "tools", "examples")]
    names.remove("bench/peers.py")  # which asks for what it calls, and reports what is absent
    return {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in sorted(names)}


@cache
def calls() -> list[Call]:
    return [call for name, tree in trees().items() for call in calls_in(tree, name)]


def signature_of(text: str) -> inspect.Signature:
    """Of "(a, b=1, *, c=None)"; what the defaults are is all the same."""
    function = ast.parse(f"def function{text}: ...").body[0]
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    function.args.kw_defaults = [value and ast.Constant(None) for value in function.args.kw_defaults]
    names: dict = {}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "record", "exec"), names)
    return inspect.signature(names["function"])


def object_of(name: str):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise AttributeError(name)


def installed(name: str) -> list[inspect.Signature]:
    """[] of what there is not."""
    if name.startswith((WORKER, RUNNER)):  # only CUDA can import them
        return [NO_SIGNATURE]
    try:
        found = object_of(name)
        signature = inspect.signature(getattr(found, "fn", found))
    except AttributeError:
        return []
    except (ValueError, TypeError):  # compiled
        return [NO_SIGNATURE]
    owner = name.rpartition(".")[0]
    parameters = list(signature.parameters.values())
    is_method = parameters and parameters[0].name == "self" and owner[owner.rindex(".") + 1 :][:1].isupper()
    return [signature.replace(parameters=parameters[1:]) if is_method else signature]


def old(name: str) -> list[inspect.Signature]:
    record = OLD[name.split(".")[0]]
    if name in record["forms"]:
        return [signature_of(text) for text in record["forms"][name][1:]]
    is_plain = re.fullmatch(r"torch\.(nn\.functional\.|Tensor\.)?[a-z_0-9]+", name) and name not in record["absent"]
    return [NO_SIGNATURE] if is_plain and not name.startswith("torch.Tensor") else []


VERSIONS = {"installed": installed, "old": old}


def problem(call: Call, signatures_of) -> str:
    """Why the version does not take the call; "" if it does."""
    if not (signatures := signatures_of(call.name)):
        return f"{call.where}: no {call.name} (or nobody has recorded it)"
    reasons = []
    for signature in signatures:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        further = call.name in PASSED_ON and takes_any
        known = [keyword for keyword in call.keywords if not further or keyword in signature.parameters]
        bind = signature.bind_partial if call.num_positional is None else signature.bind
        try:
            bind(*[None] * (call.num_positional or 0), **dict.fromkeys(known))
        except TypeError as error:
            reasons.append(f"{call.where}: {call.name}: {error}")
            continue
        rest = tuple(keyword for keyword in call.keywords if keyword not in known)
        return problem(Call(call.where, PASSED_ON[call.name], None, rest), signatures_of) if rest else ""
    return reasons[0]


@pytest.mark.slow  # imports vLLM
def test_every_call_fits_the_installed_version():
    assert len(calls()) > 350
    assert [text for call in calls() if (text := problem(call, installed))] == []


@pytest.mark.slow
def test_every_call_fits_the_old_version():
    assert [text for call in calls() if (text := problem(call, old))] == []


@pytest.mark.slow
def test_the_old_version_has_every_import_and_variable():
    known = {name for record in OLD.values() for name in record["imports"]}
    wanted = {dotted for tree in trees().values() for dotted in imports_of(tree).values()}
    assert sorted(wanted - known - set(OLD)) == []
    files = [*trees(), *(path.name for path in ROOT.glob("*.sh")), "bench/gpu.sh"]
    variables = {name for file in files for name in re.findall(r"\bVLLM_\w+", (ROOT / file).read_text())}
    attributes = {name for record in OLD.values() for owner in record["attributes"].values() for name in owner}
    assert sorted(variables - attributes) == []
    engine = [node for node in ast.walk(trees()["engine.py"]) if isinstance(node, ast.Attribute)]
    read = {(OBJECTS.get(ast.unparse(node.value).removeprefix("self.")), node.attr) for node in engine}
    theirs = [(owner, name) for owner, name in read if owner]
    known = {owner: {*names} for owner, names in OLD["vllm"]["attributes"].items()}
    known["vllm.outputs.RequestOutput"] |= known["vllm.outputs.CompletionOutput"]  # both are called output
    assert theirs and [pair for pair in theirs if pair[1] not in known[pair[0]]] == []


@pytest.mark.parametrize(
    ("code", "versions"),
    [  # and the versions that must refuse it
        ("vllm.LLM(model='', max_model_len=1)", []),
        ("vllm.LLM(model='', sleep_mode_offload_cudagraph=True)", ["old"]),
        ("options = {'model': 1}\n    options['sleep_level'] = 2\n    vllm.LLM(**options)", ["installed", "old"]),
        ("llm.sleep_all()", ["installed", "old"]),
        ("llm.collective_rpc('reload_weights', kwargs={'weights': 1})", ["old"]),
        ("torch.mm(a, b, out_dtype=torch.float32, out=c)", []),
        ("torch.addmm(a, b, c, out_type=torch.float32, out=d)", ["old"]),
        ("torch.nn.attention.varlen.varlen_attn(1, 2, 3, 4, 5, 6, 7, enable_gqa=True)", ["old"]),
        ("model.set_gradient_divide_factor()", ["installed", "old"]),
    ],
)
@pytest.mark.slow  # imports vLLM
def test_a_call_that_does_not_fit_is_seen(code, versions):
    found = calls_in(ast.parse(f"import torch, triton, vllm\ndef f():\n    {code}"), "here")
    refusing = [name for name, of in VERSIONS.items() if any(problem(call, of) for call in found)]
    assert found and refusing == versions


# ------------------------------------------------------------------------------------- both sides of a version's branch


def varlen_options(version):
    """What attention.VARLEN_GQA is where torch has the version: the expression in attention.py, computed for it."""
    assigned = [node for node in trees()["attention.py"].body if isinstance(node, ast.Assign)]
    (expression,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "VARLEN_GQA"]
    torch_of_version = SimpleNamespace(__version__=TorchVersion(version))
    return eval(compile(ast.Expression(expression), "attention.py", "eval"), {"torch": torch_of_version})


@pytest.mark.parametrize("version, takes_gqa", [("2.11.0+cu130", False), ("2.12.0", True), ("2.13.0+cpu", True)])
def test_heads_of_keys_are_shared_where_torch_can(version, takes_gqa):
    """tests/core/test_attention.py holds what attention gives by either."""
    assert varlen_options(version) == ({"enable_gqa": True} if takes_gqa else {})


if __name__ == "__main__":
    package = sys.argv[1].split("-")[0]
    for name in sys.argv[2:]:
        OLD[package]["forms"][name] = [name, *map(str, installed(name))]
    RECORDS[package].write_text(json.dumps(OLD[package], indent=0) + "\n")
