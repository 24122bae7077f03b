"""From a Python function and its arguments to one closed program of arrays.

A call ``f(a, b, c=…)`` of pytrees is seen as a function of leaves,

    (x₁ … xₙ, h₁ … hₖ) ↦ (y₁ … yₘ)

where ``x`` are the leaves of the arguments that are not static, ``h`` the arrays that ``f`` closes over (*hidden*
inputs), and ``y`` the leaves of what ``f`` returns.  Every leaf has a path, like ``state.params['Dense_0']['kernel']``;
it is by paths, never by the equality of tree structures, that two calls are recognised as alike: two train states made
by the same code carry optimizers that compare unequal.

The function runs once, on abstract values; its own exceptions pass through untouched.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from autopar import _compat
from autopar.errors import TraceError
from autopar.graph.inline import inline

Keys = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """A call taken apart: array leaves, how to put them back, and what is static.

    ``keys[i]`` is the path of ``leaves[i]``: the argument's name, then one string per step, whose concatenation
    reads like Python. ``static`` holds (argument's name, value) pairs.
    """

    leaves: tuple[Any, ...]
    keys: tuple[Keys, ...]
    tree: Any
    static: tuple[tuple[str, Any], ...]
    argument_names: tuple[str, ...]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]] = field(repr=False, compare=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves' paths as text."""
        return tuple("".join(key) for key in self.keys)


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """One function of arrays.

    ``jaxpr`` is flat (see :mod:`autopar.graph.inline`) and closed without constants. Its inputs are the visible leaves,
    then the hidden ones, whose values are ``hidden``; ``in_keys``, ``in_avals`` run over both, in the order of
    ``jaxpr.invars``, and ``out_keys``, ``out_avals`` in that of ``jaxpr.outvars``. ``in_tree`` is the structure of
    ``(args, kwargs)`` without static arguments, ``out_tree`` that of the result.
    """

    name: str
    jaxpr: Any = field(repr=False)
    hidden: tuple[Any, ...] = field(repr=False)
    in_keys: tuple[Keys, ...]
    out_keys: tuple[Keys, ...]
    in_tree: Any = field(repr=False)
    out_tree: Any = field(repr=False)
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    static: tuple[tuple[str, Any], ...] = ()
    argument_names: tuple[str, ...] = ()

    @property
    def num_visible(self) -> int:
        """How many of the inputs the caller passes."""
        return len(self.in_keys) - len(self.hidden)

    @cached_property
    def in_paths(self) -> tuple[str, ...]:
        """Paths of the inputs, ``state.params['Dense_0']['kernel']``; of a hidden one ``<closure>[0]``."""
        return tuple("".join(keys) for keys in self.in_keys)

    @cached_property
    def out_paths(self) -> tuple[str, ...]:
        """Paths of the outputs below ``result``, ``result[0].params['Dense_0']['kernel']``."""
        return tuple("".join(keys) for keys in self.out_keys)


# -------------------------------------------------------------------------------------------- taking a call apart


def flatten_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Call:
    """Take a call apart into leaves and static arguments.

    ``static_argnums`` and ``static_argnames`` mean what they mean in ``jax.jit``; naming an argument in one is enough.
    Raises TraceError where the arguments do not fit the function, or a static one cannot be hashed.
    """
    names = _positional_names(function, args, kwargs)
    by_name = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    _check_static(function, by_name, numbers)
    count = _count_of_positional(function, len(args))
    by_number = {number + count if number < 0 else number for number in numbers}
    by_name |= {names[number] for number in by_number if number < len(names)} - {""}
    by_name |= _names_of_numbers(function, by_number)

    static_positions = {i for i in range(len(args)) if i in by_number or names[i] in by_name}
    static_names = set(kwargs) & by_name
    static = [(names[i], args[i]) for i in sorted(static_positions)]
    static += [(name, kwargs[name]) for name in sorted(static_names)]
    for name, value in static:
        _check_hashable(name, value)

    dynamic_args = tuple(value for i, value in enumerate(args) if i not in static_positions)
    dynamic_kwargs = {name: value for name, value in kwargs.items() if name not in static_names}
    dynamic_names = tuple(name for i, name in enumerate(names) if i not in static_positions)
    with_path, tree = tree_flatten_with_path((dynamic_args, dynamic_kwargs))

    def keys_of(path: tuple[Any, ...]) -> Keys:
        head = dynamic_names[path[1].idx] if path[0].idx == 0 else path[1].key
        return (head, *(keystr((step,)) for step in path[2:]))

    def rebuild(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changing, by_keyword = tree_unflatten(tree, leaves)
        remaining = iter(changing)
        positional = tuple(args[i] if i in static_positions else next(remaining) for i in range(len(args)))
        return positional, {**by_keyword, **{name: kwargs[name] for name in static_names}}

    return Call(
        leaves=tuple(leaf for _, leaf in with_path),
        keys=tuple(keys_of(path) for path, _ in with_path),
        tree=tree,
        static=tuple(static),
        argument_names=(*dynamic_names, *sorted(dynamic_kwargs)),
        rebuild=rebuild,
    )


def _positional_names(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """A name for each positional argument: the parameter's, or ``args[2]`` where it has none."""
    parameters = _parameters(function)
    if parameters is None:
        return tuple(f"args[{i}]" for i in range(len(args)))
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(f"{_name_of(function)} cannot be called with these arguments: {error}.") from error
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(args) - len(names))]
    return tuple(names[: len(args)])


def _names_of_numbers(function: Callable[..., Any], numbers: set[int]) -> set[str]:
    """Names of the parameters with these positions, for a static argument that is passed by keyword."""
    parameters = _parameters(function) or ()
    return {p.name for i, p in enumerate(parameters) if i in numbers and p.kind is p.POSITIONAL_OR_KEYWORD}


def _count_of_positional(function: Callable[..., Any], passed: int) -> int:
    """What a negative position counts from: the positional parameters, or the arguments where these are open."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return passed
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables written in C tell no signature
        return None


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _check_static(function: Callable[..., Any], names: set[str], numbers: tuple[int, ...]) -> None:
    """Refuse static arguments that the function does not have, where its signature can tell."""
    parameters = _parameters(function)
    if parameters is None:
        return
    kinds = {parameter.kind for parameter in parameters}
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown: list[Any] = []
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unknown += [f"static_argnames={name!r}" for name in sorted(names - set(named))]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        count = _count_of_positional(function, 0)
        unknown += [f"static_argnums={number}" for number in numbers if not -count <= number < count]
    if unknown:
        raise TraceError(
            f"{unknown[0]} names no argument of {_name_of(function)}, which has {', '.join(named) or 'none'}."
        )


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TraceError(
            f"The static argument {name!r} is of type {type(value).__name__}, which cannot be hashed, so two calls "
            "could not be told apart. Pass something hashable (a tuple, a frozen dataclass), or do not make it static."
        ) from error


# ------------------------------------------------------------------------------------------------------- tracing


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> TracedProgram:
    """Run ``function`` once on abstract values and return the program that it is.

    Leaves may be arrays, NumPy arrays, Python scalars, typed keys or ``jax.ShapeDtypeStruct``; only shapes, dtypes and
    weak types count. Raises TraceError for leaves and results that are no arrays, static arguments that cannot be
    hashed, values of an outer transformation, ``pmap``-style axis names, and NNX modules changed in place.
    """
    call = flatten_call(function, args, kwargs or {}, static_argnums=static_argnums, static_argnames=static_argnames)
    avals = tuple(aval_of_leaf(leaf, path) for leaf, path in zip(call.leaves, call.paths, strict=True))
    result: list[tuple[tuple[Keys, ...], Any]] = []

    def flat(*leaves: Any) -> list[Any]:
        arguments = call.rebuild(leaves)
        before = tree_leaves(arguments)
        out = function(*arguments[0], **arguments[1])
        with_path, out_tree = tree_flatten_with_path(out)
        _check_not_mutated(before, arguments, [leaf for _, leaf in with_path])
        out_keys = tuple(("result", *(keystr((step,)) for step in path)) for path, _ in with_path)
        for keys, (_, leaf) in zip(out_keys, with_path, strict=True):
            _check_result(leaf, "".join(keys), function)
        result.append((out_keys, out_tree))
        return [leaf for _, leaf in with_path]

    shapes = [_compat.shape_of(aval) for aval in avals]
    try:
        with jax.disable_jit(False):  # without jit a loop would run in Python, on values that have none yet
            closed = jax.make_jaxpr(flat)(*shapes)
    except NameError as error:
        _explain_axis_name(error, function)
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise TraceError(
            f"{_name_of(function)} uses a value that leaked out of another transformation. Return values instead of "
            f"storing them in variables outside of the function. JAX says: {error}"
        ) from error
    except _errors_of_nnx() as error:
        if "different trace level" in str(error):
            raise TraceError(_IN_PLACE) from error  # an NNX object that the function closes over
        raise

    (out_keys, out_tree) = result[-1]
    flat_program = inline(closed)
    hidden = tuple(_compat.consts_of(flat_program))
    jaxpr = _compat.jaxpr_of(flat_program)
    without_consts = _compat.make_closed_jaxpr(
        [*jaxpr.invars, *jaxpr.constvars], jaxpr.outvars, jaxpr.eqns, flat_program
    )
    hidden_keys = tuple((f"<closure>[{i}]",) for i in range(len(hidden)))
    return TracedProgram(
        name=_name_of(function),
        jaxpr=without_consts,
        hidden=hidden,
        in_keys=call.keys + hidden_keys,
        out_keys=out_keys,
        in_tree=call.tree,
        out_tree=out_tree,
        in_avals=avals + tuple(var.aval for var in jaxpr.constvars),
        out_avals=tuple(atom.aval for atom in jaxpr.outvars),
        static=call.static,
        argument_names=call.argument_names,
    )


def retracer(
    function: Callable[..., Any], call: Call, program: TracedProgram, batch: Sequence[int], **static: Any
) -> Callable[[int], TracedProgram]:
    """Traces the call again with another size of the batch, whose leaves are at the positions ``batch``.

    ``static`` are the options of :func:`trace`. The answer holds shapes only, none of the call's arrays.
    """
    shapes = [_compat.shape_of(aval) for aval in program.in_avals]
    args, kwargs = call.rebuild(shapes[: len(call.leaves)])
    abstract = flatten_call(function, args, kwargs, **static)

    def retrace(size: int) -> TracedProgram:
        leaves = list(abstract.leaves)
        for position in batch:
            leaf = leaves[position]
            leaves[position] = jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        args, kwargs = abstract.rebuild(leaves)
        return trace(function, args, kwargs, **static)

    return retrace


def aval_of_leaf(leaf: Any, path: str) -> Any:
    """The leaf's abstract value, or a TraceError that names the leaf."""
    if isinstance(leaf, _compat.Tracer):
        raise TraceError(
            f"{path} is a value of an outer transformation (jit, grad, vmap, …). A parallelized function stands "
            "outside of them: transform the function inside it instead, or call the undecorated function here."
        )
    try:
        return _compat.aval_of(leaf)
    except TypeError as error:
        argument = re.split(r"[.\[]", path, maxsplit=1)[0]
        kind = f"{type(leaf).__name__} of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
        raise TraceError(
            f"{path} is of type {kind}, which is no array that JAX knows. If it is an option rather than data, say "
            f"static_argnames={argument!r} (or static_argnums); else pass it as a NumPy array."
        ) from error


def _check_result(leaf: Any, path: str, function: Callable[..., Any]) -> None:
    try:
        _compat.aval_of(leaf)
    except TypeError as error:
        raise TraceError(
            f"{_name_of(function)} returns {type(leaf).__name__} at {path}, which is no array. Return arrays, scalars "
            "and containers of them only."
        ) from error


_UNBOUND_AXIS = re.compile(r"unbound axis name: ([^\s.]+)")


def _explain_axis_name(error: NameError, function: Callable[..., Any]) -> None:
    """Raise the fix where JAX complains about a ``pmap`` axis; another NameError is the user's own."""
    found = _UNBOUND_AXIS.search(str(error))
    if found is None:
        return
    axis = found.group(1)
    raise TraceError(
        f"{_name_of(function)} uses the axis name {axis!r}, as for pmap, but autopar traces the program of the whole "
        "batch: a mean over the batch is already global.\n"
        f"-  grads = jax.lax.pmean(grads, axis_name={axis!r})\n"
        "+  (drop this line, and the per-device leading axis of the arguments)"
    ) from error


def _errors_of_nnx() -> tuple[type[Exception], ...]:
    """What NNX raises where an object of another trace is changed; nothing unless it is in use."""
    return (ValueError, sys.modules["flax.errors"].FlaxError) if "flax.nnx" in sys.modules else ()


_IN_PLACE = (
    "This step changes an NNX object in place, and a traced function can change neither its arguments nor what it closes "
    "over. Split the object outside, merge it inside, and return its new state:\n"
    "+  graphdef, state = nnx.split(model)  # once, outside; pass state instead of model\n"
    "+  model = nnx.merge(graphdef, state)  # first line of the step; return nnx.state(model)"
)


def _check_not_mutated(before: Sequence[Any], arguments: Any, out_leaves: Sequence[Any]) -> None:
    """Refuse NNX objects changed in place whose new values are not returned: any transformation would lose them."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    kind = getattr(nnx, "Pytree", nnx.Module)
    nodes = tree_leaves(arguments, is_leaf=lambda node: isinstance(node, kind))
    if not any(isinstance(node, kind) for node in nodes):
        return
    known = {id(leaf) for leaf in (*before, *out_leaves)}
    if all(id(leaf) in known for leaf in tree_leaves(arguments)):
        return
    raise TraceError(_IN_PLACE)
