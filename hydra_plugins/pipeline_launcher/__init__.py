"""Registers the launchers and the sweeper of `pipeline.sweep` with Hydra, which takes only classes defined here."""

from functools import partial
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from pipeline.config import session
from pipeline.sweep import launcher, local, search, slurm

_BASES = (
    local.LocalLauncher,
    slurm.SlurmLauncher,
    launcher.BasicLauncher,
    search.SearchSweeper,
)
globals().update(
    {
        b.__name__: type(
            b.__name__, (b,), {"__module__": __name__, "__doc__": b.__doc__}
        )
        for b in _BASES
    }
)


class Names(SearchPathPlugin):
    """Stores the configs. Hydra calls it after it has loaded all plugins, so these replace the published ones.

    It also adds a user's folder where Hydra's Compose API, which has no --config-dir, composes.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := session.session().config_dir) is not None:
            search_path.append("command-line", f"file://{Path(folder).absolute()}")
        here = {
            "_target_": f"{__name__}.LocalLauncher",
            "timeout_min": 525600,
        }  # a year
        searching = {
            "_target_": f"{__name__}.SearchSweeper",
            "trials": 20,
            "at_once": 1,
            "seed": 0,
            "params": None,
        }
        there = SlurmQueueConf(_target_=f"{__name__}.SlurmLauncher", timeout_min=1440)
        store = partial(ConfigStore.instance().store, provider="pipeline")
        store("local", here, "hydra/launcher")
        store("submitit_local", here, "hydra/launcher")  # of recorded sweeps
        store("submitit_slurm", there, "hydra/launcher")
        store("basic", {"_target_": f"{__name__}.BasicLauncher"}, "hydra/launcher")
        store("search", searching, "hydra/sweeper")
