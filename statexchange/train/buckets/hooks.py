"""Hooks of autograd: one call when a parameter's gradient has been accumulated, one when that backward ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from statexchange.errors import InvalidArgumentError
from statexchange.train.buckets.views import BucketView

__all__ = ["GradientHooks"]

_owners = WeakTensorKeyDictionary()  # a parameter's GradientHooks, as a weak reference


class GradientHooks:
    """Calls the method `arrived` with a parameter's number, and the one given to `watch` at the end of the backward.

    Both are bound methods and are referred to weakly, so that hooks on long-lived parameters keep no reducer alive:
    when its object is gone they do nothing. A parameter has the hooks of one owner at a time.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._ended: weakref.WeakMethod[Callable[[], None]] | None = None
        self._lock = threading.RLock()  # autograd runs the hooks of several devices in several threads
        self._in_backward = False
        self._handles: list[Any] = []
        self._views: list[BucketView] = []

    def watch(self, ended: Callable[[], None]) -> None:
        """Call the method `ended` at the end of each backward from now on."""
        self._ended = weakref.WeakMethod(ended)

    @staticmethod
    def check_free(views: Sequence[BucketView]) -> None:
        """Raise InvalidArgumentError if another owner has hooks on one of the parameters."""
        for view in views:
            # An owner that was dropped without `remove` is still listed, but its reference is dead.
            owner = _owners.get(view.param)  # type: ignore[no-untyped-call]
            if owner is not None and owner() is not None:
                raise InvalidArgumentError("another reducer has this parameter: close() it first", name=view.name)

    def attach(self, views: Sequence[BucketView]) -> None:
        """Put a hook on each parameter, frozen ones included: they may be unfrozen later."""
        this = weakref.ref(self)
        for view in views:
            _owners[view.param] = this
            is_frozen = not view.param.requires_grad
            view.param.requires_grad_(True)  # torch refuses a hook otherwise, but keeps it when this is undone
            hook = _hook(this, view.index)
            self._handles.append(view.param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            view.param.requires_grad_(not is_frozen)
        self._views.extend(views)

    def remove(self) -> None:
        """Remove the hooks from the parameters. May be called more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for view in self._views:
            if _owners.get(view.param) == weakref.ref(self):  # type: ignore[no-untyped-call]
                del _owners[view.param]
        self._views.clear()

    def forget_backward(self) -> None:
        """Treat the next gradient as the first of a backward: a backward that raised does not report its end."""
        self._in_backward = False

    def _gradient_accumulated(self, index: int) -> None:
        with self._lock:
            # Autograd calls it once, at the end of this backward. The first gradient of the next one queues it again.
            if self._ended is not None and not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # noqa: SLF001
            arrived = self._arrived()
            if arrived is not None:
                arrived(index)

    def _backward_ended(self) -> None:
        self._in_backward = False
        assert self._ended is not None  # else this would not have been queued
        ended = self._ended()
        if ended is not None:
            ended()


def _hook(owner: weakref.ref[GradientHooks], index: int) -> Callable[[torch.Tensor], None]:
    """Return a hook that keeps nothing alive: it stays on the parameter, which may outlive the reducer."""

    def hook(_: torch.Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive._gradient_accumulated(index)  # noqa: SLF001 (the class's own callback)

    return hook
