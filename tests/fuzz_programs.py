"""Random programs of arrays, as source text: what :mod:`tests.test_fuzz` plans and runs.

How can a program with comparisons, casts and argmax be equal on one device and on eight?  Sums in another order differ by
rounding, and a comparison makes a difference of 1e-17 one of 1.  So every array carries what is known of it:

* *exact*: all elements are multiples of 2⁻ᶠ below 2ⁱ in magnitude, sums of magnitudes included; while i + f fits the
  mantissa (8 bits of bfloat16, 24 of float32, 53 of float64) every order of additions gives the same bits;
* *rough*: anything else, always float64, kept below 2¹⁰ in magnitude.

What jumps (comparison, rounding, argmax, indices, narrow floats) takes exact arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

MANTISSA = {"float64": 53, "float32": 24, "bfloat16": 8}
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 12, 16, 16, 24, 32)
MOST_ELEMENTS = 4096
ROUGHEST = 10


@dataclass(frozen=True)
class Known:
    """An array of the program: its name, shape, dtype, and the bits (above and below the point) that it needs at most.

    ``fraction`` is None for a rough array; integers have fraction 0, Booleans one bit.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: float
    fraction: float | None = 0

    @property
    def is_float(self) -> bool:
        return self.dtype in MANTISSA

    @property
    def is_exact(self) -> bool:
        return self.fraction is not None

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass
class Program:
    """A program in the making, and the dice it is thrown with."""

    draw: Callable[[Any], Any]
    differentiated: bool
    pool: list[Known] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)

    def choose(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def pick(self, wanted: Callable[[Known], bool] = lambda known: True) -> Known | None:
        """One of the arrays of a kind; the youngest are likeliest."""
        found = [known for known in self.pool if wanted(known)]
        if not found:
            return None
        chosen: Known = self.choose(found + found[-4:])
        return chosen

    def fits(self, dtype: str, whole: float, fraction: float | None) -> bool:
        """Whether an array that needs so many bits may be of this type."""
        if fraction is None:
            return dtype == "float64"
        if dtype in MANTISSA:
            return whole + fraction <= MANTISSA[dtype]
        return dtype == "bool" or whole <= 30

    def add(self, text: str, whole: float, fraction: float | None, operands: list[Known]) -> bool:
        """Append a line if its result is small and exact enough; its type is what JAX says it is."""
        scope = {known.name: jax.ShapeDtypeStruct(known.shape, known.dtype) for known in self.pool}
        with jax.enable_x64(True):
            aval = jax.eval_shape(lambda arrays: eval(text, {**NAMESPACE, **arrays}), scope)
        dtype = str(aval.dtype)
        if aval.size > MOST_ELEMENTS or aval.size == 0 or aval.ndim > 5:
            return False
        if fraction is not None and dtype == "float64" and whole + fraction > 50:
            fraction = None
        if not self.fits(dtype, whole, fraction):
            return False
        if fraction is None and whole > ROUGHEST:
            text, whole = f"4 * jnp.tanh(({text}) / 2.0**{math.ceil(whole) - 2})", 2
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.pool.append(Known(name, tuple(aval.shape), dtype, whole, fraction))
        self.used.update(known.name for known in operands)
        return True


NAMESPACE = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}

Maker = Callable[[Program], bool]


def _rough(known: Known) -> bool:
    return known.dtype == "float64"


def _smooth_or_exact(program: Program) -> Callable[[Known], bool]:
    """What a function with kinks takes: anything, but in a differentiated program only what is exact."""
    return lambda known: known.is_exact or not program.differentiated


# ------------------------------------------------------------------------------------------------------- pointwise


