"""What takes the message of an error apart, in the place of a field: split, cut, searched or compared by its words."""

import ast
from collections.abc import Iterator

FOREIGN = {
    "pipeline.config.yaml.load_yaml": "PyYAML: what it was scanning, and where; Python adds advice on long numbers",
    "pipeline.corpus.formats.jsonl.json_fault": "Python adds advice on long numbers",
    "pipeline.corpus.picture_files.picture_problem": "Pillow: the two sizes, before its guess",
    "pipeline.corpus.unpacking.Unpacked._refuse_memory": "zstandard: errors of memory have its only class",
    "pipeline.endpoint.api_keys.error_without_key": "the only place that shortens the message of a client",
    "pipeline.errors.error_line": "the only place that shortens the message of a library",
    "pipeline.errors.is_full": "libraries in Rust and C++ state a full disk in words alone",
    "pipeline.errors.not_opened": "fsspec: the package that is not installed",
    "pipeline.models.checkpoints.in_one_line": "loaders: many lines, of which the first says most",
    "pipeline.models.devices._is_lost": "torch before 2.8: errors of a device are RuntimeErrors",
    "pipeline.models.devices.out_of_memory": "libraries of kernels: errors of memory are RuntimeErrors",
    "pipeline.models.load.load_adapter": "peft: another base model is a RuntimeError or a ValueError",
    "pipeline.training.memory.explained": "torch: the sizes, before its advice",
    "ray_jobs.actors._as_loss": "Ray: whether an actor failed in its constructor",
}
"""Functions that read the message of an error of another library, which has no fields, and what they read."""

CUTS = {
    *("partition", "rpartition", "split", "rsplit", "splitlines", "removeprefix", "removesuffix", "replace"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "translate", "shorten"),
}
PATTERNS = {"match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split"}
NAMED = {"error", "exception", "exc"}
"""Names that hold an error wherever they stand, as parameters without a type and as fields."""

CAUSES = {"__cause__", "__context__", "cause"}
WORDED = {
    "str",
    "repr",
    "format",
    "error_line",
    "one_line",
    "visible",
    "not_opened",
    "message_of_storage",
    "without_key",
}
"""Functions that return the message of an error, or a message that they are given."""


def names_errors(annotation: ast.AST | None) -> bool:
    """Whether a type, or one in its text, is a class of errors."""
    parts = [] if annotation is None else list(ast.walk(annotation))
    names = [getattr(one, "id", getattr(one, "attr", getattr(one, "value", ""))) for one in parts]
    words = [
        word for name in names if isinstance(name, str) for word in name.replace("[", " ").replace("]", " ").split()
    ]
    return any(word.endswith(("Error", "Exception", "Fault", "Refusal")) for word in words)


class Messages:
    """The names in a function that hold errors and their messages."""

    def __init__(self, function: ast.AST) -> None:
        self.errors: set[str] = set()
        self.held: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and node.name:
                self.errors.add(node.name)
            elif isinstance(node, ast.arg) and (node.arg in NAMED or names_errors(node.annotation)):
                self.errors.add(node.arg)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                tested = node.args[0] if names_errors(node.args[1]) else None
                self.errors |= {tested.id} if isinstance(tested, ast.Name) else set()
        while self._follow(function):
            pass

    def _follow(self, function: ast.AST) -> bool:
        """Note the names that are assigned errors or messages; whether there was a new one."""
        before = len(self.errors) + len(self.held)
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, (ast.For, ast.comprehension)) and self.is_error(node.iter):
                self._assign(node.target, node.iter)
        return len(self.errors) + len(self.held) > before

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part)
        elif isinstance(target, ast.Tuple) and self.is_message(value):  # error.args, or the characters of a message
            self.held |= {one.id for one in target.elts if isinstance(one, ast.Name)}
        elif isinstance(target, ast.Name) and self.is_error(value):
            self.errors.add(target.id)
        elif isinstance(target, ast.Name) and self.is_message(value):
            self.held.add(target.id)

    def is_error(self, node: ast.AST) -> bool:
        """Whether an expression is an error, or what caused one."""
        if isinstance(node, ast.Attribute):
            return node.attr in NAMED or (node.attr in CAUSES and self.is_error(node.value))
        if isinstance(node, ast.Subscript):
            return self.is_error(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr == "exception" and not node.args
        return isinstance(node, ast.Name) and node.id in self.errors

    def is_message(self, node: ast.AST) -> bool:
        """Whether an expression is the message of an error, or holds it."""
        if isinstance(node, ast.Name):
            return node.id in self.held
        if isinstance(node, ast.Attribute):
            return node.attr == "args" and self.is_error(node.value)
        if isinstance(node, ast.JoinedStr):
            values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            return any(self.is_error(value) or self.is_message(value) for value in values)
        if isinstance(node, ast.BinOp):
            return any(self.is_error(side) or self.is_message(side) for side in (node.left, node.right))
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_message, node.values))
        if isinstance(node, ast.IfExp):
            return self.is_message(node.body) or self.is_message(node.orelse)
        if isinstance(node, (ast.Subscript, ast.NamedExpr)):
            return self.is_message(node.value)
        if isinstance(node, ast.Call):
            given = any(self.is_error(one) or self.is_message(one) for one in node.args)
            if isinstance(node.func, ast.Attribute):
                if node.func.attr in ("__str__", "__repr__") and self.is_error(node.func.value):
                    return True
                return self.is_message(node.func.value) or (given and node.func.attr in ("join", "format"))
            return given and getattr(node.func, "id", "") in WORDED
        return False

    def is_cut(self, node: ast.AST) -> bool:
        """Whether an expression takes a message apart, or decides by a part of it."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = any(map(self.is_message, node.args))
            whole = getattr(node.func.value, "id", "") in ("str", "textwrap")  # str.partition(message, ":")
            matched = given and (node.func.attr in PATTERNS or (whole and node.func.attr in CUTS))
            return matched or (node.func.attr in CUTS and self.is_message(node.func.value))
        if isinstance(node, ast.Subscript):
            return self.is_message(node.value) and not isinstance(node.value, ast.Attribute)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if isinstance(node.ops[0], (ast.In, ast.NotIn)):
                return self.is_message(sides[1])
            return any(map(self.is_message, sides)) and any(isinstance(getattr(one, "value", 0), str) for one in sides)
        return isinstance(node, ast.Match) and self.is_message(node.subject)


def functions(tree: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, ast.AST]]:
    """Every function and method of a module with its name; the functions in one belong to it."""
    for node in tree.body:
        name = f"{inside}.{getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            yield from functions(node, name)
        else:
            yield name, node


def cuts(tree: ast.Module, module: str) -> dict[str, list[str]]:
    """The expressions that take a message apart, by the function that they are in."""
    found = {}
    for name, function in functions(tree, module):
        messages = Messages(function)
        if lines := [ast.unparse(node) for node in ast.walk(function) if messages.is_cut(node)]:
            found[name] = lines
    return found
