"""A bar redrawn by time at a terminal; elsewhere whole lines, the first soon and then at a steady pace."""

import os
import shutil
import sys
import time
from typing import Any

from tqdm import tqdm

REDRAW_SECONDS = 0.2
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
UNKNOWN = "{desc}: {n_fmt} [{elapsed}{postfix}]"


class Screen:
    """Where progress is shown: standard output, by the process that speaks.

    Args:
        enabled: False shows nothing at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._next = time.monotonic() + (0.0 if self.terminal else FIRST_LINE_SECONDS)
        self._began: dict[str, tuple[float, int]] = {}
        self._bar: tqdm[Any] | None = None
        self._shown: tuple[str, int | None] = ("", None)  # by the bar: title and number of batches

    def begin(self, title: str, done: int = 0) -> None:
        """What is shown under ``title`` begins now, with ``done`` batches behind it: time left follows from that."""
        self._began = {**({} if title.startswith("epoch") else self._began), title: (time.monotonic(), done)}

    def due(self) -> bool:
        return self.enabled and time.monotonic() >= self._next

    def show(self, title: str, done: int, total: float, words: str) -> None:
        self._next = time.monotonic() + (REDRAW_SECONDS if self.terminal else LINE_SECONDS)
        known = int(total) if 0 < total < float("inf") else None
        if not self.terminal:
            share = f"{done / known:.0%} of {known:,} batches" if known else f"{done:,} batches"
            print("  ".join(filter(None, [title, share, words, self._left(title, done, known)])), flush=True)
            return
        if self._bar is None or self._shown != (title, known):
            self.close()
            self._shown, (columns, lines) = (title, known), shutil.get_terminal_size()
            self._bar = tqdm(
                desc=title,
                total=known,
                initial=self._began.get(title, (0.0, 0))[1],
                file=sys.stdout,
                leave=False,
                ncols=columns,
                nrows=lines,
                miniters=0,
                mininterval=0,
                bar_format=BAR if known else UNKNOWN,
            )
            if title in self._began:
                self._bar.start_t += self._began[title][0] - time.monotonic()
        self._bar.n = done
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.refresh()

    def _left(self, title: str, done: int, known: int | None) -> str:
        began, first = self._began.get(title, (0.0, done))
        if known is None or done <= first:
            return ""
        seconds = (known - done) * (time.monotonic() - began) / (done - first)
        return f"{tqdm.format_interval(seconds)} left"

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.enabled:
            self.close()
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
