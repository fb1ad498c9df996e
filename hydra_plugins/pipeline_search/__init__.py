"""`hydra/sweeper=search`: the sweeper of `pipeline.launching.search`."""

from hydra.core.config_store import ConfigStore

from pipeline import compose
from pipeline.launching import search


class SearchSweeper(search.SearchSweeper):
    """Jobs in batches, each batch chosen by what those before it gave."""


def _register() -> None:
    node = {"_target_": f"{__name__}.SearchSweeper", "trials": 20, "at_once": 1, "seed": 0, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="search", node=node, provider="pipeline")


compose.on_plugins_found(__name__, _register)
