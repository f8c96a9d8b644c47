"""Our calls of torch, triton and vLLM, read out of the syntax trees: of the product, and of bench/.

A function's name is resolved by the file's imports; a method's by what its object is called (OBJECTS), or by its name
alone (FSDP's, tensors'). `*args` and `**kwargs` are followed to the tuple or the dict that is written out in the same
function, module or helper function.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import config
from run.log import Timers

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "vllm")
ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
RUNNERS = ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.worker.gpu.model_runner.GPUModelRunner")
LAUNCH = "triton.backends.nvidia.compiler.CUDAOptions"
FSDP = "torch.distributed.fsdp.FSDPModule"
# Objects, by the end of their text once names are followed to what they were assigned -> what they are, or may be.
OBJECTS = {
    r"\bllm": ["vllm.LLM"],
    r"\bllm\.llm_engine": [ENGINE],
    r"\bvllm_config": ["vllm.config.VllmConfig"],
    r"\bmodel_config": ["vllm.config.ModelConfig"],
    r"\boutput(\.outputs\[0\])?": ["vllm.outputs.RequestOutput", "vllm.outputs.CompletionOutput"],
    r"\boutput\.logprobs": ["vllm.logprobs.FlatLogprobs"],
    r"\bRequestOutputKind": ["vllm.sampling_params.RequestOutputKind"],
    r"\bget_device_properties\(.*\)": ["torch._C._CudaDeviceProperties"],
    r"\btorch\.backends\.cuda\.matmul": ["torch.backends.cuda.cuBLASModule"],
}
# Where a function takes **kwargs: what gets them.
PASSED_ON = {
    "vllm.LLM": ["vllm.engine.arg_utils.EngineArgs"],
    f"{WORKER}.reload_weights": [f"{runner}.reload_weights" for runner in RUNNERS],
    f"{RUNNERS[1]}.reload_weights": [f"{RUNNERS[0]}.reload_weights"],
}
ENVIRONMENT = "vllm.envs.environment_variables"
# Whose attributes are recorded.
OWNERS = sorted(
    {name for names in OBJECTS.values() for name in names} | {ENVIRONMENT, "vllm.config.model.LogprobsMode"}
)
# What no literal says.
EXPANDED = {"asdict(cfg.kwargs)": [f.name for f in fields(config.OptimizerKwargs) if f.name != "state_dtype"]}
UNKNOWN = ast.Constant(...)
FSDP_METHODS = {name for name in dir(FSDPModule) if name not in dir(object)}
# Those that objects of other kinds have too are left out.
TENSOR_METHODS = {*dir(Tensor)} - {
    name for kind in (str, list, dict, set, bytes, Path, slice, Timers) for name in dir(kind)
}


@dataclass
class Call:
    """Of a function that has one of these `names`. positional: how many; None where a `*` leads nowhere, or it is not
    the whole call (partial). given: keyword -> whether it is given only in some versions, as the whole call may be.
    unknown: `**` that lead nowhere."""

    where: str
    names: list[str]
    positional: int | None = 0
    given: dict[str, bool] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    by_version: bool = False


@cache
def trees() -> dict[str, ast.Module]:
    """Of the files that import PACKAGES. Every node knows its `parent`."""
    parsed = {}
    paths = [path.relative_to(ROOT) for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)]
    names = sorted(str(path) for path in paths if path.parts[0] not in ("tests", "tools", "examples"))
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        if re.search(rf"^\s*(import|from) ({'|'.join(PACKAGES)})\b", text, re.MULTILINE):
            parsed[name] = ast.parse(text)
            for node in nodes(parsed[name]):
                for child in ast.iter_child_nodes(node):
                    child.parent = node
    return parsed


@cache
def nodes(scope: ast.AST) -> list[ast.AST]:
    return list(ast.walk(scope))


def parents(node: ast.AST) -> Iterator[ast.AST]:
    while node := getattr(node, "parent", None):
        yield node


def is_by_version(node: ast.AST) -> bool:
    """Whether it is under an `if` that asks for a version, or for what a version has; or behind one that leaves."""
    tests = [above.test for above in parents(node) if isinstance(above, ast.If | ast.IfExp)]
    for before in (part for part in scopes(node)[0].body if part.lineno < node.lineno):
        if isinstance(before, ast.If) and isinstance(before.body[-1], ast.Raise | ast.Return):
            tests.append(before.test)
    texts = [text for text in map(ast.unparse, tests) if re.search(r"__version__|hasattr\(", text)]
    theirs = {name for name, dotted in imports_of(scopes(node)[-1]).items() if dotted.split(".")[0] in PACKAGES}
    return any(theirs & {*re.findall(r"\w+", text)} for text in texts)


@cache
def scopes(node: ast.AST) -> list[ast.AST]:
    """Function and module around a node."""
    return [above for above in parents(node) if isinstance(above, ast.FunctionDef | ast.Module)]


@cache
def assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Name -> what is assigned to it in a function, or in a module outside of functions: of `a, b = x, y` the part. A
    parameter is assigned something that is not known."""
    values = defaultdict(list)
    is_module = isinstance(scope, ast.Module)
    if not is_module:
        values |= {arg.arg: [UNKNOWN] for arg in [*scope.args.args, *scope.args.kwonlyargs]}
    for node in scope.body if is_module else nodes(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            for target in getattr(node, "targets", None) or [node.target]:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                for part, value in pairs:
                    values[ast.unparse(part)].append(value)
    return values


def assigned(name: str, at: ast.AST) -> list[ast.expr]:
    """In the nearest scope that assigns to the name."""
    return next((values for scope in scopes(at) if (values := assignments(scope).get(name))), [])


def keys_of(value: ast.expr) -> dict[str, bool] | None:
    """Keys of a dict, by where they are written out; None if that is nowhere."""
    if (text := ast.unparse(value)) in EXPANDED:
        return dict.fromkeys(EXPANDED[text], False)
    if isinstance(value, ast.IfExp):
        parts = [keys_of(value.body), keys_of(value.orelse)]
    elif isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
        return {key.value: is_by_version(value) for key in value.keys}
    elif isinstance(value, ast.Name):
        parts = [keys_of(part) for part in assigned(value.id, value)] or [None]
        for node in nodes(scopes(value)[0]):  # name["key"] = ...
            stores = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if stores and ast.unparse(node.value) == value.id:
                parts.append({node.slice.value: is_by_version(node)} if isinstance(node.slice, ast.Constant) else None)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        functions = [f for t in trees().values() for f in t.body if getattr(f, "name", "") == value.func.id]
        returns = [node.value for f in functions for node in ast.walk(f) if isinstance(node, ast.Return)]
        parts = [keys_of(part) for part in returns] or [None]
    else:
        return None
    return None if None in parts else {key: by_version for part in parts for key, by_version in part.items()}


@cache
def imports_of(tree: ast.Module) -> dict[str, str]:
    """Name in the file -> dotted name."""
    names = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: dotted or name for name, dotted in names.items()}