def unary_smooth(p: Program) -> bool:
    x = p.pick(_rough)
    if x is None:
        return False
    form = p.choose(
        (
            "jnp.tanh({0})",
            "jnp.sin({0})",
            "jnp.cos({0})",
            "jax.nn.sigmoid({0})",
            "jnp.exp(-{0} * {0})",
            "jnp.sqrt(1 + {0} * {0})",
            "jnp.log1p({0} * {0})",
            "lax.rsqrt(1 + {0} * {0})",
            "lax.erf({0})",
            "1 / (1 + {0} * {0})",
            "jnp.expm1(jnp.sin({0}))",
            "jnp.arctan2({0}, 1 + {0} * {0})",
            "lax.integer_pow(jnp.tanh({0}), 3)",
            "jnp.cbrt(2 + jnp.sin({0}))",
            "jax.nn.softmax(jnp.sin({0}), axis=-1)" if x.rank else "jnp.sinh(jnp.sin({0}))",
            "jax.nn.logsumexp(jnp.sin({0}), axis=0)" if x.rank else "jnp.arcsinh({0})",
        )
    )
    return p.add(form.format(x.name), max(x.whole, 3), None, [x])


def unary_kinked(p: Program) -> bool:
    x = p.pick(lambda known: known.dtype != "bool" and _smooth_or_exact(p)(known))
    if x is None:
        return False
    form = p.choose(
        ("jnp.abs({0})", "jnp.maximum({0}, 0)", "-{0}", "jnp.clip({0}, -1, 2)", "lax.optimization_barrier({0})")
    )
    return p.add(form.format(x.name), max(x.whole, 1), x.fraction, [x])


def rounding(p: Program) -> bool:
    x = p.pick(lambda known: known.is_float and known.is_exact)
    if x is None:
        return False
    form = p.choose(("jnp.floor({0})", "jnp.ceil({0})", "jnp.round({0})", "jnp.sign({0})", "lax.stop_gradient({0})"))
    return p.add(form.format(x.name), x.whole + 1, x.fraction, [x])


def cast(p: Program) -> bool:
    x = p.pick(lambda known: known.is_exact)
    if x is None:
        return False
    dtype = p.choose(("float64", "float64", "float32", "bfloat16", "int32", "int64", "int8", "bool"))
    if dtype == "int8" and x.whole > 6:
        return False
    fraction = 0 if dtype not in MANTISSA else x.fraction
    return p.add(f"({x.name}).astype(jnp.{dtype}{'_' if dtype == 'bool' else ''})", x.whole, fraction, [x])


def binary(p: Program) -> bool:
    x = p.pick(lambda known: known.dtype != "bool")
    if x is None:
        return False
    y = p.pick(lambda known: known.dtype == x.dtype and (known.shape == x.shape or not known.shape))
    assert y is not None
    form = p.choose(("{0} + {1}", "{0} - {1}", "{0} * {1}", "jnp.maximum({0}, {1})", "jnp.minimum({0}, {1})"))
    if "imum" in form and not (_smooth_or_exact(p)(x) and _smooth_or_exact(p)(y)):
        return False
    fraction = None
    if "*" in form:
        whole = x.whole + y.whole
        if x.fraction is not None and y.fraction is not None:
            fraction = x.fraction + y.fraction
    else:
        whole = max(x.whole, y.whole) + 1
        if x.fraction is not None and y.fraction is not None:
            fraction = max(x.fraction, y.fraction)
    if x.dtype == "int8" and whole > 6:
        return False
    return p.add(form.format(x.name, y.name), whole, fraction, [x, y])


def integers(p: Program) -> bool:
    x = p.pick(lambda known: known.dtype.startswith("int") and known.dtype != "int8")
    if x is None:
        return False
    form = p.choose(
        ("{0} % 5", "{0} // 3", "{0} & 6", "{0} | 1", "{0} ^ 3", "{0} << 1", "{0} >> 1", "lax.population_count({0})")
    )
    return p.add(form.format(x.name), max(x.whole + 1, 7), 0, [x])


def booleans(p: Program) -> bool:
    x = p.pick(lambda known: known.is_exact)
    if x is None:
        return False
    y = p.pick(lambda known: known.dtype == x.dtype and known.is_exact and known.shape == x.shape)
    assert y is not None
    forms = (
        ("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}")
        if x.dtype == "bool"
        else ("{0} > {1}", "{0} <= {1}", "{0} == {1}", "{0} > 0")
    )
    return p.add(p.choose(forms).format(x.name, y.name), 1, 0, [x, y])


