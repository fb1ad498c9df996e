"""The user's own modules that are saved with a model, so that it loads elsewhere."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from pipeline.tracking import logged_model

FILES = {
    "net_of_mine.py": (
        "import os\n"
        "import keras\n"
        "from pipeline import accumulation\n"
        "from parts_of_mine.dense import Doubled\n"
        "def build():\n"
        "    import late_of_mine\n"
        "    return keras.Sequential([keras.Input((3,)), Doubled()])\n"
    ),
    "parts_of_mine/__init__.py": "from .. import beyond\nfrom . import dense\n",
    "parts_of_mine/dense.py": (
        "import keras\n"
        "from .sub import scale\n"
        "class Doubled(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return scale.FACTOR * x\n"
    ),
    "parts_of_mine/sub/__init__.py": "",
    "parts_of_mine/sub/scale.py": "from constants_of_mine import FACTOR\n",
    "constants_of_mine.py": "import net_of_mine, absent_of_mine\nFACTOR = 2.0\n",
    "late_of_mine.py": "import broken_of_mine\nraise RuntimeError('was executed')\n",
    "broken_of_mine.py": "this is no Python\n",
    "unused_of_mine.py": "",
    "env/lib/site-packages/installed_of_mine.py": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with modules that import each other."""
    for name, text in FILES.items():
        file = tmp_path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    library = tmp_path / "library" / "library_of_mine.py"
    library.parent.mkdir()
    library.write_text("")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.syspath_prepend(str(tmp_path / "work/env/lib/site-packages"))
    yield tmp_path / "work"
    for name in [name for name in sys.modules if "of_mine" in name]:
        del sys.modules[name]


def names_of(paths):
    return [Path(path).name for path in paths]


def imported(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def saved_for(folder, text):
    """Return what is saved for a target in a module with this text."""
    imported(folder, "target_of_mine", text)
    return names_of(
        logged_model.code_to_save(keras.Sequential(), ["target_of_mine.build"])
    )


def test_the_modules_that_a_saved_module_imports_are_saved_and_not_executed(folder):
    # `net_of_mine` would import itself in a circle.
    saved = saved_for(folder, "if 0:\n    import net_of_mine\n")
    assert saved == [
        "broken_of_mine.py",
        "constants_of_mine.py",
        "late_of_mine.py",
        "net_of_mine.py",
        "parts_of_mine",
        "target_of_mine.py",
    ]
    assert "late_of_mine" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "import os.path, keras, numpy as np",
        "import pipeline.accumulation",
        "import library_of_mine",
        "import installed_of_mine",
        "from absent_of_mine import name",
    ],
)
def test_an_import_from_elsewhere_is_not_saved(folder, text):
    saved = saved_for(folder, f"if 0:\n    {text}\n")
    assert saved == ["target_of_mine.py"]


@pytest.mark.slow
def test_a_model_whose_layer_is_in_an_imported_module_loads_elsewhere(folder, tmp_path):
    (folder / "constants_of_mine_3.py").write_text("FACTOR = 3.0\n")
    module = imported(
        folder,
        "layer_of_mine",
        "import keras\n"
        "from constants_of_mine_3 import FACTOR\n"
        "class Tripled(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return FACTOR * x\n",
    )
    model = keras.Sequential([keras.Input((2,)), module.Tripled()])
    code = logged_model.code_to_save(model, [])
    assert names_of(code) == ["constants_of_mine_3.py", "layer_of_mine.py"]
    x = np.ones((4, 2), "float32")
    logged_model.save(tmp_path / "model", model, x, code)
    saved = {path.name for path in (tmp_path / "model" / "code").iterdir()}
    assert saved == {"constants_of_mine_3.py", "layer_of_mine.py"}
