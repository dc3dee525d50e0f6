"""The LightningDataModule: ties a source, its order and its shares to what the Trainer was asked for."""

import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from project.data.checks import PART_OF, check_rows, check_windows
from project.data.order import Part, RowOrder
from project.data.sources import Source
from project.data.stream import Chunks, Shares, Stream

PARTS = ("train", "val", "test")
PIECE = 16384  # rows read at a time to fit ``Standardise``


class StreamDataModule(L.LightningDataModule):
    """Streams rows in chunks: each row once, in an order that devices, workers and batch sizes cannot change.

    Args:
        source: Rows to learn from: a length and ``read(rows)``. Cut by ``split`` unless the parts have a source each.
        val_source: Rows to validate on, instead of a part of ``source``.
        test_source: Rows to test on, instead of a part of ``source``.
        predict_source: Rows to predict, instead of all rows of ``source``.
        split: Shares of ``source`` for training, validation and test; they sum to at most 1.
        split_seed: Seed of the cut; the run's own seed never moves a row to another part.
        batch_size: Rows per device and micro-batch. Effective batch = this x devices x accumulate_grad_batches.
        eval_batch_size: Rows per device and batch of evaluation and prediction; never changes a score.
        chunk_size: Rows a device reads and moves at once, rounded up to whole micro-batches.
        num_workers: Processes that read ahead; they never change a result.
        shuffle: A new order of the training rows in every epoch; False keeps the order of the source.
        drop_last: Leave out the incomplete last effective batch of an epoch, and say how many rows it had.

    Raises:
        ValueError: In ``check`` and ``setup``, when there are too few rows for what was asked.
    """

    def __init__(
        self,
        source: Source,
        val_source: Source | None = None,
        test_source: Source | None = None,
        predict_source: Source | None = None,
        split: tuple[float, float, float] = (0.8, 0.1, 0.1),
        split_seed: int = 0,
        batch_size: int = 64,
        eval_batch_size: int = 4096,
        chunk_size: int = 65536,
        num_workers: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("chunk_size", chunk_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ValueError(f"--data.{name} {value}: expected a whole number of at least {least}.")
        if min(split) < 0 or sum(split) > 1 + 1e-9:
            raise ValueError(
                f"--data.split {list(split)}: expected three shares, each at least 0, that sum to at most 1."
            )
        self.source = source
        self.own_sources = {"val": val_source, "test": test_source, "predict": predict_source}
        self.split, self.split_seed = split, split_seed
        self.batch_size, self.eval_batch_size, self.chunk_size = batch_size, eval_batch_size, chunk_size
        self.num_workers, self.shuffle, self.drop_last = num_workers, shuffle, drop_last
        for other in (val_source, test_source, predict_source):
            take_columns: Callable[[Source], None] | None = getattr(other, "take_columns_of", None)
            if take_columns is not None:
                take_columns(source)
        self._fingerprint: int | None = None
        self.train_stream: Stream | None = None

    # ---- what the rows are

    @property
    def in_features(self) -> int:
        """Number of input columns: the model's input size follows from it."""
        stated = getattr(self.source, "in_features", None)
        return int(stated) if stated is not None else self.source.read(torch.zeros(1, dtype=torch.int64))[0].shape[-1]

    def part(self, name: str) -> tuple[Source, Part]:
        """The source and the rows of it that make up "train", "val", "test" or "predict"."""
        own = self.own_sources.get(name)
        if name == "predict" and own is None:
            own = self.source
        if own is not None:
            return own, Part(len(own), 0.0, 1.0)
        shares = [s if self.own_sources.get(p) is None else 0.0 for p, s in zip(PARTS, self.split, strict=True)]
        i = PARTS.index(name)
        # rounded alike on both sides of a cut: sums such as 0.8 + 0.1 + 0.1 neither lose a row nor give one twice
        low, high = (min(1.0, round(sum(shares[:k]), 9)) for k in (i, i + 1))
        return self.source, Part(len(self.source), low, high, self.split_seed)

    def fingerprint(self) -> int:
        """A number that changes when the training source gives other values: a checksum of a few rows of it."""
        if self._fingerprint is None:
            rows = torch.linspace(0, len(self.source) - 1, 16, dtype=torch.float64).long()
            read = self.source.read(rows)
            self._fingerprint = zlib.crc32(b"".join(t.cpu().contiguous().numpy().tobytes() for t in read))
        return self._fingerprint

    def prepare_data(self, stage: str | None = None) -> None:
        """Make ready what ``stage`` reads, by default what the Trainer is about to do; no other source is opened."""
        stage = stage or TrainerFn(self.trainer_in_use.state.fn).value
        for name in PARTS if stage == "fit" else (PART_OF[stage],):
            own = self.own_sources.get(name)
            prepare: Callable[[], None] | None = getattr(self.source if own is None else own, "prepare", None)
            if prepare is not None:
                prepare()

    # ---- what the Trainer asks of them

    @property
    def trainer_in_use(self) -> Any:
        assert self.trainer is not None, "the Trainer brings itself along when it runs"
        return self.trainer

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch over all ranks."""
        return self.batch_size * int(self.trainer_in_use.world_size)

    @property
    def effective_batch(self) -> int:
        """Rows of an optimizer step over all ranks and accumulated micro-batches."""
        return self.micro_rows * int(self.trainer_in_use.accumulate_grad_batches)

    @property
    def seed(self) -> int:
        """Seed of the order of rows: what ``seed_everything`` left, for all ranks alike."""
        return int(os.environ.get("PL_GLOBAL_SEED") or 0)

    def setup(self, stage: str) -> None:
        self.check(TrainerFn(stage).value)

    def check(self, stage: str) -> None:
        """Refuse data or limits that cannot do what ``stage`` ("fit", "validate", "test", "predict") asks.

        Raises:
            ValueError: Naming the rows found, the sizes, and the flag that helps.
        """
        check_rows(self, stage)
        if stage == "fit":
            check_windows(self)

    def shares(self, name: str) -> Shares:
        """Which positions of the part are whose, for this rank."""
        trainer = self.trainer_in_use
        rows, world, rank = len(self.part(name)[1]), trainer.world_size, trainer.global_rank
        if name != "train":
            return Shares(0, rows, self.eval_batch_size, world, rank)
        full = rows // self.effective_batch * self.effective_batch
        tail = 0 if self.drop_last else rows - full
        return Shares(full, tail, self.batch_size, world, rank, trainer.accumulate_grad_batches)

    def chunks(self, name: str) -> Chunks:
        """The reader of a part's rows for this rank; also tells the row numbers of any micro-batch."""
        trainer = self.trainer_in_use
        source, part = self.part(name)
        shuffle = name == "train" and self.shuffle and not trainer.overfit_batches
        block = getattr(source, "block", None)  # so many rows of the source; of the part, its share of them
        block = block and max(1, block * len(part) // max(1, len(source)))
        order = RowOrder(len(part), self.seed, shuffle, block)
        device = trainer.strategy.root_device
        on_device = device.type != "cpu" and getattr(source, "on_device", False)
        return Chunks(source, part, order, self.shares(name), name == "train", device if on_device else None)

    def _stream(self, name: str, position: Callable[[], tuple[int, int]]) -> Stream:
        chunks, device = self.chunks(name), self.trainer_in_use.strategy.root_device
        workers = self.num_workers if chunks.device is None else 0
        return Stream(chunks, device, self.chunk_size, workers, position, self.seed)

    def train_dataloader(self) -> Stream:
        self.train_stream = self._stream("train", self._position)
        return self.train_stream

    def val_dataloader(self) -> Stream | list[Stream]:
        return self._stream("val", lambda: (0, 0)) if len(self.part("val")[1]) else []

    def test_dataloader(self) -> Stream:
        return self._stream("test", lambda: (0, 0))

    def predict_dataloader(self) -> Stream:
        return self._stream("predict", lambda: (0, 0))

    def rows_of_epoch(self) -> tuple[int, int]:
        """(training rows that an epoch uses, training rows there are)."""
        shares, length = self.shares("train"), min(len(self.shares("train")), self.trainer_in_use.num_training_batches)
        return (shares.bounds(int(length) - 1)[1] if length else 0), len(self.part("train")[1])

    @property
    def loss_weight(self) -> float:
        """What the loss of the current training micro-batch is multiplied by (``Shares.weight``)."""
        return self.train_stream.weight if self.train_stream is not None else 1.0

    def rows(self, name: str, batch_idx: int, epoch: int = 0) -> Tensor:
        """Row numbers in the source of this rank's micro-batch, for messages, logs and predictions (int64, CPU)."""
        chunks = self.chunks(name)
        low, high = chunks.shares.span(batch_idx)
        return chunks.rows(epoch, batch_idx, batch_idx + 1)[: high - low]

    def inputs(self, name: str) -> Iterator[Tensor]:
        """This rank's share of a part's inputs x, in order, in pieces that no setting changes."""
        trainer, (source, part) = self.trainer_in_use, self.part(name)
        pieces = -(-len(part) // PIECE)
        first, end = (pieces * r // trainer.world_size for r in (trainer.global_rank, trainer.global_rank + 1))
        for at in range(first * PIECE, min(end * PIECE, len(part)), PIECE):
            yield source.read(part.rows(torch.arange(at, min(at + PIECE, len(part)))))[0]

    # ---- where training stands

    def _position(self) -> tuple[int, int]:
        epoch, rows = self.position()
        return epoch, rows // self.micro_rows

    def position(self) -> tuple[int, int]:
        """(epoch, rows of it that are in the weights): everything up to the last optimizer step."""
        trainer = self.trainer_in_use
        epoch, progress = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        done, number = progress.current.processed, epoch.processed
        whole = progress.is_last_batch or done >= trainer.num_training_batches
        if trainer.state.fn != TrainerFn.FITTING or (epoch.started == number and (whole or not done)):
            return number, 0
        if not whole:
            window = trainer.accumulate_grad_batches
            done = done // window * window  # the gradients of an unfinished window are not in the weights
        # A limit (max_steps, max_time) makes Lightning close an epoch before its end: it is still the one to go on in.
        return number - (epoch.started == number), done * self.micro_rows

    def state_dict(self) -> dict[str, Any]:
        epoch, rows = self.position()
        return {"epoch": epoch, "rows": rows, "effective_batch": self.effective_batch, "seed": self.seed}
