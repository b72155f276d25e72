"""One set of weights for several threads: each has layers and a tokenizer of its own over the same tensors."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn

from pipeline.config.models import ModelConfig
from pipeline.models.libraries import import_package
from pipeline.models.load import LanguageModel, Seq2SeqModel

Opened = TypeVar("Opened", bound=LanguageModel | Seq2SeqModel)


class SharedModels:
    """Opens each model once, however many threads ask for it.

    A thread may hook into its layers or exchange them (gradient norms and adapters do); the weights are never changed.
    """

    def __init__(self, alone: bool = False) -> None:
        """Hold no model yet.

        Args:
            alone: whether one thread at a time asks for models: it has them themselves, without copies.
        """
        self.alone = alone
        self._lock = threading.Lock()
        self._opened: dict[str, Any] = {}

    def begin(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> None:
        """Open a model in a thread, before anybody asks for it; arguments as those of `copy_of`, which waits for it."""

        def work() -> None:
            with contextlib.suppress(Exception), self._lock:  # raised to whoever asks for it
                self._open(opener, config, gpus)

        import_package()
        threading.Thread(target=work, name="seenset-model", daemon=True).start()

    def copy_of(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> Opened:
        """A model with layers of its own over the shared weights, or for one thread alone the model itself.

        Args:
            opener: `open_model` or `open_paraphraser`.
            config: of the model.
            gpus: as the opener takes them.

        Raises:
            UserError: as the opener.
        """
        with self._lock:  # one copy after the other: the first thread works while the second's is made
            opened = self._open(opener, config, gpus)
            return opened if self.alone else own_layers(opened)

    def _open(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> Opened:
        key = f"{opener.__name__} {config.model_dump_json()}"
        if key not in self._opened:
            self._opened[key] = opener(config, gpus=gpus)
        return cast(Opened, self._opened[key])


def own_layers(lm: Opened) -> Opened:
    """The same model with modules, parameters and a tokenizer of its own, over the same storage.

    A parameter is one of its own because a backward pass keeps gradients in it.
    """
    copies: dict[int, Any] = {id(buffer): buffer for buffer in lm.model.buffers()}
    for parameter in lm.model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    model = copy.deepcopy(lm.model, copies)
    if isinstance(lm, LanguageModel) and lm.processor is not None:
        processor = copy.deepcopy(lm.processor)
        return replace(lm, model=model, tokenizer=processor.tokenizer, processor=processor)
    return replace(lm, model=model, tokenizer=copy.deepcopy(lm.tokenizer))
