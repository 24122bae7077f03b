"""The one place that knows how this JAX spells its internals.

Question of the file: which names of a jaxpr (classes, parameters, source frames) differ between the JAX versions that
we run on, and what is the one way in which everybody else asks for them?  Two facts shape it: from 0.12 on
``ClosedJaxpr is Jaxpr`` and a jaxpr carries its constants itself, and there ``scan`` says how its operands divide with
flat trees instead of two counts.  Nothing of ours is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sysconfig
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import jaxlib.version
from jax._src import config, core, debugging, distributed, dtypes, source_info_util
from jax._src import mesh as jax_mesh
from jax.experimental import topologies
from jax.interpreters import partial_eval

Var = jex.Var
DropVar = jex.DropVar
Literal = jex.Literal
Jaxpr = jex.Jaxpr
ClosedJaxpr = jex.ClosedJaxpr
JaxprEqn = jex.JaxprEqn
Primitive = jex.Primitive
Tracer = jax.core.Tracer

HEARTBEAT_SECONDS = 10
"""After so long without a sign of life a process of a world counts as dead."""
JOINING_SECONDS = 60

_ONE_CLASS: bool = id(ClosedJaxpr) == id(Jaxpr)

_LIBRARY_PACKAGES = ("jaxlib", "flax", "optax", "chex", "orbax", "treescope")


# ------------------------------------------------------------------------------------------------------ jaxprs


def is_jaxpr(value: Any) -> bool:
    """Whether the value is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def jaxpr_of(closed: Any) -> Any:
    """The open jaxpr of a closed one; an open one is returned as it is."""
    return getattr(closed, "jaxpr", closed)


def consts_of(closed: Any) -> Sequence[Any]:
    """The constants' values of a closed jaxpr (none for an open one)."""
    return getattr(closed, "consts", ())


def inner_jaxprs(equation: Any) -> list[Any]:
    """Every jaxpr in the parameters of an equation, open or closed, in parameter order."""
    found: list[Any] = []
    for value in equation.params.values():
        found += [item for item in (value if isinstance(value, tuple) else (value,)) if is_jaxpr(item)]
    return found


def make_closed_jaxpr(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    equations: Sequence[Any],
    like: Any,
    *,
    constvars: Sequence[Any] = (),
    consts: Sequence[Any] = (),
) -> Any:
    """A closed jaxpr of these parts; effects are those of the equations, debugging names those of ``like``."""
    debug = _debug_info_for(jaxpr_of(like).debug_info, len(invars), len(outvars))
    inputs = {*constvars, *invars}
    effects = {
        effect
        for equation in equations
        for effect in equation.effects
        if (var := _effect_input(effect)) is None or var in inputs
    }
    if _ONE_CLASS:
        return Jaxpr(  # type: ignore[call-arg]  # the stubs at hand may be those of the older version
            constvars, invars, outvars, equations, effects, debug_info=debug, consts=list(consts) or None
        )
    return ClosedJaxpr(Jaxpr(constvars, invars, outvars, equations, effects, debug), list(consts))


def _effect_input(effect: Any) -> Any:
    """The variable (a mutable reference) that an effect is about, if any."""
    var = getattr(effect, "input", None)
    return var if isinstance(var, Var) else None


def renamed_effects(effects: Any, names: Mapping[Any, Any]) -> Any:
    """Effects of an equation whose operands were renamed."""
    if not effects:
        return effects
    return {
        effect if (var := _effect_input(effect)) is None else effect.replace(names.get(var, var)) for effect in effects
    }


def eliminate_dead_code(jaxpr: Any, keep_inputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """``jaxpr`` (open, no constants) without equations that reach no output and have no effect, at any depth.

    Inputs not in ``keep_inputs`` go if unused. Returns the open jaxpr and which inputs remain.
    """
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), list(keep_inputs))


