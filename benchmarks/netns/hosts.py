"""Hosts that are network namespaces: each with an address, a hostname and a link of its own to a common switch.

    host k    namespace ``<prefix>h<k>``: loopback, and ``eth0`` with the address ``<network>.<10 + k>``
    switch    namespace ``<prefix>sw``: a bridge, to which every ``eth0`` is joined by a pair of virtual devices

Token buckets at both ends of a pair limit its rate in either direction, so that links are full duplex, as real ones are.
Nothing is made in the machine's own namespace, so no such cluster disturbs another, and addresses may be the same in all.

Processes of a host see the machine's files, but its own ``/etc/hosts`` and hostname (gloo listens where the hostname leads to)
and a folder that is another one on every host: :attr:`Hosts.own_folder`.  All hosts share the machine's cores and memory,
unless each is given cores (:mod:`benchmarks.netns.cores`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.netns.cores import Quota, remove_groups, seeing_groups

_FIRST = 10  # last part of the first host's address
_MTU_BYTES = 1500
_BURST_SECONDS = 1e-3
# A packet before it is cut into frames, as the kernel counts it: 64 KiB and the headers of all its frames.  One that may not
# pass whole is cut, and whoever receives wakes for every frame, which takes many times the processor time.  Network cards put
# frames together.
_LEAST_BURST_BYTES = 72 << 10
_QUEUE = "50ms"
# The congestion control of Linux unless it is told otherwise, as this machine may have been.  The routes of a namespace may
# name any that the kernel has; its own setting only what the machine allows to all.
_CONTROL = "cubic"
_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
# A network card goes on sending and receiving while processes wait for their ration of processor time, and so does the kernel
# here, as long as a message has room in it.
_SOCKET_BYTES = 4 << 20
_IF_WRITABLE = 'test ! -w "$1" || echo "$2" > "$1"'  # which a container may not allow
_NAMES = "autopar"
_OWNED = _NAMES + r"(?P<owner>\d+)(x[0-9a-f]+)?"
_NAMESPACE, _FOLDER = re.compile(_OWNED + r"(h\d+|sw)"), re.compile(_OWNED + "-.*")
_DYING_SECONDS = 5.0

_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" "$4" && shift 4 && exec "$@"'


@dataclass(frozen=True)
class Network:
    """So many hosts, whose links carry ``mbit_per_second`` in either direction; 0: as fast as the machine can."""

    hosts: int
    mbit_per_second: int
    prefix: str = ""
    """Of the names of namespaces; if empty, one of its own that says which process made them."""
    network: str = "10.78.0"
    cores_per_host: float = 0.0
    """The processor time that all processes of a host get, in cores; 0: what the others leave."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that have left and have reached a host since it was made, frames and acknowledgements included."""

    sent_bytes: int
    received_bytes: int


def why_not() -> str:
    """Why this machine cannot have such hosts now; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces of a network are made by root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (package {package})"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespace can be made: {tried.stderr.decode().strip()}"


def knows_cubic() -> bool:
    """Whether the kernel has Linux's own congestion control."""
    return _CONTROLS.exists() and _CONTROL in _CONTROLS.read_text().split()


