# SPDX-License-Identifier: Apache-2.0
"""Makes the package's tensor modules importable on a machine without megatron-core.

To be imported before them.  They need torch alone, but ``megatron.training`` is an overlay that
refuses to be imported without the trainer, so there a bare module stands in for it.
"""

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def _stand_in() -> None:
    try:
        importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        module = ModuleType("megatron.training")
        module.__path__ = [str(ROOT / "megatron" / "training")]
        sys.modules.setdefault("megatron.training", module)


_stand_in()
