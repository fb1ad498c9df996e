"""`pipeline ui`: serve MLflow's UI on the configured store, and print the address of the newest run."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from pipeline.common.errors import ConfigError, Parser, refused, say
from pipeline.config import compose

HOST = "127.0.0.1"
_PATIENCE = 10.0  # seconds for the server's processes to end


def ui(arguments: Sequence[str]) -> int:
    """Serve MLflow's UI on the store of the composed config, until Ctrl-C or SIGTERM."""
    others = "All other arguments are overrides, such as tracking.uri=sqlite:///elsewhere/mlflow.db"
    parser = Parser(
        prog="pipeline ui", description=ui.__doc__, epilog=others, allow_abbrev=False
    )
    parser.add_argument(
        "--port",
        metavar="PORT",
        default="5000",
        help="where to listen on 127.0.0.1; default 5000",
    )
    options, rest = parser.parse_known_args(list(arguments))
    uri = compose.composed(rest).tracking.uri
    if not options.port.isdecimal() or not 0 < (port := int(options.port)) < 2**16:
        raise ConfigError("--port", "must be from 1 to 65535", options.port)
    with refused(
        "--port", "must be a port that is free: choose another with --port", port
    ):
        socket.create_server((HOST, port)).close()
    return _serve(uri, port)


def _serve(uri: str, port: int) -> int:
    if uri.startswith(("http://", "https://")):
        say(f"The store is a server with a UI of its own: {uri}", to=sys.stdout)
        return 0
    say(*_pages(uri, f"http://{HOST}:{port}"), "Ctrl-C ends it", to=sys.stdout)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    # MLflow leaves some of its processes behind, so they get a session that can be killed as a whole. The URI is passed
    # in the environment, since a password in it would show in the list of processes. Job execution, such as evaluations
    # of language models, would start eight more processes.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **os.environ}
    environment |= {
        "MLFLOW_BACKEND_STORE_URI": uri,
        "PYTHONSAFEPATH": "1",
    }  # import nothing from the working directory
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
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


def _pages(uri: str, root: str) -> list[str]:
    from pipeline.tracking.store import Store

    client = Store(uri).client()
    experiments = [
        experiment.experiment_id for experiment in client.search_experiments()
    ]
    runs = client.search_runs(experiments, order_by=["start_time DESC"], max_results=1)
    if not runs:
        return [f"there is no run yet: {root}"]
    where = f"{root}/#/experiments/{runs[0].info.experiment_id}"
    return [
        f"newest run: {where}/runs/{runs[0].info.run_id}",
        f"all runs:   {where}/runs",
    ]
