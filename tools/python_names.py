"""The names of a Python file: what binds them, in which scope, where they are used. The file is parsed, never run."""

import ast

SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)


class Names:
    def __init__(self, tree: ast.Module):
        self.module = tree
        self.parent: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.imported: dict[str, str] = {}  # name -> dotted path
        self.bound: dict[tuple[ast.AST, str], list[ast.expr | None]] = {}  # None: not by one expression
        self.uses: dict[str, list[ast.Name]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parent[child] = node
        for node in ast.walk(tree):
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.calls.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.arg):
            self._bind(self.scope(node), node.arg, None)
        elif isinstance(node, ast.Global):  # a function may bind it again
            for name in node.names:
                self._bind(self.module, name, None)
        elif isinstance(node, ast.Nonlocal):
            around = self.scope(self.scope(node))
            for name in node.names:
                self._bind(around, name, None)
        elif isinstance(node, ast.Name):
            self.uses.setdefault(node.id, []).append(node)
            if not isinstance(node.ctx, ast.Load):
                self._bind(self.scope(node), node.id, self._assigned(node))

    def _bind(self, scope: ast.AST, name: str, expression: ast.expr | None) -> None:
        self.bound.setdefault((scope, name), []).append(expression)

    def _assigned(self, target: ast.expr) -> ast.expr | None:
        """What `target = ...` or `a, target = 1, ...` assigns."""
        statement = self.parent[target]
        if isinstance(statement, ast.Assign) and target in statement.targets:
            return statement.value
        if isinstance(statement, ast.AnnAssign):
            return statement.value
        if isinstance(statement, ast.Tuple):
            return self._assigned_in_tuple(target, statement)
        return None

    def _assigned_in_tuple(self, target: ast.expr, targets: ast.Tuple) -> ast.expr | None:
        statement = self.parent[targets]
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
            return None
        values = statement.value.elts
        if len(values) != len(targets.elts):
            return None
        return values[targets.elts.index(target)]

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that the node is in."""
        node = self.parent.get(node, node)
        while not isinstance(node, SCOPES):
            node = self.parent[node]
        return node

    def is_in_a_branch(self, node: ast.AST) -> bool:
        """Whether the node may run several times, or not at all, each time its scope runs."""
        while not isinstance(node, SCOPES):
            if isinstance(node, BRANCHES) and not _is_main_guard(node):
                return True
            node = self.parent[node]
        return False

    def home(self, name: str, scope: ast.AST) -> ast.AST | None:
        """The scope whose `name` is meant in `scope`; None if the file does not bind it."""
        while (scope, name) not in self.bound:
            if isinstance(scope, ast.Module):
                return None
            scope = self.scope(scope)
        return scope

    def only_value(self, name: str, scope: ast.AST) -> ast.expr | None:
        """The one expression that a name is bound to, if it is one."""
        home = self.home(name, scope)
        if home is None:
            return None
        expressions = self.bound[home, name]
        if len(expressions) != 1:
            return None
        return expressions[0]

    def uses_of(self, name: str, home: ast.AST) -> list[ast.Name]:
        """Where the name of the scope `home` is read."""
        found = []
        for node in self.uses.get(name, ()):
            is_read = isinstance(node.ctx, ast.Load)
            if is_read and self.home(name, self.scope(node)) is home:
                found.append(node)
        return found

    def last(self, func: ast.expr) -> str:
        """The last part of the name of what is called, as its module calls it."""
        name = ast.unparse(func).rpartition(".")[2]
        return self.imported.get(name, name).rpartition(".")[2]

    def makes(self, func: ast.expr, name: str) -> bool:
        """Whether a call makes a `name`, or a class of the file that derives from one."""
        waiting = [self.last(func)]
        seen: set[str] = set()
        while waiting:
            last = waiting.pop()
            if last.endswith(name):
                return True
            if last in self.classes and last not in seen:
                seen.add(last)
                waiting += [self.last(base) for base in self.classes[last].bases]
        return False

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node


def _is_main_guard(node: ast.AST) -> bool:
    """Whether the branch is `if __name__ == "__main__":`, which a script runs."""
    return isinstance(node, (ast.If, ast.While)) and "__name__" in ast.unparse(node.test)