def arguments(call: ast.Call) -> dict:
    given, unknown = {}, []
    for keyword in call.keywords:
        if keyword.arg:
            given[keyword.arg] = False
        elif (keys := keys_of(keyword.value)) is None:
            unknown.append(ast.unparse(keyword.value))
        else:
            given |= keys
    positional = 0
    for arg in call.args:
        if isinstance(arg, ast.Starred):
            values = assigned(arg.value.id, arg) if isinstance(arg.value, ast.Name) else []
            known = len(values) == 1 and isinstance(values[0], ast.Tuple | ast.List)
            positional = positional + len(values[0].elts) if known and positional is not None else None
        elif positional is not None:
            positional += 1
    return {"positional": positional, "given": given, "unknown": unknown, "by_version": is_by_version(call)}


def followed(expression: ast.expr) -> str:
    """Its text, with a name that was assigned once replaced by what it was assigned."""
    text = ast.unparse(expression)
    name = text.split(".")[0]
    values = assigned(name, expression) if name.isidentifier() else []
    return ast.unparse(values[0]) + text.removeprefix(name) if len(values) == 1 and values != [UNKNOWN] else text


def owners_of(expression: ast.expr, imports: dict[str, str]) -> list[str]:
    """Of vLLM's only in files that import it: their objects have names that others have too."""
    text = followed(expression)
    owners = [owner for end, owners in OBJECTS.items() if re.search(f"{end}$", text) for owner in owners]
    return [owner for owner in owners if not owner.startswith("vllm") or {"vllm", "LLM"} & {*imports}]


