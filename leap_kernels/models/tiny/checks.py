# SPDX-License-Identifier: Apache-2.0
"""What an answer of the bundled model comes to: a story is read, a function is run, a bill is added up.

Each check takes a decoded text and returns what it comes to in words, or None for a text that comes to nothing. Two
right texts for the same prompt (a bill with other keys first, a function tested on other inputs) come to the same.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["CHECKS"]

_INPUTS = range(1, 10)

# All that a function of this model's can need. What else a text might say is not run.
_HARMLESS = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.Return, ast.Assert, ast.Compare, ast.Eq,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Call,
)  # fmt: skip


def story(text: str) -> str | None:
    """What stands behind "Answer:", up to the full stop.

    >>> story("Now he drops 3, so 9 - 3 = 6. Answer: 6 pens.")
    '6 pens'
    """
    found = re.fullmatch(r".*\bAnswer ?: ?([^.:]*[^.: ]) ?\.", text.strip(), re.DOTALL)
    return " ".join(found[1].split()) if found else None


def code(text: str) -> str | None:
    """What the function `f` returns for 1 to 9; None unless the text runs, asserts something, and its asserts hold.

    >>> code("def f(x):\\n    x = x * 2\\n    return x\\nassert f(3) == 6")
    '2 4 6 8 10 12 14 16 18'
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    kinds = [type(statement) for statement in tree.body]
    if kinds[:1] != [ast.FunctionDef] or len(kinds) < 2 or set(kinds[1:]) != {ast.Assert}:
        return None
    if not all(isinstance(node, _HARMLESS) for node in ast.walk(tree)):
        return None
    inside, *calls = (
        [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)] for statement in tree.body
    )
    if inside or not all(calls):
        return None  # a function that calls itself need not end, an assert that calls nothing says nothing
    if not all(isinstance(name, ast.Name) and name.id == "f" for names in calls for name in names):
        return None
    scope: dict[str, Any] = {"__builtins__": {}}
    try:
        exec(compile(tree, "<decoded>", "exec", optimize=0), scope)
        values = [scope["f"](x) for x in _INPUTS]
    except Exception:
        return None
    return " ".join(map(str, values)) if all(isinstance(value, int) for value in values) else None


def bill(text: str) -> str | None:
    """The lines of a bill in alphabetical order and its total; None where a key is missing or a number is wrong.

    >>> bill('{"items": [{"item": "pens", "count": 2, "price": 3, "cost": 6, "sum": 6}], "total": 6}')
    '2 pens at 3, 6 in all'
    """
    try:
        found = json.loads(text)
        lines, total = [], 0
        for line in found["items"]:
            total += line["count"] * line["price"]
            whole = {"item", "count", "price", "cost", "sum"} == set(line)
            if not whole or line["cost"] != line["count"] * line["price"] or line["sum"] != total:
                return None
            lines.append((str(line["item"]), f"{line['count']} {line['item']} at {line['price']}"))
        if set(found) != {"items", "total"} or found["total"] != total or not lines:
            return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return ", ".join([said for _, said in sorted(lines)] + [f"{total} in all"])


CHECKS: dict[str, Callable[[str], str | None]] = {"story": story, "code": code, "bill": bill}
