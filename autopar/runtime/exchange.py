"""By which transport do meshes exchange arrays, and what does a process own for that?

    CPU      pulls (``jax.experimental.transfer``)
    CUDA     NCCL where every process of the program has it and it knows the types of all arrays, else pulls
    TPU      pulls

:func:`chosen` says so and nothing else does; the user may ask for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax import numpy as jnp

from autopar.cluster import Platform
from autopar.errors import ClusterError
from autopar.ray_hosts import MeshTransport
from autopar.runtime.nccl import Library, NcclPeers, NcclTransport, Station, UniqueId
from autopar.runtime.pulled import PullPeers, PullTransport
from autopar.runtime.shipment import MeshShipment, Wire
from autopar.runtime.transport import SteppedTransport

Peers: TypeAlias = PullPeers | NcclPeers
"""Who takes part in a run, as the transport of their choice needs it."""


def chosen(
    wanted: MeshTransport, backend: Platform, dtypes: Iterable[str], lacks: Callable[[], Sequence[str]]
) -> MeshTransport:
    """The transport of a program; ``dtypes`` are of what travels, ``lacks`` says which processes have no NCCL, and why.

    Raises ``ClusterError`` if NCCL is asked for and cannot be had.
    """
    if wanted is MeshTransport.PULL or (wanted is MeshTransport.AUTO and backend is not Platform.CUDA):
        return MeshTransport.PULL
    if backend is not Platform.CUDA:
        raise ClusterError(
            f"transport='nccl' is for GPUs of NVIDIA, and this cluster's platform is {backend.value}; leave transport out"
        )
    if narrow := next((dtype for dtype in dtypes if _is_narrow(dtype)), None):
        missing = f"arrays of {narrow} pass between meshes, whose elements are smaller than a byte"
    elif found := lacks():
        missing = f'{found[0]}. Install the extra on every host (pip install "autopar[nccl]")'
    else:
        return MeshTransport.NCCL
    if wanted is MeshTransport.NCCL:
        raise ClusterError(f"transport='nccl' cannot be had: {missing}, or leave transport out: arrays are pulled then")
    return MeshTransport.PULL


def _is_narrow(dtype: str) -> bool:
    """Whether elements are smaller than a byte, which DLPack does not lend."""
    if dtype.startswith("key<"):
        return False
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return int(jnp.iinfo(kind).bits) < 8
    return bool(jnp.issubdtype(kind, jnp.floating)) and int(jnp.finfo(kind).bits) < 8


def _cupy() -> Library:
    from autopar.runtime.cupy_nccl import CupyNccl

    return CupyNccl()


class Exchange:
    """Owns what one process needs to exchange arrays with other meshes; each of it is made when first asked for."""

    def __init__(self, devices: Sequence[Any], address: str, make_library: Callable[[], Library] = _cupy) -> None:
        """``devices`` are all JAX devices of the mesh's world, in the order of the cluster's ids."""
        self._devices = tuple(devices)
        self._address = address
        self._make_library = make_library
        self._server: Any = None
        self._library: Library | None = None
        self._station: Station | None = None

    def serve(self) -> str:
        """The address at which other meshes pull arrays from this process."""
        return str(self._transfer_server().address())

    def unique_id(self) -> UniqueId:
        """A new name of a communicator, which lives as long as this process."""
        return self._nccl().unique_id()

    def transport(
        self, peers: Peers, told: MeshShipment, mesh_of: Callable[[Any], jax.sharding.Mesh]
    ) -> SteppedTransport:
        """The transport of a program; with NCCL it returns when the others have connected as well."""
        if isinstance(peers, PullPeers):
            return self.pulls(peers, told.outgoing, told.incoming, mesh_of)
        if self._station is None:
            own = {
                number: device
                for number, device in zip(told.devices, self._devices, strict=True)
                if device.process_index == jax.process_index()
            }
            self._station = Station(self._nccl(), own)
        transport = NcclTransport(self._station, peers, told.outgoing, told.incoming, mesh_of)
        transport.rehearse()
        return transport

    def pulls(
        self,
        peers: PullPeers,
        outgoing: Sequence[Wire],
        incoming: Sequence[Wire],
        mesh_of: Callable[[Any], jax.sharding.Mesh],
    ) -> PullTransport:
        """A transport of pulls, for these wires."""
        return PullTransport(self._transfer_server(), peers, outgoing, incoming, mesh_of)

    @property
    def may_wait(self) -> bool:
        """Whether messages may be under way that wait for other meshes for ever, unless they are given up."""
        return self._station is not None

    def hang_up(self) -> None:
        """Give up such messages; may be called by any thread.  What waited for them goes on with values that mean nothing.

        Pulls end by themselves.
        """
        station, self._station = self._station, None
        if station is not None:
            station.hang_up()

    def _nccl(self) -> Library:
        if self._library is None:
            self._library = self._make_library()
        return self._library

    def _transfer_server(self) -> Any:
        if self._server is None:
            from jax.experimental import transfer

            here = f"{self._address}:0"
            self._server = transfer.start_transfer_server(self._devices[0].client, here, [here] * 2)
        return self._server
