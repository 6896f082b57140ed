"""The jinja2 environment of chat templates: transformers' whitespace rules, tags, filters and globals, with a budget.

jinja2's sandbox keeps a template away from the program. What the template does with its own values is charged to a
budget (`template_budget.py`): each loop iteration, call, operator, filter and output, by its maximum cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from .template_budget import NODE, VALUE, OverBudgetError, charge, charge_format, charge_method, charge_operator, weigh
from .template_filters import charged, tojson

MAX_NODES = 2**14  # maximum nodes of a template's syntax tree
MAX_DATE_FORMAT = 256  # maximum characters of a date format
_UNBOUNDED = ("pprint", "striptags", "urlize", "wordwrap")  # filters of unbounded cost that chat templates do not need
_COMPARING = ("in eq == equalto ne != gt > greaterthan ge >= lt < lessthan le <= lower upper divisibleby").split()


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> Any:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace, without attribute names that lead out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace holds no name like {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Formatter(SandboxedFormatter):
    """jinja2's sandboxed formatter, which charges for each field."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        charge_format(value, format_spec)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        charge(weigh(value))
        return super().convert_field(value, conversion)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which charges for every operation whose cost is not constant."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge for an operator, then apply it."""
        charge_operator(operator, left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Charge for a call, then make it; of a value's own methods only those that templates need are allowed."""
        if isinstance(__obj, BuiltinMethodType | MethodType) and type(__obj.__self__).__module__ != "jinja2.runtime":
            owner, name = __obj.__self__, __obj.__name__
            if name == "join":
                args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            if type(owner).__module__ not in (__name__, "jinja2.utils"):
                charge_method(owner, name, (*args, *kwargs.values()))
        charge(VALUE + sum(map(weigh, args)) + sum(map(weigh, kwargs.values())))
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Charge for the key, which is hashed, then look it up."""
        charge(VALUE if isinstance(argument, str | int) else weigh(argument))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a replacement for a text's `str.format` that charges for each field; None for other values."""
        if super().wrap_str_format(value) is None:
            return None
        text, mapped = value.__self__, value.__name__ == "format_map"
        if isinstance(text, Markup):
            raise jinja2.exceptions.SecurityError("a chat template may not format what is marked as safe")

        def form(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, () if mapped else args, args[0] if mapped else kwargs)

        return form


def environment() -> Environment:
    """Return transformers' environment: its whitespace rules, loop controls, filters, globals, `{% generation %}`."""
    made = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=_printed
    )
    for name in _UNBOUNDED:
        del made.filters[name]
    made.filters = {name: charged(name, each) for name, each in made.filters.items()}
    made.filters |= {"tojson": tojson, " tick": _tick, " made": _charge_for, " copied": _copied, " searched": _searched}
    made.tests |= {name: charged(name, cast(Any, made.tests[name])) for name in _COMPARING}
    del made.globals["lipsum"]
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    made.globals["dict"] = lambda *args, **values: dict(*args, **values)
    made.globals["namespace"] = _Namespace
    return made


def parsed(made: Environment, source: str) -> nodes.Template:
    """Return a template's syntax tree; raise OverBudgetError if it is so large that compiling would take seconds."""
    tree = made.parse(source)
    if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
        raise OverBudgetError(f"it has more than {MAX_NODES:,} parts")
    return tree


def compiled(made: Environment, tree: nodes.Template) -> jinja2.Template:
    """Return the template of a syntax tree, after changing the tree to charge for what it does."""
    repeated: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
    for node in repeated:
        work = nodes.Const(_work(node.body))
        node.body.insert(0, nodes.ExprStmt(_through("tick", work)))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_through("tick", nodes.Const(_work([node.test]))), node.test)
    _Charging().visit(tree)
    tree.set_environment(made)
    for each in tree.find_all(nodes.Node):
        each.lineno = each.lineno or 1
    return jinja2.Template.from_code(made, made.compile(tree), made.make_globals(None))


def _work(body: list[Any]) -> int:
    inner = [each for node in body for each in (node, *node.find_all(nodes.Node))]
    return NODE * len(inner) + sum(len(each.data) for each in inner if isinstance(each, nodes.TemplateData))


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, f" {name}", [], [], None, None)


class _Charging(NodeTransformer):
    """Adds charges to what jinja2 offers no hook for: comparisons, `~`, slices, and list, tuple and dict literals."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(each.expr for each in node.ops)]
        contains = any(each.op in ("in", "notin") for each in node.ops)
        if contains or not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = self._charged(node.expr, "made")
            for each in node.ops:
                each.expr = self._charged(each.expr, "searched" if each.op in ("in", "notin") else "made")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._charged(each, "made") for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("copied", node).set_lineno(node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._charged(node, "made")

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def _charged(self, node: nodes.Expr, name: str) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        through = _through(name, node)
        through.set_lineno(node.lineno)
        return through


def _tick(work: Any) -> bool:
    charge(max(VALUE, work) if isinstance(work, int) else VALUE)  # a template may call it through `map`
    return True


def _charge_for(value: Any) -> Any:
    charge(weigh(value))
    return value


def _copied(value: Any) -> Any:
    charge(VALUE + (len(value) if isinstance(value, str) else NODE * len(value)))
    return value


def _searched(value: Any) -> Any:
    charge(VALUE if isinstance(value, dict) else weigh(value))
    return value


@jinja2.pass_context  # keeps jinja2 from calling it at compile time, outside of a budget
def _printed(_: Any, value: Any) -> Any:
    charge(weigh(value))
    return value


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise OverBudgetError(f"it formats a date with more than {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(form)
