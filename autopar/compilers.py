"""For which hardware that is not here can a program be compiled?

XLA's compiler for NVIDIA GPUs needs no GPU, no driver and no CUDA: it asks a description of the device (a
``GpuTargetConfigProto``, of which ``gpu_targets/`` has some, read off devices) and a topology, partitions × hosts × devices
of a host.  It comes with the extra ``gpu-compiler``.  What comes out is the program that those GPUs would run, collectives
and memory included, but for the choice of matrix kernels, which is made by measuring on the device: here XLA takes its
defaults (``xla_gpu_autotune_level`` 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from autopar import _compat
from autopar.cluster import Cluster, Platform
from autopar.errors import ClusterError

EXTRA = "gpu-compiler"
INSTALLATION = f'pip install "autopar[{EXTRA}]"'

WITHOUT_DEVICE: Mapping[str, Any] = MappingProxyType({"xla_gpu_autotune_level": 0})
"""XLA's options where there is no device to measure kernels on."""


class Compiler(Enum):
    """Compilers for hardware that need not be here; the value is what a user says, and the name of its description."""

    V100 = "v100"
    A100 = "a100"
    H100 = "h100"
    H200 = "h200"

    @classmethod
    def of(cls, said: str | Compiler) -> Compiler:
        """The member of a name; raises ClusterError for an unknown one."""
        try:
            return cls(said)
        except ValueError:
            known = ", ".join(f'"{one.value}"' for one in cls)
            raise ClusterError(f"compiler={said!r} is unknown; say {known}") from None


@dataclass(frozen=True)
class Target:
    """For which devices a program is compiled, in the order of the mesh, and with which of XLA's options."""

    devices: tuple[Any, ...]
    options: Mapping[str, Any] | None = None


def description_of(compiler: Compiler) -> str:
    """The text of the ``GpuTargetConfigProto`` that describes the device to its compiler."""
    return files("autopar").joinpath("gpu_targets", f"{compiler.value}.txtpb").read_text(encoding="utf-8")


def target_of(compiler: Compiler, cluster: Cluster) -> Target:
    """The devices of ``cluster`` as ``compiler`` sees them.

    Raises :class:`~autopar.errors.ClusterError` if the cluster is not of GPUs, if the extra is not installed or if the
    wheels that are installed do not fit this JAX.
    """
    if cluster.device.platform is not Platform.CUDA:
        raise ClusterError(
            f"the compiler {compiler.value} is one for NVIDIA GPUs, and {cluster.name} has devices of the platform "
            f'{cluster.device.platform.value}; plan for GPUs, for example with Cluster.preset("p5.48xlarge")'
        )
    if not _compat.has_gpu_compiler():
        raise ClusterError(f"XLA's compiler for GPUs is not installed: {INSTALLATION} (no GPU and no CUDA are needed)")
    topology = f"1x{cluster.hosts}x{cluster.devices_per_host}"
    try:
        devices = _compat.gpu_topology(description_of(compiler), topology)
    except RuntimeError as error:
        raise ClusterError(
            f"XLA's compiler for GPUs does not start for {topology} devices ({error}). Without a GPU in this machine, set "
            f"JAX_PLATFORMS=cpu before JAX starts; its wheels must be of jaxlib's version: {INSTALLATION}"
        ) from error
    return Target(devices, WITHOUT_DEVICE)
