"""What libraries do when they are imported, and to memory."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model
from pipeline.models.sharing import SharedModels
SharedModels().begin(open_model, ModelConfig(path="nowhere"), 0)
time.sleep(0.15)
from transformers import AutoConfig
"""


def test_a_model_that_is_opened_in_a_thread_leaves_its_library_whole_for_the_others() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BATCHES = """
import resource
import numpy as np
from pipeline.models.devices import give_back, keep_memory
keep_memory()
size, arrays, rounds = 1 << 23, 8, 10
def work():
    some = [np.empty(size, dtype=np.uint8) for _ in range(arrays)]
    for array in some:
        array[::4096] = 1
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(rounds):
    work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages = arrays * rounds * size // resource.getpagesize()
resident = lambda: int(open("/proc/self/statm").read().split()[1])
held = resident()
give_back()
print(faults / pages, (held - resident()) * rounds / pages)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of the GNU C library")
def test_memory_of_a_batch_is_kept_for_the_next_and_given_back_at_once() -> None:
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}  # large pages take a fault for many of them
    done = subprocess.run([sys.executable, "-c", BATCHES], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    faults, given_back = map(float, done.stdout.split())
    assert faults < 0.05
    assert given_back > 0.9
