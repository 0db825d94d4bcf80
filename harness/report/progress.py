"""Progress on stderr: a rich bar on a terminal, plain lines elsewhere. stdout stays for the card and the row."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Context manager: say(text) names what is going on, start(total) and advance(text) count rounds."""

    def __enter__(self) -> "Progress":
        self.console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = RichProgress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar.start()
        self.task = self.bar.add_task("", total=None)
        return self

    def __exit__(self, *exc) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.bar.update(self.task, description=text)
        if not self.console.is_terminal:
            print(text, file=sys.stderr, flush=True)

    def start(self, total: int) -> None:
        self.bar.update(self.task, total=total)
        self.say(f"measuring, {total} rounds")

    def advance(self, text: str) -> None:
        self.bar.update(self.task, advance=1, description=f"measuring {text}")