def select(p: Program) -> bool:
    which = p.pick(lambda known: known.dtype == "bool")
    if which is None:
        return False
    x = p.pick(lambda known: known.shape == which.shape and known.dtype != "bool")
    y = x and p.pick(lambda known: known.shape == which.shape and known.dtype == x.dtype)
    if x is None or y is None:
        return False
    fraction = None if x.fraction is None or y.fraction is None else max(x.fraction, y.fraction)
    return p.add(f"jnp.where({which.name}, {x.name}, {y.name})", max(x.whole, y.whole), fraction, [which, x, y])


# ------------------------------------------------------------------------------------------------------- shapes


def _axis(p: Program, x: Known) -> int:
    axis: int = p.choose(range(x.rank))
    return axis


def reshaping(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0)
    if x is None:
        return False
    axis = _axis(p, x)
    size = x.shape[axis]
    order = p.draw(st.permutations(range(x.rank)))
    divisor = p.choose([d for d in range(1, size + 1) if size % d == 0])
    split = (*x.shape[:axis], divisor, size // divisor, *x.shape[axis + 1 :])
    forms = [
        f"{x.name}.reshape(-1)",
        f"{x.name}.reshape({split})",
        f"jnp.transpose({x.name}, {tuple(order)})",
        f"jnp.expand_dims({x.name}, {axis})",
        f"jnp.flip({x.name}, {axis})",
        f"jnp.roll({x.name}, {p.choose(range(1, 4))}, {axis})",
        f"jnp.swapaxes({x.name}, 0, {axis}).reshape({x.shape[axis]}, -1)",
        f"jnp.broadcast_to({x.name}, {(p.choose((2, 3, 8)), *x.shape)})",
        f"jnp.repeat({x.name}, 2, axis={axis})",
        f"jnp.tile({x.name}, {(2,) + (1,) * (x.rank - 1)})",
        f"jnp.squeeze({x.name})",
    ]
    return p.add(p.choose(forms), x.whole, x.fraction, [x])


def slicing(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0)
    if x is None:
        return False
    axis = _axis(p, x)
    size = x.shape[axis]
    start = p.choose(range(size))
    stop = p.choose(range(start + 1, size + 1))
    step = p.choose((1, 1, 2))
    low, high, inner = p.choose((0, 1, 2)), p.choose((0, 1, 3)), p.choose((0, 0, 1))
    widths = ", ".join(f"({low}, {high}, {inner})" if dim == axis else "(0, 0, 0)" for dim in range(x.rank))
    forms = [f"lax.slice_in_dim({x.name}, {start}, {stop}, {step}, {axis})"]
    if x.dtype != "bool":
        forms.append(f"lax.pad({x.name}, jnp.zeros((), {x.name}.dtype), [{widths}])")
    return p.add(p.choose(forms), x.whole, x.fraction, [x])


def concatenation(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0)
    if x is None:
        return False
    axis = _axis(p, x)
    rest = x.shape[:axis] + x.shape[axis + 1 :]
    y = p.pick(
        lambda known: (
            known.rank == x.rank and known.dtype == x.dtype and known.shape[:axis] + known.shape[axis + 1 :] == rest
        )
    )
    assert y is not None
    function = p.choose(("concatenate", "stack")) if x.shape == y.shape else "concatenate"
    fraction = None if x.fraction is None or y.fraction is None else max(x.fraction, y.fraction)
    return p.add(f"jnp.{function}([{x.name}, {y.name}], {axis})", max(x.whole, y.whole), fraction, [x, y])


def _index(p: Program) -> Known | None:
    return p.pick(lambda known: known.dtype in ("int32", "int64"))


def dynamic(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0)
    i = _index(p)
    if x is None or i is None:
        return False
    axis = _axis(p, x)
    size = p.choose(range(1, x.shape[axis] + 1))
    start = f"jnp.sum({i.name})" if i.rank else i.name
    forms = [f"lax.dynamic_slice_in_dim({x.name}, {start}, {size}, {axis})"]
    y = p.pick(
        lambda k: k.dtype == x.dtype and k.rank == x.rank and all(a <= b for a, b in zip(k.shape, x.shape, strict=True))
    )
    assert y is not None
    starts = ", ".join(f"({start}).astype(jnp.int32)" if dim == axis else "jnp.int32(0)" for dim in range(x.rank))
    forms.append(f"lax.dynamic_update_slice({x.name}, {y.name}, ({starts},))")
    fraction = None if x.fraction is None or y.fraction is None else max(x.fraction, y.fraction)
    return p.add(p.choose(forms), max(x.whole, y.whole), fraction, [x, y, i])


def gathering(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0)
    i = p.pick(lambda known: known.dtype in ("int32", "int64") and known.rank <= 2)
    if x is None or i is None:
        return False
    axis = _axis(p, x)
    mode = p.choose(("clip", "wrap", "fill")) if x.is_float else p.choose(("clip", "wrap"))
    tail = ", fill_value=0" if mode == "fill" else ""
    forms = [f"jnp.take({x.name}, {i.name}, axis={axis}, mode={mode!r}{tail})"]
    if i.rank == 1 and x.rank == 2:
        forms.append(f"{x.name}[jnp.arange({i.shape[0]}) % {x.shape[0]}, {i.name} % {x.shape[1]}]")
    if i.rank == x.rank and i.shape[:axis] + i.shape[axis + 1 :] == x.shape[:axis] + x.shape[axis + 1 :]:
        forms += [f"jnp.take_along_axis({x.name}, {i.name} % {x.shape[axis]}, axis={axis})"] * 2
    return p.add(p.choose(forms), x.whole, x.fraction, [x, i])


def scattering(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.dtype != "bool" and known.dtype != "int8")
    i = p.pick(lambda known: known.dtype in ("int32", "int64") and known.rank == 1)
    if x is None or i is None:
        return False
    rows = (*i.shape, *x.shape[1:])
    y = p.pick(lambda known: known.dtype == x.dtype and known.shape in (rows, ()))
    how = p.choose(("add", "max", "min", "add"))
    if how != "add" and not (_smooth_or_exact(p)(x) and (y is None or _smooth_or_exact(p)(y))):
        return False
    update = y.name if y is not None else "1"
    whole = max(x.whole, y.whole if y is not None else 1) + (math.log2(i.shape[0]) + 1 if how == "add" else 0)
    fraction = (
        None
        if x.fraction is None or (y is not None and y.fraction is None)
        else max(x.fraction, y.fraction or 0 if y is not None else 0)
    )
    mode = p.choose(("drop", "clip"))
    return p.add(f"{x.name}.at[{i.name}].{how}({update}, mode={mode!r})", whole, fraction, [x, i, *([y] if y else [])])


# ------------------------------------------------------------------------------------------------------- reductions


def reduction(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.dtype != "bool")
    if x is None:
        return False
    axes = tuple(sorted(p.draw(st.sets(st.sampled_from(range(x.rank)), min_size=1))))
    count = math.prod(x.shape[axis] for axis in axes)
    function = p.choose(("sum", "sum", "max", "min", "mean", "prod"))
    if function in ("max", "min") and not _smooth_or_exact(p)(x):
        return False
    if x.dtype == "int8" and function == "sum":
        return False  # JAX widens the sum of small integers
    whole, fraction = x.whole, x.fraction
    name = x.name
    if function == "sum":
        whole += math.log2(count)
    elif function in ("mean", "prod"):
        if x.dtype != "float64":
            return False
        whole, fraction = max(x.whole, 1), None
        if function == "prod":
            name, whole = f"jnp.cos({name})", 1
    keep = p.choose((True, False))
    return p.add(f"jnp.{function}({name}, axis={axes}, keepdims={keep})", whole, fraction, [x])


def bool_reduction(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.dtype == "bool")
    if x is None:
        return False
    axis = _axis(p, x)
    function = p.choose(("any", "all", "sum", "argmax"))
    return p.add(f"jnp.{function}({x.name}, axis={axis})", 6, 0, [x])


def position(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.is_exact and known.dtype != "bool")
    if x is None:
        return False
    axis = _axis(p, x)
    count = p.choose(range(1, x.shape[-1] + 1))
    forms = [f"jnp.{name}({x.name}, axis={axis})" for name in ("argmax", "argmin", "argsort")]
    if x.dtype != "int8":
        forms.append(f"lax.top_k({x.name}, {count})[1]")
    return p.add(p.choose(forms), 6, 0, [x])


def sorting(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.dtype != "bool" and _smooth_or_exact(p)(known))
    if x is None:
        return False
    axis = _axis(p, x)
    count = p.choose(range(1, x.shape[-1] + 1))
    return p.add(
        p.choose((f"jnp.sort({x.name}, axis={axis})", f"lax.top_k({x.name}, {count})[0]")), x.whole, x.fraction, [x]
    )


def cumulative(p: Program) -> bool:
    x = p.pick(lambda known: known.rank > 0 and known.dtype not in ("bool", "int8"))
    if x is None:
        return False
    axis, reverse = _axis(p, x), p.choose((True, False))
    function = p.choose(("cumsum", "cummax", "cummin"))
    if function != "cumsum" and not _smooth_or_exact(p)(x):
        return False
    whole = x.whole + (math.log2(x.shape[axis]) if function == "cumsum" else 0)
    return p.add(f"lax.{function}({x.name}, axis={axis}, reverse={reverse})", whole, x.fraction, [x])


def window(p: Program) -> bool:
    x = p.pick(lambda known: known.rank >= 2 and known.dtype == "float64" and _smooth_or_exact(p)(known))
    if x is None:
        return False
    axis = _axis(p, x)
    sizes = tuple(2 if dim == axis else 1 for dim in range(x.rank))
    padding, stride = p.choose(("SAME", "VALID")), p.choose((1, 2))
    if x.shape[axis] < 2:
        return False
    strides = tuple(stride if dim == axis else 1 for dim in range(x.rank))
    if p.choose((True, False)):
        return p.add(
            f"lax.reduce_window({x.name}, 0.0, lax.add, {sizes}, {strides}, {padding!r})", x.whole + 1, x.fraction, [x]
        )
    if padding == "SAME":
        return False  # what is padded is -inf where a window sees nothing else
    return p.add(
        f"lax.reduce_window({x.name}, -jnp.inf, lax.max, {sizes}, {strides}, 'VALID')", x.whole, x.fraction, [x]
    )


# ------------------------------------------------------------------------------------------------------- contractions


def contraction(p: Program) -> bool:
    x = p.pick(lambda known: known.is_float and known.rank > 0)
    if x is None:
        return False
    y = p.pick(lambda known: known.dtype == x.dtype and known.rank > 0)
    assert y is not None
    pairs = [(a, b) for a in range(x.rank) for b in range(y.rank) if x.shape[a] == y.shape[b]]
    if not pairs:
        return False
    contracted = p.choose(pairs)
    rest = [(a, b) for a, b in pairs if a != contracted[0] and b != contracted[1]]
    batch = p.choose([*rest, None]) if rest else None
    batches = "((), ())" if batch is None else f"(({batch[0]},), ({batch[1]},))"
    whole = x.whole + y.whole + math.log2(x.shape[contracted[0]])
    fraction = None if x.fraction is None or y.fraction is None else x.fraction + y.fraction
    numbers = f"((({contracted[0]},), ({contracted[1]},)), {batches})"
    return p.add(f"lax.dot_general({x.name}, {y.name}, {numbers})", whole, fraction, [x, y])


def convolution(p: Program) -> bool:
    x = p.pick(lambda known: known.dtype == "float64" and known.rank in (3, 4))
    y = x and p.pick(lambda k: k.dtype == "float64" and k.rank == x.rank)
    if x is None or y is None:
        return False
    space = x.rank - 2
    if any(size > 5 for size in y.shape[2:]):
        return False
    groups = x.shape[1] // y.shape[1] if x.shape[1] % y.shape[1] == 0 else 0
    if groups == 0 or y.shape[0] % groups:
        return False
    stride = p.choose((1, 2))
    whole = x.whole + y.whole + math.log2(math.prod(y.shape[1:]))
    fraction = None if x.fraction is None or y.fraction is None else x.fraction + y.fraction
    return p.add(
        f"lax.conv_general_dilated({x.name}, {y.name}, {(stride,) * space}, 'SAME', feature_group_count={groups})",
        whole,
        fraction,
        [x, y],
    )


# ------------------------------------------------------------------------------------------------------- inner programs


def loop(p: Program) -> bool:
    x = p.pick(lambda known: known.dtype == "float64" and known.rank > 0)
    if x is None:
        return False
    y = p.pick(lambda known: known.dtype == "float64" and known.shape == x.shape[1:])
    start = y.name if y is not None else f"jnp.zeros({x.shape[1:]})"
    which, reverse = p.choose((0, 1)), p.choose((True, False))
    forms = [
        f"lax.scan(lambda c, r: (c * 0.5 + jnp.sin(r), c * r), {start}, {x.name}, reverse={reverse})[{which}]",
        f"lax.scan(lambda c, r: (jnp.tanh(c + r), jnp.sum(c)), {start}, {x.name}, unroll=2)[{which}]",
        f"lax.map(lambda r: jnp.cumsum(jnp.sin(r)) if r.ndim == 1 else jnp.cos(r), {x.name})",
        f"lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i * 0.25, {x.name})",
        f"lax.fori_loop(0, {x.shape[0]}, lambda i, c: c * 0.5 + {x.name}[i], {start})",
    ]
    i = _index(p)
    if i is not None and not p.differentiated:
        forms.append(
            f"lax.while_loop(lambda c: c[0] < jnp.sum({i.name}) % 5, lambda c: (c[0] + 1, jnp.sin(c[1]) + 0.5), "
            f"(jnp.zeros((), {i.name}.dtype), {x.name}))[1]"
        )
    return p.add(p.choose(forms), max(x.whole, y.whole if y is not None else 0) + 4, None, [x, *([y] if y else [])])


def branch(p: Program) -> bool:
    x = p.pick(_rough)
    which = p.pick(lambda known: known.is_exact)
    y = x and p.pick(lambda known: known.dtype == "float64" and known.shape == x.shape)
    if x is None or y is None or which is None:
        return False
    pair = f"{x.name}, {y.name}"
    if which.dtype in ("int32", "int64"):
        branches = "[lambda a, b: a + b, lambda a, b: jnp.sin(a), lambda a, b: b - jnp.mean(a)]"
        text = f"lax.switch(jnp.max({which.name}) % 3, {branches}, {pair})"
    else:
        text = f"lax.cond(jnp.any({which.name} > 1), lambda a, b: a - b, lambda a, b: jnp.sum(a) * 0.01 + b, {pair})"
    return p.add(text, max(x.whole, y.whole) + 6, None, [x, y, which])


def wrapped(p: Program) -> bool:
    x = p.pick(_rough)
    if x is None:
        return False
    form = p.choose(
        (
            "jax.jit(lambda a: jnp.sin(a) * 2)({0})",
            "jax.checkpoint(lambda a: jnp.tanh(jnp.sin(a)))({0})",
            "jax.vmap(lambda a: jnp.sin(a) - jnp.mean(a))({0})" if x.rank else "jax.nn.gelu({0})",
            "jax.grad(lambda a: jnp.sum(jnp.sin(a) ** 2))({0})",
            "jax.nn.silu({0})",
        )
    )
    return p.add(form.format(x.name), x.whole + 2, None, [x])


def counted(p: Program) -> bool:
    shape = tuple(p.choose(SIZES) for _ in range(p.choose((1, 2))))
    dim = p.choose(range(len(shape)))
    dtype = p.choose(("int32", "float64", "bfloat16"))
    return p.add(f"lax.broadcasted_iota(jnp.{dtype}, {shape}, {dim})", 6, 0, [])


MAKERS: tuple[Maker, ...] = (
    unary_smooth,
    unary_kinked,
    rounding,
    cast,
    cast,
    binary,
    binary,
    integers,
    booleans,
    select,
    reshaping,
    reshaping,
    slicing,
    concatenation,
    dynamic,
    gathering,
    gathering,
    scattering,
    reduction,
    reduction,
    bool_reduction,
    position,
    sorting,
    cumulative,
    window,
    contraction,
    contraction,
    contraction,
    convolution,
    convolution,
    loop,
    branch,
    wrapped,
    counted,
)


# ------------------------------------------------------------------------------------------------------- whole programs


@dataclass(frozen=True)
class Example:
    """A step as source text, and its arguments."""

    source: str
    state: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]

    def step(self) -> Callable[..., Any]:
        """The step, from its text."""
        scope: dict[str, Any] = dict(NAMESPACE)
        exec(self.source, scope)
        return scope["step"]  # type: ignore[no-any-return]


