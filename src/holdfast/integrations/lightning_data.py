"""Where a rank is in the data of Lightning's fit loop, and how it gets there again.

A loader that knows its position, and whose sampler has a known order (`replay.KNOWN_ORDER`), is set to it. Any other is
replayed: the random state at which the epoch's iterator was made, and that at which its first batch was fetched, are part of
the checkpoint; from there the same batches come in the same order, and those that have been used are dropped. What the
dropped ones contain does not matter, their order does:

* A sampler draws its order when the epoch begins, as torch's own do.
* A dataset that is iterated in the training process may draw its order at any time, between the training's own random
numbers. If it
  uses random numbers after the first batch, the order cannot be repeated, and `Feed.refusal` says so. In worker processes
  (`num_workers` > 0) it has random numbers of its own, and can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.integrations.replay import Moment, has_known_order
from holdfast.train.saves import rng


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in its data. At the end of an epoch: before the first batch of the next."""

    batches: int  # used in this epoch
    mid_epoch: bool
    replicas: int
    loader: Any  # state of the only loader, if it has one that can be used; otherwise None
    now: Moment
    at_iterator: Moment | None  # when the epoch's iterator was made
    at_first_batch: Moment | None
    at_latest_batch: Moment | None  # of a loader without a length, of which one batch is fetched ahead

    def as_plain(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            return value.as_plain() if isinstance(value, Moment) else value

        return {name: plain(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> Position:
        moments = ("now", "at_iterator", "at_first_batch", "at_latest_batch")
        found: dict[str, Any] = {
            name: Moment(**value) if name in moments and value is not None else value for name, value in fields.items()
        }
        return cls(**found)


class Feed:
    """The train loaders of one fit loop."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._at_iterator: Moment | None = None
        self._at_first_batch: Moment | None = None
        self._at_latest_batch: Moment | None = None
        self.refusal = ""  # why this position cannot be restored exactly

    @property
    def loaders(self) -> list[Any]:
        combined = self._fit_loop._combined_loader
        return [] if combined is None else combined.flattened

    def iterator_is_made(self) -> None:
        """Call right before the epoch's iterator is made."""
        self._at_iterator = Moment.now(self.loaders)

    def batches_begin(self, fetcher: Any) -> None:
        """Call right before the epoch's first batch is fetched."""
        self._at_first_batch = Moment.now(self.loaders)
        self.batch_is_fetched(fetcher)

    def batch_is_fetched(self, fetcher: Any) -> None:
        """Call right before any batch is fetched."""
        if fetcher.length is None:
            self._at_latest_batch = Moment.now(self.loaders)

    def watch(self, fetcher: Any) -> None:
        """Find out whether fetching from an iterable dataset uses the random numbers of the training process."""
        if not any(_iterates_here(loader) for loader in self.loaders):
            return
        begins, ends = fetcher._start_profiler, fetcher._stop_profiler
        before: list[Any] = []

        def start() -> None:
            begins()
            before[:] = [rng.capture()]

        def stop() -> None:
            if fetcher.fetched and rng.capture() != before[0]:
                names = ", ".join(type(loader.dataset).__name__ for loader in self.loaders if _iterates_here(loader))
                self.refusal = (
                    f"the dataset {names} uses random numbers of the training process, on which its order may depend; "
                    "use num_workers ≥ 1, or a StatefulDataLoader around a dataset with state_dict"
                )
            ends()

        fetcher._start_profiler, fetcher._stop_profiler = start, stop

    def position(self, *, batches: int, mid_epoch: bool, replicas: int, fetcher: Any) -> Position:
        state = None
        # Several loaders have a state together, and one without a length has a batch fetched ahead.
        if fetcher.length is not None and len(self.loaders) == 1:
            (loader,) = self.loaders
            if _knows_its_position(loader) and has_known_order(loader):
                state = loader.state_dict()
        return Position(
            batches=batches if mid_epoch else 0,
            mid_epoch=mid_epoch,
            replicas=replicas,
            loader=state,
            now=Moment.now(self.loaders),
            at_iterator=self._at_iterator if mid_epoch else None,
            at_first_batch=self._at_first_batch if mid_epoch else None,
            at_latest_batch=self._at_latest_batch if mid_epoch else None,
        )

    def to_next_epoch(self, position: Position) -> None:
        """Set the loaders to the end of the saved epoch; the loop makes the iterator of the next one."""
        if position.loader is not None:
            (loader,) = self.loaders
            loader.load_state_dict(position.loader)
            iter(loader)  # takes the state; the next iterator continues from it
        position.now.restore_loaders(self.loaders)

    def to(self, position: Position, fetcher: Any, replaying: Callable[[str], None]) -> None:
        """Set the next batch to the one after the saved position. Changes the random state. `replaying` is called with the text
        that names the loaders that are replayed."""
        self._at_iterator, self._at_first_batch = position.at_iterator, position.at_first_batch
        if position.loader is not None:
            (loader,) = self.loaders
            loader.load_state_dict(position.loader)
            iter(fetcher)
            fetcher.fetched += position.batches
            fetcher.done = fetcher.fetched >= fetcher.length
            return
        assert position.at_iterator is not None
        assert position.at_first_batch is not None
        if position.batches:
            replaying(", ".join(type(loader).__name__ for loader in self.loaders))
        position.at_iterator.restore(self.loaders)
        iter(fetcher)
        position.at_first_batch.restore(self.loaders)
        for number in range(position.batches):
            if number == position.batches - 1 and position.at_latest_batch is not None:
                position.at_latest_batch.restore(self.loaders)  # the content of the one that is fetched ahead matters
            next(fetcher)


def _knows_its_position(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _iterates_here(loader: Any) -> bool:
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or getattr(loader, "num_workers", 0) > 0:
        return False
    return not (_knows_its_position(loader) and _knows_its_position(dataset))
