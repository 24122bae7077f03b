"""Which hardware does this process have, or a Ray cluster, and what are its figures?

GPUs and TPUs are recognised by their names and get the figures of a preset (:mod:`autopar.cluster_presets`).  For virtual CPU
devices there is no data sheet: theirs were measured with ``benchmarks/measure_local.py``, per core; a profile
(:mod:`autopar.measure`) of the machine at hand is better.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.cluster_presets import GIGABIT, LINK_REACHED, PRESETS, Preset
from autopar.cores import spare_threads, usable_cores
from autopar.errors import ClusterError
from autopar.profile import Profile
from autopar.profile_file import find_profile
from autopar.ray_hosts import RayHosts, RayNode
from autopar.wiring import Wiring

CPU_FLOPS_PER_SECOND_PER_CORE = {"float32": 1e11, "float64": 5e10, "bfloat16": 1e11}
"""Matrix products on one core with AVX-512 (AMD EPYC, Zen 4, 2.6 GHz): ``python benchmarks/measure_local.py``."""
CPU_MEMORY_BYTES_PER_SECOND_PER_CORE = 2.5e10
"""Read and written by ``x + 1`` over 256 MiB on the same machine, by the same command."""
CPU_COLLECTIVE_LATENCY_SECONDS = 20e-6
CPU_COLLECTIVE_BYTES_PER_SECOND_PER_CORE = 7.5e9
"""α and β of collectives between virtual CPU devices of one process (which share the memory), by the same command."""
CPU_NETWORK = Link(100e-6, 10 * GIGABIT * LINK_REACHED, source="assumed: 10 Gb/s Ethernet and TCP between processes")

AUTO_PROFILE = "auto"


def _as_devices(given: Any) -> list[Any]:
    listed = list(given) if isinstance(given, Iterable) else []
    if not isinstance(given, Iterable) or not all(hasattr(one, "device_kind") for one in listed):
        raise ClusterError(
            f"Cluster.local(devices={given!r}): give a sequence of jax.Devices, say jax.devices()[:4]; "
            "leave devices out to take all of jax.devices()"
        )
    return listed


def local_cluster(devices: Sequence[Any] | None = None, profile: Profile | str | Path | None = AUTO_PROFILE) -> Cluster:
    """The devices of this program as a cluster; imports JAX, and starts its backend if no devices are given.

    Every process is taken for one host (``process_index``), and device ids of the cluster number the devices in the
    order given, by default ``jax.devices()`` ordered by (process, id).

    * GPU and TPU devices are matched by ``device_kind`` to a preset, whose links and figures they get; memory is what
      the backend says it may allocate, where it says so.
    * Virtual CPU devices share the machine (``compute_shared_by``): memory is the physical memory (or the limit of
      the control group), compute and bandwidth are measured figures per core times the cores that this process may
      use.  Processes are taken to run on a machine each.
    * ``profile`` as in :meth:`Cluster.local`.

    Raises ``ClusterError`` for no devices, mixed or unknown kinds, or hosts of unequal size.
    """
    import jax

    ids: tuple[int, ...] = ()
    if devices is None:
        with spare_threads():
            devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    else:
        devices = _as_devices(devices)
        if [one.id for one in devices] != [one.id for one in jax.devices()][: len(devices)]:
            ids = tuple(one.id for one in devices)
    if not devices:
        raise ClusterError("no devices given; leave devices out to take all of jax.devices()")
    kinds = Counter((str(device.platform), str(device.device_kind)) for device in devices)
    if len(kinds) > 1:
        raise ClusterError(f"devices of several kinds ({', '.join(kind for _, kind in kinds)}); give those of one kind")
    processes = [device.process_index for device in devices]
    per_host = set(Counter(processes).values())
    if len(per_host) > 1:
        raise ClusterError(f"processes have {sorted(per_host)} of the devices; give the same number of each process")
    devices_per_host = per_host.pop()
    hosts = len(devices) // devices_per_host
    if any(len(set(processes[host * devices_per_host : (host + 1) * devices_per_host])) > 1 for host in range(hosts)):
        raise ClusterError("the devices of different processes alternate; order them by process_index")
    platform, kind = next(iter(kinds))
    if platform == "cpu":
        cluster = _cpu_cluster(hosts, devices_per_host)
    else:
        cluster = _accelerator_cluster(kind, devices, hosts, jax.process_index())
    cluster = replace(cluster, device_ids=ids)
    if profile != AUTO_PROFILE:
        return cluster.with_profile(profile)
    if jax.process_count() > 1:
        return cluster
    return cluster.with_profile(find_profile(cluster.device.platform.value, kind, devices_per_host))


def _accelerator_cluster(kind: str, devices: Sequence[Any], hosts: int, this_process: int) -> Cluster:
    """The preset with that ``device_kind``, cut to the devices at hand; only own devices tell their memory."""
    named = {name.lower(): preset for preset in PRESETS for name in preset.device_kinds}
    preset = named.get(kind.lower())
    if preset is None:
        known = ", ".join(sorted(name for preset in PRESETS for name in preset.device_kinds))
        raise ClusterError(
            f"no figures for devices of kind {kind!r} (known: {known}); describe them in a file for Cluster.from_file, "
            "or take the nearest preset and replace what differs"
        )
    own = [device for device in devices if device.process_index == this_process]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in own]
    known_limits = [int(limit) for limit in limits if limit]
    return preset.cluster.replace(
        name=f"local {preset.cluster.device.name}",
        hosts=hosts,
        devices_per_host=len(devices) // hosts,
        local_wiring=_wiring_of(preset, len(devices) // hosts),
        memory_bytes=min(known_limits) if known_limits else None,
        notes=f"devices of this program; links as in preset {preset.cluster.name}. {preset.cluster.notes}".strip(),
    )


def _wiring_of(preset: Preset, devices_per_host: int) -> Wiring | None:
    """That of the preset; None on hosts of more devices, whose wiring is not known."""
    wiring = preset.cluster.local_wiring
    return None if wiring is None or devices_per_host > len(wiring.wires) else wiring


def ray_cluster(found: RayHosts) -> Cluster:
    """The hosts of a Ray cluster as a cluster: GPUs by the preset of Ray's name of them, else virtual CPU devices.

    Where hosts have GPUs of several kinds, links are those of the slowest.  Several hosts on one node share its cores and its
    memory.  Raises ``ClusterError`` for GPUs without figures.
    """
    first, hosts = found.nodes[0], len(found.nodes)
    if not first.gpus:
        per_node = max(Counter(node.node_id for node in found.nodes).values())
        cores = max(1, int(min(node.cores for node in found.nodes)))
        cluster = _cpu_cluster(hosts, found.devices_per_host, cores)
        cluster = replace(cluster, name="ray cpu", compute_shared_by=found.devices_per_host * per_node)
    else:
        presets = [_preset_of_node(node) for node in found.nodes]
        slowest = min(presets, key=lambda one: _bytes_per_second_each(one.cluster.local_link))
        cluster = presets[0].cluster.replace(
            name=f"ray {presets[0].cluster.device.name}",
            hosts=hosts,
            devices_per_host=found.devices_per_host,
            local_link=slowest.cluster.local_link,
            local_wiring=_wiring_of(slowest, found.devices_per_host),
            network_link=min((one.cluster.network_link for one in presets), key=_bytes_per_second_each),
            host_memory_link=min(
                (link for one in presets if (link := one.cluster.host_memory_link) is not None),
                key=_bytes_per_second_each,
                default=None,
            ),
            host_devices={host: one.cluster.device for host, one in enumerate(presets)},
        )
    return replace(cluster, runs_on=found)


def _bytes_per_second_each(link: Link) -> float:
    return link.bytes_per_second / link.shared_by


def _preset_of_node(node: RayNode) -> Preset:
    kinds = {preset.cluster.device.name.split("-")[0].lower(): preset for preset in PRESETS}
    preset = kinds.get(node.accelerator.lower())
    if preset is None:
        raise ClusterError(
            f"no figures for GPUs that Ray calls {node.accelerator!r} (known: {', '.join(sorted(kinds))}); start Ray with "
            "--resources or describe the cluster in a file, and say Cluster.from_file(path).on_ray(address)"
        )
    return preset


def _cpu_cluster(hosts: int, devices_per_host: int, cores: float | None = None) -> Cluster:
    """Virtual devices: all devices of a host share its cores (None: those of this one), its memory and the bandwidth of it."""
    cores = usable_cores() if cores is None else cores
    source = f"benchmarks/measure_local.py, figures per core × {cores:g} cores"
    device = DeviceKind(
        name="cpu",
        platform=Platform.CPU,
        flops_per_second={dtype: rate * cores for dtype, rate in CPU_FLOPS_PER_SECOND_PER_CORE.items()},
        memory_bytes=machine_memory_bytes(),
        memory_bytes_per_second=CPU_MEMORY_BYTES_PER_SECOND_PER_CORE * cores,
        source=source,
    )
    local = Link(
        CPU_COLLECTIVE_LATENCY_SECONDS, CPU_COLLECTIVE_BYTES_PER_SECOND_PER_CORE * cores, devices_per_host, source
    )
    network = replace(CPU_NETWORK, shared_by=devices_per_host)
    return Cluster("local cpu", hosts, devices_per_host, device, local, network, compute_shared_by=devices_per_host)


def machine_memory_bytes() -> int:
    """Physical memory of this machine, or the limit that a Linux control group (a container) sets if that is less."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise ClusterError(
            "this system does not tell its physical memory; describe the machine in a file for Cluster.from_file"
        ) from error
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return min([physical, *(limit for limit in limits if limit > 0)])
