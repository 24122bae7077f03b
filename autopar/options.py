"""What may be asked of :func:`autopar.parallelize`, and is it of a kind that can be asked?

Every value is looked at where it is said: a figure that is no number would otherwise come to light in the planner, or
not at all (no plan keeps a budget of NaN bytes).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, cast

from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.errors import ClusterError, PlanError, TraceError
from autopar.inter_op.terms import AccumulatorDtype, BatchCoupling, MicrobatchRng
from autopar.likeness import Likeness
from autopar.methods import InterOp, method_of
from autopar.plan import Offload, Remat, Schedule
from autopar.schedule.orders import OrderFunction, schedule_name
from autopar.subjects import Demands
from autopar.user_shardings import UserShardings

ArgumentNames = int | str | Iterable[int | str] | None


@dataclass(frozen=True)
class Options:
    """What :func:`autopar.parallelize` was told."""

    demands: Demands = field(default_factory=Demands)
    cluster: Cluster | None = None
    static_argnums: int | Iterable[int] = ()
    static_argnames: str | Iterable[str] = ()
    batch_argnums: ArgumentNames = None
    state_argnums: ArgumentNames = None
    like: Likened | None = None


class Likened(Protocol):
    """A parallelized step, of which another takes over where the state lies."""

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""

    def likeness(self) -> Likeness:
        """Its plan and its leaves; raises PlanError while it has none."""


_NAMED: Mapping[str, type[Enum]] = {
    "user_shardings": UserShardings,
    "batch_coupling": BatchCoupling,
    "rng": MicrobatchRng,
    "accumulator_dtype": AccumulatorDtype,
}
_DEMANDS = (
    "method",
    "memory_per_device",
    "mesh_shape",
    "constraints",
    "solver_seconds",
    "num_microbatches",
    "stages",
    "schedule",
    "stages_per_mesh",
    "remat",
    "offload",
)
_SAID_BY_LIKE = ("method", "mesh_shape", "constraints", "stages", "schedule", "stages_per_mesh", "offload")
_ARGUMENTS = ("static_argnums", "static_argnames", "batch_argnums", "state_argnums")
_EVERY = sorted((*_DEMANDS, *_ARGUMENTS, "cluster", "donate_argnums", "like", *_NAMED))


def read_options(given: Mapping[str, Any], known: Options) -> Options:
    """The options with those given changed; None demands nothing, as where an option is not given at all.

    Raises TypeError for an unknown name, PlanError, ClusterError or TraceError for a value that is none.
    """
    unknown = [name for name in given if name not in _EVERY]
    if unknown:
        raise TypeError(f"parallelize() got unknown options {unknown}; known are {_EVERY}")
    free = Demands()
    demands = {
        name: getattr(free, name) if given[name] is None else _CHECKED[name](given[name])
        for name in _DEMANDS
        if name in given
    }
    if "donate_argnums" in given:
        demands["donate_state"] = _donates(given["donate_argnums"])
    demands |= {name: _member(name, kind, given[name]) for name, kind in _NAMED.items() if name in given}
    others = {name: _argument_names(name, given[name]) for name in _ARGUMENTS if name in given}
    if "cluster" in given:
        others["cluster"] = checked_cluster(given["cluster"])
    if "like" in given:
        others["like"] = _likened(given["like"])
    options = replace(known, demands=replace(known.demands, **demands), **others)
    _check_schedule(options.demands)
    _check_offload(options)
    _check_like(options)
    return options


def _likened(value: Any) -> Any:
    if value is not None and not callable(getattr(value, "likeness", None)):
        raise PlanError(f"like={_shown(value)} is no parallelized step; pass what autopar.parallelize returned")
    return value


def _check_like(options: Options) -> None:
    """Refuse options that ask for what ``like`` says already."""
    if options.like is None:
        return
    asked = [name for name in _SAID_BY_LIKE if getattr(options.demands, name) != getattr(Demands(), name)]
    if options.cluster is not None and options.cluster != options.like.cluster:
        asked.append("cluster")
    if asked:
        raise PlanError(
            f"like= takes mesh, stages and layouts from another step, and {', '.join(f'{name}=' for name in asked)} asks for "
            "others; leave one of them out"
        )


def _check_schedule(demands: Demands) -> None:
    has_stages = demands.stages is not None or isinstance(method_of(demands.method), InterOp)
    schedule, dealt = demands.schedule, demands.stages_per_mesh
    if schedule is not None and not has_stages:
        raise PlanError(
            f"schedule={schedule_name(schedule)!r} orders the microbatches of a pipeline, and no stages are asked for; say "
            'how many, for example stages=2, or use method="inter_op"'
        )
    if dealt is None:
        return
    interleaved = Schedule.INTERLEAVED_ONE_F_ONE_B
    if not isinstance(demands.stages, int):
        raise PlanError(
            f"stages_per_mesh={dealt} deals a number of stages; say how many in all, for example stages={2 * dealt} for two "
            "meshes. Where devices are listed, stages with the same devices share a mesh"
        )
    if demands.stages % dealt or demands.stages == dealt:
        raise PlanError(
            f"stages_per_mesh={dealt} does not deal stages={demands.stages} to two meshes or more; give a number of stages "
            f"such as {2 * dealt}"
        )
    if schedule is not None and (schedule is interleaved) is not (dealt > 1):
        raise PlanError(
            f"schedule={schedule_name(schedule)!r} and stages_per_mesh={dealt} do not go together: "
            f"{interleaved.value!r} has two stages or more on a mesh, the other names have one, and a function of your own "
            "says itself which mesh runs which stage; leave one of them out"
        )


def _check_offload(options: Options) -> None:
    """Refuse stages whose state is to lie in the memory of the host, which only a plan on one mesh can have there.

    Likewise residuals, where there are no stages.
    """
    demands = options.demands
    has_stages = demands.stages not in (None, 1) or isinstance(method_of(demands.method), InterOp)
    if demands.offload is Offload.OPTIMIZER_STATE and has_stages:
        raise PlanError(
            f"offload={Offload.OPTIMIZER_STATE.value!r} keeps the state of a step on one mesh in the memory of the hosts; that "
            "of stages stays on their devices. Leave stages= (or method='inter_op') out, or offload="
        )
    if demands.offload is Offload.ACTIVATIONS and not has_stages:
        raise PlanError(
            f"offload={Offload.ACTIVATIONS.value!r} keeps what the stages of a pipeline leave for their backward passes in the "
            "memory of the hosts, and no stages are asked for; say how many, for example stages=2. On one mesh use "
            "num_microbatches= or remat="
        )


def checked_cluster(cluster: Any) -> Cluster | None:
    """The cluster, or None for the one at hand; raises ClusterError for anything else."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    raise ClusterError(
        f"cluster={_shown(cluster)} is no cluster; pass a Cluster, for example autopar.Cluster.local(), "
        "Cluster.preset(name, hosts=2) or Cluster.from_file(path)"
    )