class Hosts:
    """Owns the namespaces and every process in them; a context manager.

    What a process that was killed has left is removed by the next one that makes hosts.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.prefix = network.prefix or f"{_NAMES}{os.getpid()}x{secrets.token_hex(4)}"
        self._names = [f"{self.prefix}h{host}" for host in range(network.hosts)]
        self._switch = f"{self.prefix}sw"
        self._quotas: dict[int, Quota] = {}
        self._unlimited: Quota | None = None
        self._folder: Path | None = None
        self._on_term: Any = None

    def __enter__(self) -> Hosts:
        remove_abandoned()
        if threading.current_thread() is threading.main_thread():
            # `timeout` and CI end a run by it, and Python would go without leaving any `with`.
            self._on_term = signal.signal(signal.SIGTERM, _ended)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process of the hosts and take them down."""
        _remove([*self._names, self._switch])
        for quota in self.groups():
            quota.close()
        self._quotas, self._unlimited = {}, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._on_term is not None:
            signal.signal(signal.SIGTERM, self._on_term)
            self._on_term = None

    # --------------------------------------------------------------------------------------------------- what is there

    @property
    def folder(self) -> Path:
        """For files of this cluster; it is removed with it."""
        assert self._folder is not None, "the hosts are not up"
        return self._folder

    @property
    def own_folder(self) -> Path:
        """A path under which every host keeps files that the others do not see."""
        return self.folder / "own"

    def name(self, host: int) -> str:
        """The hostname, and the name of the namespace."""
        return self._names[host]

    def address(self, host: int) -> str:
        """The only address but the loopback's."""
        return f"{self.network.network}.{_FIRST + host}"

    def groups(self) -> list[Quota]:
        """The control groups of its hosts and of drivers on them; none where hosts have no cores of their own."""
        return [*self._quotas.values(), *([] if self._unlimited is None else [self._unlimited])]

    def traffic(self, host: int) -> Traffic:
        """What has crossed its link."""
        return traffic_of(self.name(host))

    def sent_bytes(self) -> int:
        """Bytes that have left the cards of all hosts."""
        return sum(traffic_of(name).sent_bytes for name in self._names)

    def processes(self) -> dict[int, list[int]]:
        """The processes of every host."""
        return {host: _processes(name) for host, name in enumerate(self._names)}

    def commands(self, host: int) -> dict[int, str]:
        """The processes of a host, each with its command line."""
        found = {}
        for process in _processes(self.name(host)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = Path("/proc", str(process), "cmdline").read_bytes()
                found[process] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    # ------------------------------------------------------------------------------------------------------ what to do

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """What to run so that the command runs on a host, by whatever cores are free."""
        name, own = self.name(host), str(self.own_folder)
        enter = f"{seeing_groups()} && {_ENTER}" if self._quotas else _ENTER
        inside = ["unshare", "--uts", "sh", "-c", enter, "sh", name, str(self._etc_hosts), f"{own}{host}", own]
        return ["ip", "netns", "exec", name, *inside, *command]

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host and its cores; its lines go to ``log``, or to where those of this process go."""
        entering = self.command(host, command)
        if host in self._quotas:
            entering = self._quotas[host].command(entering)
        told = {**os.environ, **(environment or {})}
        if log is None:
            return subprocess.Popen(entering, env=told, stdin=subprocess.DEVNULL)
        with log.open("ab") as lines:
            return subprocess.Popen(
                entering, env=told, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT
            )

    def run(self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run a command on a host, by whatever cores are free: one that directs the others; its exit code."""
        entering = self.command(host, command)
        if self._unlimited is not None:
            entering = self._unlimited.command(entering)
        told = {**os.environ, **(environment or {})}
        return subprocess.run(entering, env=told, stdin=subprocess.DEVNULL, check=False).returncode

    def set_rate(self, host: int, mbit_per_second: int) -> None:
        """Give the link of a host another rate."""
        for namespace, device in ((self.name(host), "eth0"), (self._switch, f"p{host}")):
            if mbit_per_second:
                burst = max(_LEAST_BURST_BYTES, int(mbit_per_second * 1e6 / 8 * _BURST_SECONDS))
                shape = ["tbf", "rate", f"{mbit_per_second}mbit", "burst", str(burst), "latency", _QUEUE]
                _call("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull the plug of a host, or put it in again."""
        _call("ip", "-n", self._switch, "link", "set", f"p{host}", "up" if up else "down")

    def strike(self, process: int, how: signal.Signals) -> None:
        """Send a signal to a process, if it is still there."""
        _signal(process, how)

    def kill(self, host: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to every process of a host."""
        for process in _processes(self.name(host)):
            _signal(process, how)

    # ---------------------------------------------------------------------------------------------------------- making

    @property
    def _etc_hosts(self) -> Path:
        return self.folder / "hosts"

    def _make(self) -> None:
        lines = [f"{self.address(host)} {name}" for host, name in enumerate(self._names)]
        self._etc_hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for host in ("", *range(self.network.hosts)):
            Path(f"{self.own_folder}{host}").mkdir()
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "br0", "up")
        if self.network.cores_per_host:
            self._quotas = {host: Quota(name, self.network.cores_per_host) for host, name in enumerate(self._names)}
            self._unlimited = Quota(f"{self.prefix}driver", None)
        for host, name in enumerate(self._names):
            _call("ip", "netns", "add", name)
            pair = ["type", "veth", "peer", "name", "eth0", "netns", name]
            _call("ip", "-n", self._switch, "link", "add", f"p{host}", "mtu", str(_MTU_BYTES), *pair)
            _call("ip", "-n", self._switch, "link", "set", f"p{host}", "master", "br0", "up")
            # With the loopback's own 65536 jax 0.10 waits for delayed acknowledgements, 44 ms a message.
            _call("ip", "-n", name, "link", "set", "lo", "mtu", str(_MTU_BYTES), "up")
            _call("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _call("ip", "-n", name, "link", "set", "eth0", "mtu", str(_MTU_BYTES), "up")
            self._add_routes(name, self.address(host))
            for memory in ("tcp_rmem", "tcp_wmem"):
                sizes = f"4096 {_SOCKET_BYTES} {4 * _SOCKET_BYTES}"  # least, at first, most
                _call(
                    "ip", "netns", "exec", name, "sh", "-c", _IF_WRITABLE, "sh", f"/proc/sys/net/ipv4/{memory}", sizes
                )
            self.set_rate(host, self.network.mbit_per_second)

    def _add_routes(self, name: str, address: str) -> None:
        control = ["congctl", _CONTROL] if knows_cubic() else []
        ways = ["dev", "eth0", "src", address, *control]
        made_with_address = [f"{self.network.network}.0/24", "proto", "kernel", "scope", "link"]
        _call("ip", "-n", name, "route", "change", *made_with_address, *ways)
        # What comes from the same host is acknowledged at once.  Else the kernel lets some of it wait for 40 ms, and with it the
        # devices whose sender waits for that: collectives among several devices of each host stand still now and then.
        to_itself = f"table local local {address} dev eth0 proto kernel scope host src {address}".split()
        _call("ip", "-n", name, "route", "change", *to_itself, "quickack", "1")
        # It leads nowhere: programs find their own address by asking which one they would reach the internet from.
        _call("ip", "-n", name, "route", "add", "default", *ways)


def _ended(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def traffic_of(namespace: str) -> Traffic:
    """What has crossed the link of a host; any process of root may ask, in whatever namespace it is."""
    said = json.loads(_call("ip", "-n", namespace, "-json", "-statistics", "link", "show", "dev", "eth0"))
    found = said[0]["stats64"]
    return Traffic(found["tx"]["bytes"], found["rx"]["bytes"])


def remove_abandoned() -> None:
    """Take down the hosts of processes that are no more, and remove their files."""
    for namespace in _namespaces():
        made = _NAMESPACE.fullmatch(namespace)
        if made and not Path("/proc", made["owner"]).exists():
            _remove([namespace])
            remove_groups(f"{_NAMES}{made['owner']}")
    for folder in Path(tempfile.gettempdir()).glob(f"{_NAMES}*-*"):
        made = _FOLDER.fullmatch(folder.name)
        if made and not Path("/proc", made["owner"]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _remove(namespaces: Sequence[str]) -> None:
    there = [namespace for namespace in namespaces if namespace in _namespaces()]
    until = time.monotonic() + _DYING_SECONDS
    while left := [process for namespace in there for process in _processes(namespace)]:
        for process in left:
            _signal(process, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    for namespace in there:
        _call("ip", "netns", "delete", namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()]


def _processes(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def _signal(process: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, how)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
