"""What the libraries of models change for the whole process: the dtype while they build one, and the terminal."""

from __future__ import annotations

import logging
import threading
import warnings

BUILDING = threading.RLock()
"""Held by a thread while it builds a model: transformers sets torch's default dtype for all threads meanwhile, and two
models that are built at once come out with weights of each other's dtype."""


def quieten() -> None:
    """Keep the progress bars and notices of libraries off the terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # For good: to catch the warnings of one block would let another thread's through.
    warnings.filterwarnings("ignore", module=r"(peft|transformers)\b")
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # imported to save a model; says on stdout that no GPU is there


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
