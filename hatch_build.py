"""Builds the native kernels into the wheel on Linux x86-64 or Arm with a C compiler.

Elsewhere the wheel is pure Python. With JAXEMBED_NATIVE=required kernels that cannot be compiled on
such a machine fail the build.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """A build hook of hatchling that compiles the native kernels.

    They are built in the source tree, from where an editable install uses them.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels and set the tag of the wheel. If it fails, warn and build without,
        unless they are required."""
        compiler = _compiler(Path(self.root))
        try:
            build_data["tag"] = compiler.build_all()
        except (compiler.NativeUnavailable, OSError) as error:
            foreign = isinstance(error, compiler.UnsupportedPlatform)
            if os.environ.get("JAXEMBED_NATIVE") == "required" and not foreign:
                raise
            self.app.display_warning(f"without native kernels: {error}")
            return
        build_data["pure_python"] = False


def _compiler(root: Path) -> ModuleType:
    """Load compiler.py from its file, because jaxembed cannot be imported during its build."""
    path = root / "jaxembed" / "models" / "native" / "compiler.py"
    spec = importlib.util.spec_from_file_location("jaxembed_compiler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
