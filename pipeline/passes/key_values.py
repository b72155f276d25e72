"""What a model keeps of the positions that a batch of draws has read, in room that is taken once.

transformers' `StaticCache` does not fit draws that end one by one: it hands attention at each step also the positions
that nothing fills yet, and rows cannot leave it. Its `DynamicCache` copies all that it holds at each step. Here a step
writes its position in place, and attention sees what is filled: the numbers are those of `DynamicCache`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor


def cache_of(model: Any, positions: int) -> Any:
    """An empty cache of keys and values, whose rows can be selected and repeated.

    The room is taken when rows are first selected: until then it holds the prompts, each once. Layers that look at a
    window of positions, and those without positions, keep theirs as transformers does.

    Args:
        model: of transformers.
        positions: of a row at most, >= 1.
    """
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.cache_utils import DynamicLayer

    held = DynamicCache(config=model.config)
    held.layers = [_reserved_layer()(positions) if type(layer) is DynamicLayer else layer for layer in held.layers]
    return EncoderDecoderCache(held, DynamicCache()) if model.config.is_encoder_decoder else held


@cache
def _reserved_layer() -> Any:
    """The class of a layer with reserved room; here, because transformers takes seconds to import."""
    from transformers.cache_utils import DynamicLayer

    class ReservedLayer(DynamicLayer):
        """Keys and values (rows, heads, positions, features), as views of the first positions of their room."""

        def __init__(self, positions: int) -> None:
            super().__init__()
            self.positions = positions
            self.room: list[Tensor] = []  # of keys and of values; none before rows are selected

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Go on with these rows, in room of their own."""
            if self.get_seq_length() == 0:
                return
            held = self.get_seq_length()
            for place, name in enumerate(("keys", "values")):
                states: Tensor = getattr(self, name)
                rows = beam_idx.to(states.device)
                room = states.new_empty(len(rows), states.shape[1], max(held, self.positions), states.shape[3])
                room[:, :, :held] = states.index_select(0, rows)
                setattr(self, name, room[:, :, :held])
                self.room[place : place + 1] = [room]

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **settings: Any) -> tuple[Any, Any]:
            """Add positions; all keys and values."""
            held, new = self.get_seq_length(), key_states.shape[-2]
            if not self.room or held + new > self.room[0].shape[2]:
                self.room = []
                return super().update(key_states, value_states, *args, **settings)
            for room, states in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, held : held + new] = states
            self.keys, self.values = (room[:, :, : held + new] for room in self.room)
            return self.keys, self.values

    return ReservedLayer
