"""Registers the launchers and the sweeper of `pipeline.sweep` with Hydra.

Hydra accepts only plugin classes that are defined in `hydra_plugins`.
"""

from functools import partial
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from pipeline.config import installed_configs, session
from pipeline.sweep import basic, local, search, slurm

_MINUTES_OF_A_DAY = 24 * 60
_MINUTES_OF_A_YEAR = 365 * _MINUTES_OF_A_DAY


class LocalLauncher(local.LocalLauncher):
    """The launcher for `hydra/launcher=local`."""


class SlurmLauncher(slurm.SlurmLauncher):
    """The launcher for `hydra/launcher=submitit_slurm`."""


class BasicLauncher(basic.BasicLauncher):
    """The launcher for `hydra/launcher=basic`."""


class SearchSweeper(search.SearchSweeper):
    """The sweeper for `hydra/sweeper=search`."""


class Names(SearchPathPlugin):
    """Stores the configs of these plugins, and adds folders of configs.

    These are the folders of other installed packages, and the user's own.

    Hydra calls `manipulate_search_path` after all plugins are loaded, so these configs
    replace those that other installed plugins have stored under the same names. The
    user's folder is added for Hydra's Compose API, which has no `--config-dir`.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in installed_configs.folders():
            search_path.append("installed package", f"file://{folder}")
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
        store("submitit_local", local_launcher, "hydra/launcher")  # in old records
        store("submitit_slurm", slurm_launcher, "hydra/launcher")
        store("basic", basic_launcher, "hydra/launcher")
        store("search", search_sweeper, "hydra/sweeper")