def _shape_of(p: Program) -> tuple[int, ...]:
    rank = p.choose((0, 1, 1, 2, 2, 2, 3, 4))
    shape: tuple[int, ...] = ()
    for _ in range(rank):
        room = MOST_ELEMENTS // 4 // math.prod(shape)
        shape += (p.choose([size for size in SIZES if size <= room]),)
    return shape


@st.composite
def examples(draw: Callable[[Any], Any]) -> Example:
    """Steps of 4 to 14 operators over 2 or 3 leaves of state and 2 of batch."""
    p = Program(draw, differentiated=draw(st.booleans()))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes: list[tuple[int, ...]] = []
    state: dict[str, np.ndarray] = {}
    batch: dict[str, np.ndarray] = {}
    rows = p.choose((8, 16, 16, 32, 12, 6))
    for name, arrays in (("w0", state), ("w1", state), ("k", state), ("x", batch), ("i", batch)):
        shape = p.choose((_shape_of(p), *shapes[:1]))
        if arrays is batch:
            shape = (rows, *shape[1:2])
        integral = name in ("k", "i")
        array = random.integers(-3, 9, shape) if integral else random.integers(-32, 33, shape) / 8
        arrays[name] = np.asarray(array, np.int32 if integral else np.float64)
        p.pool.append(Known(name, shape, str(arrays[name].dtype), 4 if integral else 2, 0 if integral else 3))
        shapes.append(shape)
    wanted, tried = draw(st.integers(4, 14)), 0
    while len(p.lines) < wanted and tried < 6 * wanted:
        tried += 1
        p.choose(MAKERS)(p)
    return Example(_text(p, state, batch), state, batch)


