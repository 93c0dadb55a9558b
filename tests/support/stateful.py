"""Objects and layers of users that have a state of their own."""

from __future__ import annotations

from typing import Any

from torch import nn


class Holder:
    """An object with a state."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = dict(state)


class WithExtra(nn.Linear):
    """A layer with extra state of any type, such as TransformerEngine's: a tensor of bytes, or a BytesIO."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
