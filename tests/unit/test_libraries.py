"""What libraries do when they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model
from pipeline.models.sharing import SharedModels
SharedModels().begin(open_model, ModelConfig(path="nowhere"), 0)
time.sleep({pause})
from transformers import AutoConfig
"""


@pytest.mark.parametrize("pause", [0, 0.15, 0.4])
def test_a_model_that_is_opened_in_a_thread_leaves_its_library_whole_for_the_others(pause: float) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(pause=pause)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