def lowering_context() -> Hashable:
    """All of JAX's configuration on which tracing and lowering depend: equal where both give the same."""
    context: Hashable = config.trace_context()
    return context


def _debug_info_for(info: Any, num_inputs: int, num_outputs: int) -> Any:
    """``info`` with as many argument and result names as the jaxpr has; ours are appended without a name."""

    def fit(names: Any, count: int) -> Any:
        if not isinstance(names, tuple) or len(names) == count:
            return names
        return (*names, *[""] * (count - len(names)))[:count]

    return info._replace(arg_names=fit(info.arg_names, num_inputs), result_paths=fit(info.result_paths, num_outputs))


# --------------------------------------------------------------------------------------------------- equations


@functools.cache
def optimization_barrier_primitive() -> Any:
    """The primitive of ``jax.lax.optimization_barrier``, which ``jax.extend`` does not list."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


@functools.cache
def cpu_keeps_barriers() -> bool:
    """Whether XLA:CPU keeps an ``optimization_barrier`` until equal work is found and kernels are ordered.

    Seen in compiled programs: jaxlib 0.11.0 drops it before, 0.11.1 and all later ones that were tried do not.
    """
    return tuple(jaxlib.version.__version_info__) >= (0, 11, 1)


def sharding_constraint_equation(atom: Any, out: Any, sharding: Any, like: Any) -> Any:
    """``out = with_sharding_constraint(atom, sharding)``, with source and context of the equation ``like``."""
    shape = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(shape)
    template = traced.eqns[0]
    return like.replace(
        invars=[atom],
        outvars=[out],
        primitive=template.primitive,
        params=template.params,
        effects=template.effects,
    )


def conversion_equation(atom: Any, out: Any, like: Any) -> Any:
    """``out`` = ``atom`` in the dtype of ``out``, with source and context of the equation ``like``."""
    shape = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    template = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, out.aval.dtype))(shape).eqns[0]
    return like.replace(
        invars=[atom], outvars=[out], primitive=template.primitive, params=template.params, effects=template.effects
    )


def ambient_mesh() -> Any:
    """The mesh that the user has put in scope, by ``jax.set_mesh`` or by ``with mesh:``; None if there is none."""
    for mesh in (jax.sharding.get_abstract_mesh(), jax_mesh.thread_resources.env.physical_mesh):
        if not mesh.empty:
            return mesh
    return None


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many leading operands of a ``scan`` are constants, and how many after them are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def while_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many leading operands of a ``while`` only its condition reads, and how many after them only its body."""
    return params["cond_nconsts"], params["body_nconsts"]


def with_scan_body(params: dict[str, Any], body: Any, num_consts: int) -> dict[str, Any]:
    """Parameters of the same ``scan`` with another closed body, of ``num_consts`` constants; carries stay as many."""
    if "num_consts" in params:
        return dict(params, jaxpr=body, num_consts=num_consts)
    from jax._src import flattree  # type: ignore[attr-defined]  # only where scan speaks in flat trees

    _, carry, sequences = params["ft_in"].unpack()
    operands = flattree.pack((flattree.nones(num_consts), carry, sequences))
    return dict(params, jaxpr=body, ft_in=operands)


def scan_equation(like: Any, invars: Sequence[Any], outvars: Sequence[Any], body: Any, arity: tuple[int, int]) -> Any:
    """The ``scan`` ``like`` with other operands, results and closed body, of so many constants and carries."""
    consts, carries = arity
    params = dict(like.params, jaxpr=body)
    if "num_consts" in params:
        params.update(num_consts=consts, num_carry=carries)
    else:
        from jax._src import flattree  # type: ignore[attr-defined]  # only where scan speaks in flat trees

        sizes = (consts, carries, len(invars) - consts - carries)
        params["ft_in"] = flattree.pack(tuple(map(flattree.nones, sizes)))
        params["ft_out"] = flattree.pack((flattree.nones(carries), flattree.nones(len(outvars) - carries)))
    return like.replace(invars=list(invars), outvars=list(outvars), params=params)


