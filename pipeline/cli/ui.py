"""`pipeline ui`: serve MLflow's UI on the configured store.

The command prints the addresses of the newest run, of its sweep if it belongs to one,
and of all runs.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pipeline.common.errors import ConfigError, Parser, as_config_error, say
from pipeline.config import compose

HOST = "127.0.0.1"
PORTS = range(1, 2**16)
_PATIENCE = 10.0  # seconds for the server's processes to end


def ui(arguments: Sequence[str]) -> int:
    """Serve MLflow's UI for the configured store, until Ctrl-C or SIGTERM.

    For a store that is a server, only print its address.
    """
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
        help="the port on 127.0.0.1 to listen on; default 5000",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    uri = compose.composed([*config_dir, *overrides]).tracking.uri
    if not options.port.isdecimal() or int(options.port) not in PORTS:
        raise ConfigError("--port", "must be from 1 to 65535", options.port)
    if uri.startswith(("http://", "https://")):
        say(f"The store is a server with a UI of its own: {uri}", to=sys.stdout)
        return 0
    port = int(options.port)
    rule = "must be a free port: choose another with --port"
    with as_config_error("--port", rule, port):
        socket.create_server((HOST, port)).close()
    return _serve(uri, port)


def _serve(uri: str, port: int) -> int:
    # Read the store first, so that the server is not started if reading fails.
    pages = _pages(uri, f"http://{HOST}:{port}")

    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", HOST, "--port", str(port)]
    environment = {
        # Disable the execution of jobs, such as evaluations of language models, which
        # would start eight more processes.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
        # Pass the URI in the environment: on the command line, a password in it would
        # be visible in the list of processes.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "PYTHONSAFEPATH": "1",  # Import nothing from the working directory.
    }
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    # Start a new session, so that all processes of the server can be killed together:
    # MLflow leaves some of them behind.
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if _listens(server, port):
            say(*pages, "Ctrl-C ends it", to=sys.stdout)
        return server.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with suppress(subprocess.TimeoutExpired):
                server.wait(_PATIENCE)


def _listens(server: subprocess.Popen, port: int) -> bool:
    """Wait until the server accepts connections; return False if it exits first."""
    while server.poll() is None:
        with suppress(OSError):
            socket.create_connection((HOST, port), timeout=1).close()
            return True
        time.sleep(0.1)
    return False


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _pages(uri: str, root: str) -> list[str]:
    """Return lines with the addresses of the newest run and its experiment's runs.

    If the newest run belongs to a sweep, the page that compares the sweep's runs comes
    first.
    """
    from pipeline.sweep import mlflow_view
    from pipeline.tracking.foreign_store import RUN_ID
    from pipeline.tracking.store import Store, all_experiments

    client = Store(uri).client()
    experiments = all_experiments(client)
    runs = client.search_runs(
        [experiment.experiment_id for experiment in experiments],
        order_by=["start_time DESC"],
        max_results=1,
    )
    if not runs:
        return [f"there is no run yet: {root}"]
    newest = runs[0].info
    tags = runs[0].data.tags
    plain = mlflow_view.runs_fragment(newest.experiment_id)
    page, _, query = plain.partition("?")
    lines = [
        f"newest run: {root}/{page}/{newest.run_id}?{query}",
        f"all runs:   {root}/{plain}",
    ]

    sweep = tags.get("sweep", "")
    if "sweep.name" in tags:
        sweep = newest.run_id
    experiment = client.get_experiment(newest.experiment_id)
    is_run_id = RUN_ID.fullmatch(sweep)  # The store is not trusted.
    if is_run_id and f"{mlflow_view.VIEW_TAG}{sweep}" in experiment.tags:
        view = mlflow_view.view_fragment(newest.experiment_id, sweep)
        lines.insert(0, f"sweep:      {root}/{view}")
    return lines