def _text(p: Program, state: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> str:
    """The step: state in, state and metrics out; everything that nothing uses is a metric."""
    ends = [known for known in p.pool[len(state) + len(batch) :] if known.name not in p.used]
    metrics = ", ".join(f'"{known.name}": {known.name}' for known in ends)
    floats = [known for known in ends if known.dtype == "float64"]
    take = [f'    {name} = state["{name}"]' for name in state] + [f'    {name} = batch["{name}"]' for name in batch]
    body = [f"    {line}" for line in p.lines]
    if p.differentiated:
        sums = " + ".join(f"jnp.mean(jnp.sin({known.name}))" for known in floats) or "jnp.sum(jnp.sin(w0))"
        return "\n".join(
            [
                "def forward(weights, state, batch):",
                *take,
                '    w0, w1 = weights["w0"], weights["w1"]',
                *body,
                f"    return {sums}, {{{metrics}}}",
                "",
                "def step(state, batch):",
                '    weights = {"w0": state["w0"], "w1": state["w1"]}',
                "    (loss, aux), grads = jax.value_and_grad(forward, has_aux=True)(weights, state, batch)",
                "    new = {name: weights[name] - 0.5 * grads[name] for name in weights}",
                '    return {**new, "k": state["k"] + 1}, {"loss": loss, **aux}',
            ]
        )
    news = []
    for name in state:
        own = next(known for known in p.pool if known.name == name)
        like = [known for known in p.pool if (known.shape, known.dtype) == (own.shape, own.dtype) and known is not own]
        if like:
            news.append(f'"{name}": {name} + {p.choose(like).name}')
        elif own.dtype == "float64" and floats:
            news.append(f'"{name}": {name} + jnp.mean({p.choose(floats).name})')
        else:
            news.append(f'"{name}": {name} * 2')
    returned = f"    return {{{', '.join(news)}}}, {{{metrics}}}"
    return "\n".join(["def step(state, batch):", *take, *body, returned])