def is_ordered_debugging(equation: Any) -> bool:
    """Whether an equation is a ``jax.debug`` call with ``ordered=True``."""
    return any(isinstance(effect, debugging.OrderedDebugEffect) for effect in equation.effects)


# ------------------------------------------------------------------------------------------------ source lines


@functools.cache
def _library_prefixes() -> tuple[str, ...]:
    """Folders whose frames are not the user's: JAX and its companions, the standard library, this package."""
    folders = [_jax_folder(), Path(__file__).absolute().parent]
    folders += [_jax_folder().parent / name for name in _LIBRARY_PACKAGES]
    return (*(f"{folder}{os.sep}" for folder in folders), "<frozen")


def _jax_folder() -> Path:
    return Path(jax.__file__).absolute().parent


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether a source file is the user's own (not JAX, Flax, Optax, the standard library, or this package)."""
    if filename.startswith(_library_prefixes()):
        return False
    standard = sysconfig.get_path("stdlib") + os.sep
    return not filename.startswith(standard) or "-packages" in filename


@functools.cache
def is_jax_file(filename: str) -> bool:
    """Whether a source file belongs to JAX itself."""
    return filename.startswith(f"{_jax_folder()}{os.sep}")


@functools.lru_cache(maxsize=1 << 17)
def _frame(traceback: Any) -> tuple[str, int, bool]:
    """File and line of the chosen frame of a traceback, and whether it is the user's."""
    codes, instructions = traceback.raw_frames()
    if not codes:
        return "", 0, False
    files = [code.co_filename for code in codes]
    chosen = next((i for i, file in enumerate(files) if is_user_file(file)), None)
    is_users = chosen is not None
    if chosen is None:
        chosen = next((i for i, file in enumerate(files) if not is_jax_file(file)), 0)
    line = type(traceback).code_addr2location(codes[chosen], instructions[chosen])[0]
    return files[chosen], line, is_users


def user_source(equation: Any) -> tuple[str, int]:
    """File and line of the user's innermost frame of an equation.

    Falls back to the innermost frame outside of JAX, then to the innermost, and to ``("", 0)`` where JAX recorded none.
    """
    traceback = equation.source_info.traceback
    return _frame(traceback)[:2] if traceback is not None else ("", 0)


def has_user_frame(traceback: Any) -> bool:
    """Whether a traceback reaches into the user's own code."""
    return traceback is not None and _frame(traceback)[2]


def name_stack_text(equation: Any) -> str:
    """The names stack as JAX prints it, for example ``transpose(jvp(GPT))/layer1/Dense_0``."""
    return str(equation.source_info.name_stack)


