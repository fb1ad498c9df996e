"""Registers the launchers and the sweeper of `pipeline.sweep` with Hydra.

Hydra takes only classes that are defined here.
"""

from functools import partial
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from pipeline.config import session
from pipeline.sweep import launcher, local, search, slurm

_MINUTES_OF_A_DAY = 24 * 60
_MINUTES_OF_A_YEAR = 365 * _MINUTES_OF_A_DAY


class LocalLauncher(local.LocalLauncher):
    """The launcher of `hydra/launcher=local`."""


class SlurmLauncher(slurm.SlurmLauncher):
    """The launcher of `hydra/launcher=submitit_slurm`."""


class BasicLauncher(launcher.BasicLauncher):
    """The launcher of `hydra/launcher=basic`."""


class SearchSweeper(search.SearchSweeper):
    """The sweeper of `hydra/sweeper=search`."""


class Names(SearchPathPlugin):
    """Stores the configs of these plugins.

    Hydra calls it after it has loaded all plugins, so these replace the published ones.
    For Hydra's Compose API, which has no --config-dir, it also adds the user's folder.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        config_dir = session.session().config_dir
        if config_dir is not None:
            search_path.append("command-line", f"file://{Path(config_dir).absolute()}")

        local_launcher = {
            "_target_": f"{__name__}.LocalLauncher",
            "timeout_min": _MINUTES_OF_A_YEAR,
        }
        slurm_launcher = SlurmQueueConf(
            _target_=f"{__name__}.SlurmLauncher", timeout_min=_MINUTES_OF_A_DAY
        )
        basic_launcher = {"_target_": f"{__name__}.BasicLauncher"}
        search_sweeper = {
            "_target_": f"{__name__}.SearchSweeper",
            "trials": 20,
            "at_once": 1,
            "seed": 0,
            "params": None,
        }

        store = partial(ConfigStore.instance().store, provider="pipeline")
        store("local", local_launcher, "hydra/launcher")
        store("submitit_local", local_launcher, "hydra/launcher")  # of recorded sweeps
        store("submitit_slurm", slurm_launcher, "hydra/launcher")
        store("basic", basic_launcher, "hydra/launcher")
        store("search", search_sweeper, "hydra/sweeper")
