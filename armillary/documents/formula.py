"""Formulas of figures: one text, in Python's syntax, that Python evaluates and a spreadsheet calculates.

    evaluate("devices * price / 3600", {"devices": 8, "price": 2.5})
    to_excel("devices * price / 3600")                       # ((devices*price)/3600)

Names are figures; the functions are those of FUNCTIONS. `where(a > b, x, y)` is x where the condition holds, else y.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from math import ceil, exp, log, sqrt
from typing import Any

FUNCTIONS: Mapping[str, tuple[str, Callable[..., float]]] = {
    "min": ("MIN({})", min),
    "max": ("MAX({})", max),
    "exp": ("EXP({})", exp),
    "log": ("LN({})", log),
    "sqrt": ("SQRT({})", sqrt),
    "ceil": ("ROUNDUP({},0)", ceil),
}
OPERATORS: Mapping[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.Pow: ("^", operator.pow),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}


def names(text: str) -> set[str]:
    """Figures that a formula refers to."""
    return set(_names(_parse(text)))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and node.id not in FUNCTIONS and node.id != "where":
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """The formula's value with these figures."""
    return float(_value(_parse(text), values))


def to_excel(text: str) -> str:
    """The formula as a spreadsheet reads it, without the equals sign; every operation in parentheses, because Excel's
    minus binds more tightly than its power."""
    return _excel(_parse(text))


def substitute(text: str, by: Mapping[str, str]) -> str:
    """The formula with figures replaced by formulas."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return _parse(by[node.id]) if node.id in by else node

    return ast.unparse(Replace().visit(_parse(text)))


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.AST, values: Mapping[str, float]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return OPERATORS[type(op)][1](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id="where"), args=[condition, yes, no]):
            return _value(yes if _value(condition, values) else no, values)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name][1](*(_value(argument, values) for argument in arguments))
    raise AssertionError(f"a formula has no {ast.unparse(node)}")


def _excel(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=value):
            return repr(value)
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(0-{_excel(operand)})"
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({_excel(left)}{OPERATORS[type(op)][0]}{_excel(right)})"
        case ast.Call(func=ast.Name(id="where"), args=arguments):
            return f"IF({','.join(map(_excel, arguments))})"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name][0].format(",".join(map(_excel, arguments)))
    raise AssertionError(f"a formula has no {ast.unparse(node)}")
