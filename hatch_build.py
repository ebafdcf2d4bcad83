"""A wheel that ships artifacts holds machine code, so its name says for which machine; without them it is for any."""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TagByContent(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if any(Path(self.root, "kda_tl", "_artifacts").glob("manifest/*.json")):
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