@cache
def kernels() -> dict[str, list[str]]:
    """Our Triton functions -> their parameters."""
    functions = [node for tree in trees().values() for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)]
    return {function.name: [arg.arg for arg in function.args.args] for function in jitted}


def names_of(function: ast.expr, imports: dict[str, str]) -> list[str]:
    """What is called, as dotted names of theirs; [] if it is not theirs."""
    text = ast.unparse(function)
    root, _, rest = text.partition(".")
    if root in imports and text.replace(".", "").isidentifier():
        return [f"{imports[root]}.{rest}".rstrip(".")] if imports[root].split(".")[0] in PACKAGES else []
    if not isinstance(function, ast.Attribute):
        return []
    if owners := owners_of(function.value, imports):
        return [f"{owner}.{function.attr}" for owner in owners]
    if function.attr in FSDP_METHODS:
        return [f"{FSDP}.{function.attr}"]
    in_kernel = any(getattr(scope, "name", "") in kernels() for scope in scopes(function))
    return [f"torch.Tensor.{function.attr}"] if function.attr in TENSOR_METHODS and not in_kernel else []


@cache
def calls() -> list[Call]:
    calls = []
    for file, tree in trees().items():
        imports = imports_of(tree)
        for node in nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{file}:{node.lineno}"
            kernel = ast.unparse(node.func.value) if isinstance(node.func, ast.Subscript) else None
            if kernel in kernels():
                given = {name: x for name, x in arguments(node)["given"].items() if name not in kernels()[kernel]}
                calls.append(Call(where, [LAUNCH], given=given))
            elif ast.unparse(node.func) == "partial" and (names := names_of(node.args[0], imports)):
                calls.append(Call(where, names, **arguments(node) | {"positional": None}))
            elif names := names_of(node.func, imports):
                calls.append(Call(where, names, **arguments(node)))
                if names == ["vllm.LLM.collective_rpc"] and isinstance(node.args[0], ast.Constant):
                    kwargs = [keyword.value for keyword in node.keywords if keyword.arg == "kwargs"]
                    calls.append(Call(where, [f"{WORKER}.{node.args[0].value}"], given=keys_of(*kwargs)))
    return calls


@cache
def reads() -> list[Call]:
    """Attributes of their objects that are read or set, as calls without arguments."""
    reads = []
    for file, tree in trees().items():
        imports = imports_of(tree)
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and (owners := owners_of(node.value, imports)):
                names = [f"{owner}.{node.attr}" for owner in owners]
                reads.append(Call(f"{file}:{node.lineno}", names, by_version=is_by_version(node)))
    return reads


def imported() -> set[str]:
    """Dotted names of theirs that our files import."""
    dotted = {name for tree in trees().values() for name in imports_of(tree).values()}
    return {name for name in dotted if name.split(".")[0] in PACKAGES}


def plain() -> list[str]:
    """Operators and methods of tensors of the installed torch. Tests on CPU run those that we use."""
    spaces = {"torch": torch, "torch.nn.functional": functional, "torch.Tensor": Tensor}
    names = [(prefix, name) for prefix, space in spaces.items() for name, x in vars(space).items() if callable(x)]
    return sorted(f"{prefix}.{name}" for prefix, name in names if not name.startswith("_") and name.islower())


def environment() -> set[str]:
    """vLLM's variables that we set."""
    files = [*trees(), *(path.name for path in ROOT.glob("*.sh")), "bench/gpu.sh"]
    return {name for file in files for name in re.findall(r"\bVLLM_\w+", (ROOT / file).read_text())}


def all_names() -> list[str]:
    """Of functions and classes: what must be known of a version."""
    called = {name for call in calls() for name in call.names}
    return sorted(called | {name for passed in PASSED_ON.values() for name in passed})
