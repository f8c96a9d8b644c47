"""Writes down the collectives of a piece of code: FSDP's, DTensor's and the program's own."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """seen: of each collective its name, the bytes that it leaves on this rank, and the name of its group."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes again as what it does to the parts
        result = func(*args, **kwargs or {})
        if "c10d" in func.namespace and not func.__name__.startswith(("wait", "_wrap")):
            left = result if isinstance(result, torch.Tensor) else args[0]
            num_bytes = sum(x.nbytes for x in tree_leaves(left) if isinstance(x, torch.Tensor))
            groups = [x for x in args if isinstance(x, str) and x.isdigit()]  # of a functional one: not its operation
            for argument in args:
                if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                    groups.append(dist.ProcessGroup.unbox(argument).group_name)
            assert len(groups) == 1, (func, args)
            self.seen.append((func.__name__.split(".")[0], num_bytes, groups[0]))
        return result
