"""The meeting of the workers: only who knows the run's secret takes part.

Whoever else connects meanwhile does no harm.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config.cluster import Cluster
from pipeline.distributed import heartbeats, listener, rendezvous
from pipeline.distributed.heartbeats import LostWorker
from pipeline.distributed.json_socket import JsonSocket, sealed
from pipeline.distributed.listener import reserve_port

SECRET = b"known to the workers"
OWN = {"config": {"seed": 0}, "versions": {"python": "3"}}
GREETING = {**OWN, "index": 1, "challenge": "c", "port": 1}
TWO = Cluster(("127.0.0.1:0",) * 2, started=True)


@contextmanager
def chief(cluster=TWO, own=OWN):
    """Yield the server of a chief that waits for its workers, and what it gathers."""
    ended = threading.Event()
    server = rendezvous.Server(cluster, SECRET)

    def check():
        if ended.is_set():
            raise RuntimeError("the test has ended")

    with ThreadPoolExecutor() as pool:
        try:
            answer = {"spec": "secret spec"}
            yield server, pool.submit(server.gather, own, answer, check)
        finally:
            ended.set()
            time.sleep(0.01)
            server.close()


def client(server, index=1, secret=SECRET):
    return rendezvous.Client(
        replace(server.cluster, index=index, rendezvous=server.address), secret
    )


def connected(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def line(message):
    return json.dumps(message).encode() + b"\n"


def knowing(**changes):
    """Return what says the greeting of a worker with the secret, with `changes`.

    A key that is changed to None is left out.
    """
    greeting = {**GREETING, **changes}
    sent = {key: value for key, value in greeting.items() if value is not None}
    return lambda challenge: line(sealed(sent, SECRET, "worker", challenge))


STRANGERS = {
    "silent": lambda _: b"",
    "half a line": lambda _: b'{"index": 1, ',
    "huge": lambda _: b"x" * 2**21,
    "no JSON": lambda _: b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
    "bytes": lambda _: b"\x16\x03\x01\xff\x00\n",
    "a list": lambda _: b"[1]\n",
    "a number": lambda _: b"1\n",
    "an endless number": lambda _: b'{"index": ' + b"9" * 5000 + b"}\n",
    "nested": lambda _: b"[" * 200_000 + b"\n",
    "an index alone": lambda _: b'{"index": 1}\n',
    "refusing": lambda _: b'{"index": 1, "refused": "no"}\n',
    "unsealed": lambda _: line(GREETING),
    "sealed is a number": lambda _: line({"sealed": 1, "proof": 2}),
    "proof is no text of ours": lambda _: line({"sealed": "{}", "proof": "\ud800"}),
    "wrong secret": lambda challenge: line(
        sealed(GREETING, b"another secret", "worker", challenge)
    ),
    "no secret": lambda challenge: line(sealed(GREETING, b"", "worker", challenge)),
    "replayed": lambda _: line(
        sealed(GREETING, SECRET, "worker", "the challenge of an earlier connection")
    ),
    "the chief's own words": lambda challenge: line(
        sealed(GREETING, SECRET, "chief", challenge)
    ),
    "wrong index": knowing(index=2),
    "index of the chief": knowing(index=0),
    "negative index": knowing(index=-1),
    "index of another type": knowing(index="1"),
    "index is true": knowing(index=True),
    "index is a float": knowing(index=1.0),
    "no port": knowing(port=None),
    "wrong port": knowing(port=65536),
    "port of another type": knowing(port="1"),
    "no challenge": knowing(challenge=None),
    "versions of another type": knowing(versions=[1]),
    "no config": knowing(config=None),
    "a reason of another type": knowing(refused=["no"], port=None),
}


@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
@pytest.mark.parametrize("message_for", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_does_no_harm(message_for, closes):
    with chief() as (server, gathered), connected(server) as stranger:
        if closes:  # with a reset, so that nothing is read to its end
            stranger.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        challenge = JsonSocket(stranger).read(60)["challenge"]
        stranger.sendall(message_for(challenge))
        if closes:
            stranger.close()
        answer = client(server).join(OWN, 60)
        assert answer["spec"] == "secret spec"
        assert tuple(answer["addresses"]) == gathered.result(60).addresses
        if not closes:
            server.close()
            heard = JsonSocket(stranger).read(60)
            assert heard in (None, {})


def test_many_who_are_silent_or_slow_starve_no_worker(monkeypatch):
    """None of them has to answer before the worker would give up."""
    monkeypatch.setattr(listener, "ANSWERING", 600.0)
    with chief() as (server, gathered):
        strangers = [connected(server) for _ in range(200)]
        for stranger in strangers[100:]:
            stranger.sendall(b"{")
        assert client(server).join(OWN, 60)["spec"] == "secret spec"
        assert len(gathered.result(60).addresses) == 2
        for stranger in strangers:
            stranger.close()


def test_of_two_with_one_index_the_first_stays():
    with (
        chief(Cluster(("127.0.0.1:0",) * 3, started=True)) as (server, gathered),
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(client(server).join, OWN, 60)
        time.sleep(0.2)
        with pytest.raises(ConfigError, match="another worker 1 has already joined"):
            client(server).join(OWN, 60)
        assert client(server, 2).join(OWN, 60) == first.result(60)
        assert len(set(gathered.result(60).addresses)) == 3


def test_a_worker_with_another_secret_says_so_and_the_chief_waits_on():
    with chief() as (server, gathered):
        for secret in (b"another secret", b""):
            rule = "must all know the same secret, in PIPELINE_SECRET or in hardware[.]secret"
            with pytest.raises(ConfigError, match=rule):
                client(server, secret=secret).join(OWN, 60)
        assert not gathered.done()
        client(server).join(OWN, 60)
        gathered.result(60)


def test_a_worker_takes_nothing_from_a_chief_without_the_secret():
    with (
        socket.create_server(("127.0.0.1", 0)) as impostor,
        ThreadPoolExecutor() as pool,
    ):
        address = f"127.0.0.1:{impostor.getsockname()[1]}"
        cluster = Cluster(("127.0.0.1:0",) * 2, 1, rendezvous=address)
        joining = pool.submit(rendezvous.Client(cluster, SECRET).join, OWN, 60)
        connection = JsonSocket(impostor.accept()[0])
        connection.write({"challenge": "x"})
        heard = connection.read(60)
        connection.write(
            {"sealed": '{"answer": {"spec": "of a stranger"}}', "proof": heard["proof"]}
        )
        with pytest.raises(ConfigError, match="must all know the same secret"):
            joining.result(60)
        connection.socket.close()


def test_what_a_worker_says_is_cut():
    with chief() as (server, gathered), ThreadPoolExecutor() as pool:
        joining = pool.submit(client(server).join, {"refused": "no " * 1000}, 5)
        with pytest.raises(ConfigError) as refused:
            gathered.result(60)
        assert str(refused.value).startswith("worker 1 refuses to train: no no")
        assert len(str(refused.value)) < 400
        with pytest.raises(ConfigError):
            joining.result(60)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (None, None),
        (b"", LostWorker(1)),
        (
            b'{"failed": "' + b"x" * 500 + b'"}\n',
            LostWorker(1, failed="x" * 300),
        ),
        (b'{"reductions": "many"}\n', LostWorker(1)),
        (b"nonsense\n", LostWorker(1)),
        ("silent", LostWorker(1)),
    ],
)
def test_which_worker_is_lost(says, expected, monkeypatch):
    """A lost worker is known by its connection, not by what TensorFlow says.

    The connection is silent, or closed, with a reason or without.
    """
    monkeypatch.setattr(rendezvous, "SILENCE", 0.3)
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.05)
    exited = threading.Event()
    with chief() as (server, gathered):
        worker = client(server)
        worker.join(OWN, 60)
        gathered.result(60)
        server.watch(lambda: 1, lambda *_: None)
        if says is None:
            monkeypatch.setattr(rendezvous.os, "_exit", lambda _: exited.set())
            worker.watch(lambda: 1)
        elif says != "silent":
            worker._connection.socket.sendall(says)
            worker._connection.socket.close()
        assert server.lost(0.6) == expected
        worker._connection.socket.close()
        if says is None:
            assert exited.wait(10)  # its thread would end this process later


def test_a_port_is_kept_for_tensorflow():
    """Who asks the system for any port never gets it.

    Who asks for the number, as TensorFlow does, gets it.
    """
    with reserve_port("worker 1", "127.0.0.1:0") as kept:
        port = kept.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        taken = pytest.raises(
            ConfigError, match="worker 1 must have a free address of its own"
        )
        with socket.create_server(("0.0.0.0", port)), taken:
            reserve_port("worker 1", f"127.0.0.1:{port}")


@pytest.mark.parametrize(("reductions", "limit"), [(1, "0.2"), (2, "0.1")])
def test_the_message_about_a_straggler_has_the_limit_that_it_exceeded(
    monkeypatch, reductions, limit
):
    """It always named the limit after the first update, 90 s."""
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.01)
    monkeypatch.setattr(heartbeats, "STARTUP_TIMEOUT", 0.2)
    monkeypatch.setattr(heartbeats, "TIMEOUT", 0.1)
    lost = []
    here, there = socket.socketpair()
    with here, there:
        other = JsonSocket(there)
        other.write({"reductions": reductions})
        heartbeats.Heartbeats(
            {1: JsonSocket(here)}, 0, lambda: reductions + 1, lost.append
        ).exchange()
    failed = f"it has kept the others waiting for {limit} s"
    assert lost == [LostWorker(1, failed=failed, late=True)]
