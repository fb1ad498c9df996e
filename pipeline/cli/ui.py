"""`pipeline ui`: serve MLflow's UI on the configured store.

It prints the address of the newest run.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pipeline.common.errors import ConfigError, Parser, as_config_error, say
from pipeline.config import compose

HOST = "127.0.0.1"
PORTS = range(1, 2**16)
_PATIENCE = 10.0  # seconds for the server's processes to end


def ui(arguments: Sequence[str]) -> int:
    """Serve MLflow's UI on the store of the composed config, until Ctrl-C or SIGTERM."""
    parser = Parser(
        prog="pipeline ui",
        description=ui.__doc__,
        epilog="All other arguments are overrides, such as "
        "tracking.uri=sqlite:///elsewhere/mlflow.db",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--port",
        metavar="PORT",
        default="5000",
        help="where to listen on 127.0.0.1; default 5000",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    uri = compose.composed(overrides).tracking.uri
    if not options.port.isdecimal() or int(options.port) not in PORTS:
        raise ConfigError("--port", "must be from 1 to 65535", options.port)
    port = int(options.port)
    rule = "must be a port that is free: choose another with --port"
    with as_config_error("--port", rule, port):
        socket.create_server((HOST, port)).close()
    return _serve(uri, port)


def _serve(uri: str, port: int) -> int:
    if uri.startswith(("http://", "https://")):
        say(f"The store is a server with a UI of its own: {uri}", to=sys.stdout)
        return 0
    pages = _pages(uri, f"http://{HOST}:{port}")
    say(*pages, "Ctrl-C ends it", to=sys.stdout)

    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", HOST, "--port", str(port)]
    environment = {
        # Executing jobs, such as evaluations of language models, takes eight more
        # processes.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
        # On the command line, a password would show in the list of processes.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "PYTHONSAFEPATH": "1",  # It imports nothing from the working directory.
    }
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    # MLflow leaves some of its processes behind. In a session of their own, they can be
    # killed as a whole.
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return server.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with suppress(subprocess.TimeoutExpired):
                server.wait(_PATIENCE)


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _pages(uri: str, root: str) -> list[str]:
    """Return lines with the addresses of the newest run and of its experiment."""
    from pipeline.tracking.store import Store

    client = Store(uri).client()
    experiments = client.search_experiments()
    runs = client.search_runs(
        [experiment.experiment_id for experiment in experiments],
        order_by=["start_time DESC"],
        max_results=1,
    )
    if not runs:
        return [f"there is no run yet: {root}"]
    newest = runs[0].info
    experiment = f"{root}/#/experiments/{newest.experiment_id}"
    return [
        f"newest run: {experiment}/runs/{newest.run_id}",
        f"all runs:   {experiment}/runs",
    ]
