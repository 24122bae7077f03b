"""The command line: ``autopar verify-plan``, ``autopar profile``, ``autopar network`` and ``autopar status``.

Exit codes: 0 all is well, 1 the compiled program is not what was predicted, 2 the input cannot be worked with.

JAX is imported only inside commands, after the number of virtual CPU devices is known, and the user's module after that.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.cluster import Cluster

OK, DIFFERENT, BAD_INPUT = 0, 1, 2
PROFILED_DTYPES = ("float32", "bfloat16", "float64")
MEBIBYTE = 1 << 20
_CASE_HELP = "a function of no arguments that returns (train_step, args) or (train_step, args, kwargs)"


class _InputError(AutoparError):
    """What the user gave on the command line cannot be worked with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (argparse itself exits with 2)."""
    given = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = given.command
    try:
        return command(given)
    except AutoparError as error:
        print(f"autopar {given.name}: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description="Plans of parallel train steps, checked and measured.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_verify(commands.add_parser("verify-plan", help="does a step compile to what its plan predicts?"))
    _add_profile(commands.add_parser("profile", help="measure the devices at hand for the cost model"))
    _add_network(
        commands.add_parser("network", help="measure links and collectives between the hosts of a Ray cluster")
    )
    _add_status(commands.add_parser("status", help="what runs on a Ray cluster: meshes, memory, step times"))
    return parser


# --------------------------------------------------------------------------------------------------------- verify-plan


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plan a train step, compile it, and hold collectives, memory, FLOPs and seconds of the compiled program against "
        "the plan. Exit code 0: within the tolerances; 1: not; 2: the input cannot be worked with."
    )
    parser.add_argument(
        "case",
        metavar="MODULE:FUNCTION",
        help=f"{_CASE_HELP}; MODULE is importable (mypackage.train:case) or a file (path/to/file.py:case)",
    )
    parser.add_argument("--method", help="as in autopar.parallelize, for example zero3 (default: what the step says)")
    parser.add_argument("--mesh", type=_mesh, metavar="2x4", help="sizes of the mesh axes (default: all are tried)")
    parser.add_argument(
        "--cluster",
        metavar="PRESET|FILE",
        help="hardware to plan for: a preset's name or a cluster file (default: what the step says, else the devices here)",
    )
    parser.add_argument("--hosts", type=_count, default=None, help="hosts of the preset (default 1)")
    parser.add_argument(
        "--devices",
        type=_count,
        help="virtual CPU devices to compile for (default: as many as --mesh or --cluster need, else those that are there)",
    )
    parser.add_argument(
        "--compiler",
        metavar="h100",
        help="compile for the GPUs of --cluster, which need not be here: v100, a100, h100 or h200; "
        "needs the extra gpu-compiler",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="verify this saved plan instead of making one")
    parser.set_defaults(command=_verify)


def _verify(given: argparse.Namespace) -> int:
    cluster = _cluster(given.cluster, given.hosts)
    if given.compiler is not None and given.devices is not None:
        raise _InputError(
            "--devices makes virtual CPU devices, and --compiler compiles for those of --cluster; give one"
        )
    if given.compiler is not None:
        _skip_gpus()
    wanted = given.devices or (cluster.num_devices if cluster else math.prod(given.mesh) if given.mesh else None)
    _make_devices(wanted)
    step, args, kwargs = _case(given.case)
    from rich.console import Console

    from autopar.plan import Plan
    from autopar.verify import verify_plan

    plan = None if given.plan is None else Plan.load(given.plan)
    asked = {"cluster": cluster, "method": given.method, "mesh_shape": given.mesh, "compiler": given.compiler}
    found = verify_plan(step, *args, **asked, plan=plan, **kwargs)
    console = Console()
    console.print(found) if console.is_terminal else print(found)
    return OK if found.agrees else DIFFERENT


# ------------------------------------------------------------------------------------------------------------- profile


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure collectives, matrix products and elementwise kernels on the devices of this machine, all at once, and "
        "store them where Cluster.local() finds them. Run it while the machine does nothing else."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: the user's cache directory)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs, for a first impression")
    parser.add_argument("--devices", type=_count, help="virtual CPU devices (default: what the environment says)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=PROFILED_DTYPES,
        metavar="DTYPE",
        help=f"of products: those that your models compute in, of {', '.join(PROFILED_DTYPES)} (default: all, float64 not on "
        "accelerators; --quick: float32)",
    )
    parser.set_defaults(command=_profile)


def _profile(given: argparse.Namespace) -> int:
    if given.out is not None:
        _check_out(given.out)
    _make_devices(given.devices)
    from autopar import efforts
    from autopar.measure import measure, profile_rows
    from autopar.profile_file import default_path, save_profile
    from autopar.progress import Progress

    effort = efforts.QUICK if given.quick else efforts.FULL
    if given.dtypes is not None:
        effort = effort.of_dtypes(tuple(dict.fromkeys(given.dtypes)))
    with Progress("profile") as progress:
        profile = measure(effort, progress.say)
    path = given.out or default_path(profile.platform, profile.device_kind, profile.num_devices)
    save_profile(profile, path)
    _print_measured(f"{profile.num_devices} × {profile.device_kind}, {profile.machine}", profile_rows(profile), path)
    return OK


# ------------------------------------------------------------------------------------------------------------- network


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure α and β of the links between the hosts of a Ray cluster, and collectives that span hosts, and store them for "
        "Cluster.with_network(). Run it while the hosts do nothing else."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="where to")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs, for a first impression")
    parser.add_argument("--address", default="auto", help='of the cluster, as `ray.init` takes it (default: "auto")')
    parser.add_argument("--hosts", type=_count, help="as in Cluster.ray (default: all nodes)")
    parser.add_argument("--devices", type=_count, help="of each host, as in Cluster.ray")
    parser.set_defaults(command=_network)


def _network(given: argparse.Namespace) -> int:
    _check_out(given.out)
    from autopar.cluster import Cluster
    from autopar.measured_network import FULL, QUICK, measure_ray_network, network_rows
    from autopar.network_file import save_network
    from autopar.progress import Progress

    cluster = Cluster.ray(given.address, hosts=given.hosts, devices_per_host=given.devices)
    try:
        with Progress("network") as progress:
            network = measure_ray_network(cluster, QUICK if given.quick else FULL, progress.say)
    finally:
        cluster.close()
    save_network(network, given.out)
    title = f"{cluster.hosts} hosts × {network.devices_per_host} {network.platform} devices"
    _print_measured(title, network_rows(network), given.out)
    return OK


def _check_out(path: Path) -> None:
    """Before minutes are spent on what could not be written."""
    if path.is_dir():
        raise _InputError(f"--out {path} is a directory; name a file in it")
    place = next(one for one in path.absolute().parents if one.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise _InputError(f"--out {path} cannot be written, for {place} is no directory that you may write to")


def _print_measured(title: str, rows: Iterable[tuple[str, str, str]], path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("what")
    table.add_column("at least", justify="right")
    table.add_column("rate of the largest", justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"written to {path}")


# ------------------------------------------------------------------------------------------------------ what was given


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(_count(size) for size in text.lower().replace("×", "x").split("x"))


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return number


def _cluster(name: str | None, hosts: int | None) -> Cluster | None:
    """A preset by its name, or a file that exists or looks like one."""
    from autopar.cluster import Cluster

    if name is None:
        if hosts is not None:
            raise _InputError("--hosts goes with --cluster PRESET; give both")
        return None
    if Path(name).exists() or name.endswith(".json") or os.sep in name:
        if hosts is not None:
            raise _InputError(f"--hosts goes with a preset; {name} is a file, which says how many hosts it has")
        return Cluster.from_file(name)
    return Cluster.preset(name, hosts or 1)


def _skip_gpus() -> None:
    """Without a word from the user JAX would look for GPUs to run on, since their compiler is installed."""
    import jax

    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def _make_devices(count: int | None) -> None:
    """Virtual CPU devices, unless the environment says how many already; must come before JAX looks for devices."""
    if count is None or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise _InputError(f"cannot make {count} virtual CPU devices: {error}") from error


def _case(text: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step and its arguments that a named function returns."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise _InputError(f"{text!r} is not MODULE:FUNCTION; write mypackage.train:case or path/to/file.py:case")
    found = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            near = ", ".join(public for public in vars(found) if not public.startswith("_")) if part == name else ""
            raise _InputError(f"{place} has no {name!r}{f'; it has {near}' if near else ''}")
        found = getattr(found, part)
    if not callable(found):
        raise _InputError(f"{text} is a {type(found).__name__}; give {_CASE_HELP}")
    made = _of_the_user(f"{text}()", found)
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        raise _InputError(f"{text}() returned {_kind(made)}; give {_CASE_HELP}")
    step, args, kwargs = made if len(made) == 3 else (*made, {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise _InputError(
            f"{text}() returned ({_kind(step)}, {_kind(args)}{', ' + _kind(kwargs) if len(made) == 3 else ''}); args is "
            "a tuple of the step's positional arguments (for one: (state,)), kwargs a dict"
        )
    return step, tuple(args), kwargs


def _kind(made: Any) -> str:
    return f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__


def _module(place: str) -> Any:
    """Import a module by its name from the working directory or the path, or a file; its directory is then on the path."""
    if not place.endswith(".py"):
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        return _of_the_user(f"import {place}", lambda: importlib.import_module(place))
    path = Path(place).resolve()
    if not path.is_file():
        raise _InputError(f"there is no file {place}; check the path")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _InputError(f"{place} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up by name
    loader = spec.loader
    _of_the_user(f"import {place}", lambda: loader.exec_module(module))
    return module


def _of_the_user(what: str, call: Callable[[], Any]) -> Any:
    """Run code that is not ours; whatever it raises is shown with its traceback and is bad input."""
    try:
        return call()
    except AutoparError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise _InputError(f"{what} raised {type(error).__name__}: {error}") from error


# -------------------------------------------------------------------------------------------------------------- status


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.description = "How the processes of the runs on a Ray cluster are."
    parser.add_argument("--address", default="auto", help='of the cluster, as `ray.init` takes it (default: "auto")')
    parser.set_defaults(command=_status)


def _status(given: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from autopar.ray_hosts import connect
    from autopar.runtime.processes import statuses

    connect(given.address, None, 1)
    rows = statuses()
    if not rows:
        print("nothing of autopar runs there")
        return OK
    table = Table()
    for title in ("run", "process", "pid", "memory MiB", "arrays MiB", "step", "step ms", "busy s"):
        table.add_column(title, justify="left" if title in ("run", "process") else "right")
    for run, one in rows:
        sizes = (one.resident_bytes / MEBIBYTE, one.array_bytes / MEBIBYTE)
        table.add_row(
            run,
            one.name,
            str(one.pid),
            *(f"{size:,.1f}" for size in sizes),
            str(one.step),
            f"{one.step_seconds * 1e3:,.1f}",
            f"{one.busy_seconds:,.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return OK