def _member(option: str, kind: type[Enum], said: Any) -> Enum:
    """The member of a name, or the member itself."""
    try:
        return kind(said)
    except ValueError:
        names = " or ".join(f'"{one.value}"' for one in kind)
        raise PlanError(f"{option}={_shown(said)} is unknown; say {names}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"an object of type {type(value).__name__}"


def _mesh_shape(value: Any) -> tuple[int, ...]:
    """Any sequence of whole numbers as a tuple of Python's integers."""
    try:
        return tuple(map(operator.index, value))
    except TypeError:
        raise PlanError(f"mesh_shape={value!r} is no tuple of integers; write for example (2, 4)") from None


def _microbatches(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"num_microbatches={value!r} is no number of microbatches; give an integer of 1 or more")
    return value


def _stages(value: Any) -> int | tuple[tuple[int, ...], ...]:
    """A number of stages, or the devices of each."""
    advice = "give the number of stages, or the ids of each stage's devices, for example stages=[[0, 1], [2, 3]]"
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise PlanError(f"stages={value} is no number of stages; {advice}")
        return value
    try:
        stages = tuple(tuple(map(operator.index, devices)) for devices in value)
    except TypeError:
        raise PlanError(f"stages={_shown(value)} is no number of stages and no list of device ids; {advice}") from None
    if len(stages) < 2 or not all(stages):
        raise PlanError(f"stages={_shown(value)} must name two stages or more, each with a device; {advice}")
    # Stages with the same devices share a mesh.
    everything = [device for devices in dict.fromkeys(stages) for device in devices]
    if twice := sorted({device for device in everything if everything.count(device) > 1}):
        raise PlanError(f"stages={_shown(value)}: the device {twice[0]} stands there twice; give it to one stage")
    return stages


def _schedule(value: Any) -> Schedule | OrderFunction:
    """A schedule by its name, or a function that makes orders."""
    if callable(value) and isinstance(value, Hashable):
        return cast("OrderFunction", value)
    unnamed = (Schedule.SINGLE, Schedule.SHARES, Schedule.OWN)
    names = [one.value for one in Schedule if one not in unnamed]
    try:
        schedule = Schedule(value)
    except ValueError:
        schedule = Schedule.SINGLE
    if schedule in unnamed:
        raise PlanError(
            f"schedule={_shown(value)} is no schedule of a pipeline; the names are {', '.join(names)}, and a function of "
            "(stages, microbatches) that returns an autopar.Order is one too"
        )
    return schedule


def _stages_per_mesh(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"stages_per_mesh={value!r} is no number of stages; give an integer of 1 or more")
    return value


def _positive(name: str, unit: str) -> Callable[[Any], float]:
    """The reader of a quantity; infinity counts as one."""

    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not number > 0:
            raise PlanError(f"{name}={_shown(value)} is no number of {unit}; give a number greater than 0")
        return number

    return read


def _constraints(value: Any) -> Mapping[str, PartitionSpec]:
    if not isinstance(value, Mapping):
        raise PlanError(
            f"constraints={_shown(value)} is no mapping; write path patterns and layouts, for example "
            '{"**/kernel": PartitionSpec(None, "model")}'
        )
    for pattern, spec in value.items():
        if not isinstance(pattern, str):
            raise PlanError(f'constraint {pattern!r} is no path pattern; write a string, for example "**/kernel"')
        if not isinstance(spec, PartitionSpec):
            raise PlanError(
                f"constraint {pattern!r}: {_shown(spec)} is no layout; write a jax.sharding.PartitionSpec, for example "
                'PartitionSpec(None, "model")'
            )
        if spec.unreduced or spec.reduced:
            raise PlanError(f"constraint {pattern!r}: {spec} demands a partial sum; arguments are whole or cut")
        for entry in spec:
            axes = entry if isinstance(entry, tuple) else (entry,)
            if entry is not None and not all(isinstance(axis, str) for axis in axes):
                raise PlanError(
                    f"constraint {pattern!r}: {entry!r} in {spec} names no mesh axis; an entry is None, a name "
                    '("data", "model", "extra"), or a tuple of names'
                )
    return dict(value)


def _method(value: Any) -> Any:
    method_of(value)
    return value


_CHECKED: Mapping[str, Callable[[Any], Any]] = {
    "method": _method,
    "memory_per_device": _positive("memory_per_device", "bytes"),
    "mesh_shape": _mesh_shape,
    "constraints": _constraints,
    "solver_seconds": _positive("solver_seconds", "seconds"),
    "num_microbatches": _microbatches,
    "stages": _stages,
    "schedule": _schedule,
    "stages_per_mesh": _stages_per_mesh,
    "remat": lambda value: _member("remat", Remat, value),
    "offload": lambda value: None if value == "auto" else _member("offload", Offload, value),
}


def _donates(value: Any) -> bool:
    if not (value == "auto" or (isinstance(value, tuple) and not value)):
        raise PlanError(
            'donate_argnums is "auto" (the state is donated) or () (nothing is); other arguments stay yours'
        )
    return bool(value == "auto")


def _argument_names(option: str, value: Any) -> Any:
    """Numbers or names of arguments, one or several, as a tuple; None as it is."""
    kinds = {"static_argnums": int, "static_argnames": str}.get(option, int | str)
    if value is None:
        return None if option in ("batch_argnums", "state_argnums") else ()
    names = (value,) if isinstance(value, int | str) or not isinstance(value, Iterable) else tuple(value)
    wrong = [name for name in names if not isinstance(name, kinds)]
    if wrong:
        wanted = {"static_argnums": "positions (integers)", "static_argnames": "names (strings)"}
        raise TraceError(
            f"{option}={_shown(value)}: {_shown(wrong[0])} names no argument; give "
            f"{wanted.get(option, 'positions or names')} of arguments"
        )
    return names
