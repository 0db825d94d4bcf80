"""Functions of the library modules in tasks/corpus.py, read with `ast`, so that questions about them have certain answers.

No Task lives here. `python -m tasks.library` prints how many there are.
"""

import ast
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.corpus import source_files

MAX_CHARS = 1500  # longer functions are left out: a few would fill a context


@dataclass(frozen=True)
class Spot:
    """source[start:end] is a value that a number may replace: kind "default" (that of `parameter`) or "return"."""

    kind: str
    start: int
    end: int
    parameter: str = ""


@dataclass(frozen=True)
class Function:
    """A function or method: dotted module, plain name, source from `def` on without indentation, its first lines up to the
    body, docstring or ""."""

    module: str
    name: str
    source: str
    signature: str
    doc: str
    spots: tuple[Spot, ...]


@functools.cache
def functions() -> list[Function]:
    """Return all functions in the order of the sources; ASCII only, so that characters and bytes have the same places."""
    found = []
    for module, text in source_files():
        lines = text.split("\n")
        for node in _outer_functions(ast.parse(text)):
            indented = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(indented) <= MAX_CHARS and indented.isascii():
                source = textwrap.dedent(indented)
                signature = "\n".join(source.split("\n")[: max(1, node.body[0].lineno - node.lineno)])
                doc = ast.get_docstring(node) or ""
                found.append(Function(module, node.name, source, signature, doc, tuple(_spots(node, indented, source))))
    return found


def _outer_functions(parent: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions that are in no other function: an inner one would stand in the haystack twice."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.AsyncFunctionDef):
            yield from _outer_functions(node)


def _spots(node: ast.FunctionDef, indented: str, source: str) -> Iterator[Spot]:
    lines = source.split("\n")
    removed = indented.index("def") - source.index("def")
    for kind, value, parameter in [*_defaults(node), *_returns(node)]:
        if value.lineno == value.end_lineno:
            row = value.lineno - node.lineno
            start = sum(len(line) + 1 for line in lines[:row]) + value.col_offset - removed
            yield Spot(kind, start, start + value.end_col_offset - value.col_offset, parameter)


def _defaults(node: ast.FunctionDef) -> list[tuple[str, ast.expr, str]]:
    """The defaults that are a whole number or None."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    positional = positional[len(positional) - len(args.defaults) :]
    pairs = [*zip(args.defaults, positional, strict=True), *zip(args.kw_defaults, args.kwonlyargs, strict=True)]
    plain = [(value, arg.arg) for value, arg in pairs if isinstance(value, ast.Constant)]
    return [("default", value, name) for value, name in plain if value.value is None or type(value.value) is int]


def _returns(node: ast.FunctionDef) -> list[tuple[str, ast.expr, str]]:
    """The value of a function that does nothing but return it."""
    last = node.body[0]
    return [("return", last.value, "")] if isinstance(last, ast.Return) and last.value is not None else []


@functools.cache
def unique_names() -> frozenset[str]:
    """Return the names that only one function has: a question about it has one answer."""
    count = Counter(function.name for function in functions())
    return frozenset(name for name in count if count[name] == 1)


@functools.cache
def described() -> list[tuple[Function, str, str]]:
    """Return (function, first paragraph of its docstring on one line, the rest) where no other function has that paragraph."""
    found = []
    for function in functions():
        paragraph, _, rest = function.doc.partition("\n\n")
        paragraph = " ".join(paragraph.split())
        if re.fullmatch(r"[ -~]{20,300}", paragraph):
            found.append((function, paragraph, rest.strip()))
    count = Counter(paragraph for _, paragraph, _ in found)
    return [item for item in found if count[item[1]] == 1]


if __name__ == "__main__":
    count = Counter(spot.kind for function in functions() if function.name in unique_names() for spot in function.spots)
    print(f"{len(functions())} functions, {sum(len(function.source) for function in functions())} characters")
    print(f"{len(described())} described, {len(unique_names())} with a name of their own, their values: {dict(count)}")
