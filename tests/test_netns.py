"""The links of emulated hosts: how many packets a message is, and how long it takes.  Needs root and iproute2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.netns import why_not
from benchmarks.netns.hosts import Hosts, Network

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be emulated: {why_not()}")

MBIT = 100
MESSAGE_BYTES = 2 << 20
FRAMES = MESSAGE_BYTES // 1500
PORT = 7000

RECEIVE = """
import json, socket, time
def packets():
    return int(next(line for line in open("/proc/net/dev") if "eth0" in line).split()[2])
with socket.create_server(("{address}", {port})) as server:
    other, _ = server.accept()
    other.recv(1)
    started, before, left = time.monotonic(), packets(), {size}
    while left and (came := other.recv(1 << 16)):
        left -= len(came)
    assert not left
    print(json.dumps([time.monotonic() - started, packets() - before]))
"""
SEND = """
import socket, time
while True:
    try:
        other = socket.create_connection(("{address}", {port}))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
other.sendall(b"x")
other.sendall(bytes({size}))
other.recv(1)
"""
"""A byte before the message, so that the time begins when it does."""


def test_a_message_comes_in_whole_packets_at_the_rate_of_the_link(tmp_path: Path) -> None:
    """Frames are put together before a process wakes, as network cards do: else receiving costs more the slower the link is."""
    with Hosts(Network(2, MBIT)) as hosts:
        told = {"address": hosts.address(1), "port": PORT, "size": MESSAGE_BYTES}
        logs = [tmp_path / "send.log", tmp_path / "receive.log"]
        ends = [
            hosts.start(host, [sys.executable, "-c", code.format(**told)], {}, log)
            for host, (code, log) in enumerate(zip((SEND, RECEIVE), logs, strict=True))
        ]
        assert [end.wait(60) for end in ends] == [0, 0], [log.read_text() for log in logs]
    seconds, packets = json.loads(logs[1].read_text())
    assert seconds == pytest.approx(8 * MESSAGE_BYTES / (MBIT * 1e6), rel=0.15)
    assert packets < FRAMES / 10