def as_written(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside has the source line and name stack of ``equation``."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def in_backward_pass(equation: Any) -> Any:
    """Source information of the equation as JAX writes it where a rematerialised region does the same work again."""
    info = equation.source_info
    stack = source_info_util.new_name_stack().transform("transpose") + info.name_stack
    return info.replace(name_stack=stack.extend("rematted_computation"))


def evaluate(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Results of an equation, while tracing (:func:`as_written` says where its source and name stack come from)."""
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


# ------------------------------------------------------------------------------------------------ avals, dtypes


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype, or the string of a typed key's, for example ``key<fry>``."""
    return str(dtype)


def key_impl_name(dtype: str) -> str:
    """The name of the implementation of typed keys, for ``jax.random.wrap_key_data``, from the string of their dtype."""
    return {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}[dtype]


def item_bytes(dtype: Any) -> int:
    """Bytes of one element; of a typed key, those of the integers that it stands for."""
    return int(dtype.itemsize)


def aval_of(value: Any) -> Any:
    """The abstract value (shape, canonical dtype, weak type) of an array, a scalar, or a ``ShapeDtypeStruct``.

    Raises ``TypeError`` for what JAX does not take as an array.
    """
    if not isinstance(value, jax.Array) and isinstance(known := getattr(value, "aval", None), jax.core.ShapedArray):
        return known  # an array that lies in other processes
    if isinstance(value, jax.ShapeDtypeStruct):
        dtype = value.dtype if is_key_dtype(value.dtype) else jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.typeof(jax.ShapeDtypeStruct(value.shape, dtype, weak_type=value.weak_type))
    return jax.typeof(value)


def refuse_as_argument(kind: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Let functions of JAX call ``refuse`` for arguments of a class that has ``__jax_array__``, and of its subclasses.

    Of itself JAX refuses them too, with the advice to register the class as a pytree.
    """
    core.pytype_aval_mappings[kind] = refuse
    dtypes.canonicalize_value_handlers[kind] = refuse


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval))


def is_weak(aval: Any) -> bool:
    """Whether the aval's dtype gives way to others (a Python scalar's)."""
    return bool(getattr(aval, "weak_type", False))


# --------------------------------------------------------------------------------------------- worlds of processes


def serve_coordinator(address: str, processes: int) -> Any:
    """The service where so many processes meet, bound to that address and port; ``shutdown()`` ends it.

    Public ``jax.distributed.initialize`` starts it in the first of the processes, with which it would die.
    """
    return distributed._jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=HEARTBEAT_SECONDS,
        recoverable=True,
    )


def join_world(address: str, processes: int, rank: int) -> None:
    """Make this process one of a world whose coordinator is served elsewhere; before any backend starts.

    Raises ``RuntimeError`` if it cannot be reached within :data:`JOINING_SECONDS`.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state = distributed.global_state
    state.coordinator_address, state.num_processes, state.process_id = address, processes, rank
    state.client = distributed._jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=JOINING_SECONDS,
        use_compression=True,
        heartbeat_timeout=HEARTBEAT_SECONDS,
    )
    state.client.connect()


def coordinator_address() -> str | None:
    """Address and port of the coordinator that ``jax.distributed.initialize`` has found or was told; None: there is none."""
    address: str | None = distributed.global_state.coordinator_address
    return address


def coordinator_client() -> Any:
    """The client of JAX's coordinator, with the board of keys and values that all processes of the world see."""
    return distributed.global_state.client


# ----------------------------------------------------------------------------------------------------- checkpoints


def array_metadata_store() -> Any:
    """Where orbax notes what zarr cannot say of an array: how typed keys are made."""
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    return Store()


async def note_arrays(
    store: Any, directory: Any, arrays: Sequence[tuple[str, Sequence[int], Any, Sequence[int]]]
) -> None:
    """Add arrays (name, shape, dtype, shape of a chunk) to what this process notes of a checkpoint, as each has to."""
    from orbax.checkpoint._src.metadata.array_metadata import ArrayMetadata

    noted = [
        ArrayMetadata(
            param_name=name,
            shape=tuple(shape),
            dtype=dtype,
            write_shape=tuple(chunk),
            chunk_shape=tuple(chunk),
            use_ocdbt=False,
            use_zarr3=False,
        )
        for name, shape, dtype, chunk in arrays
    ]
    await store.write(directory, noted, process_index=jax.process_index())


# ------------------------------------------------------------------------------------- devices that are not here


def has_gpu_compiler() -> bool:
    """Whether a wheel with XLA's compiler for NVIDIA GPUs is installed; says nothing of GPUs."""
    return any(_is_module(f"jax_plugins.xla_cuda{major}") for major in (12, 13))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing too
        return False


def gpu_topology(description: str, topology: str) -> tuple[Any, ...]:
    """Devices to compile for, described by the text of a ``GpuTargetConfigProto``; ``topology`` is like ``1x2x8``.

    Raises ``RuntimeError`` where the plugin is missing or refuses.
    """
    return tuple(topologies.get_topology_desc(platform="cuda", target_config=description, topology=topology).devices)
