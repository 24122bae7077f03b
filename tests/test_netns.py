"""The links of emulated hosts: how many packets a message is, how long it takes, and what waits.  Needs root and iproute2."""

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

TALKS = 40
TALK = """
import socket, threading
def late():
    lines = open("/proc/net/netstat").read().splitlines()
    return dict(zip(lines[0].split(), lines[1].split()))["DelayedACKs"]
def answer():
    other, _ = server.accept()
    for _ in range({talks}):
        for _ in range(2):
            other.recv(1)
        other.sendall(b"x")
with socket.create_server(("{address}", {port})) as server:
    answering = threading.Thread(target=answer)
    answering.start()
    with socket.create_connection(("{address}", {port})) as other:
        before = int(late())
        for _ in range({talks}):
            other.sendall(b"x")
            other.sendall(b"x")
            other.recv(1)
        print(int(late()) - before)
    answering.join()
"""
"""The second byte is not sent before the first is acknowledged, which nothing that is said in between hastens."""


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


def test_what_a_host_sends_itself_waits_for_no_acknowledgement(tmp_path: Path) -> None:
    """Devices of one host are ranks of a world that send each other so; real hosts' accelerators do not wait 40 ms."""
    log = tmp_path / "talk.log"
    with Hosts(Network(1, MBIT)) as hosts:
        code = TALK.format(address=hosts.address(0), port=PORT, talks=TALKS)
        assert hosts.start(0, [sys.executable, "-c", code], {}, log).wait(60) == 0, log.read_text()
    assert int(log.read_text()) < TALKS / 10
