"""One run of one command: its options, its clock, and the only way to its output.

What is reported is made in report/, and written by process.py; neither arguments nor commands are known here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr_cli import process
from dcr_cli.errors import UsageError
from dcr_cli.work import threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dcr_cli.report.people import Line
    from dcr_cli.report.progress import Progress
    from dcr_cli.report.waits import Waits
    from dcr_cli.stages import Account
    from dcr_cli.waiting import Wait


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every command has."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False
    jobs: int | None = None


@dataclass(slots=True)
class Session:
    """One run of one command: its options, its clock, and the only way to its output."""

    command: str | None
    options: Options
    started: float = field(default_factory=time.monotonic)
    text: str = ""  # What to print when there is no work: a help page, the version.
    left_by_stop: Callable[[], str] | None = None  # Says what a stop has left, once there is something to say.
    _waits: Waits | None = None

    @property
    def jobs(self) -> int:
        return threads(self.options.jobs)

    def progress(self) -> Progress:
        from dcr_cli.report.progress import Progress

        return Progress(shown=not (self.options.no_progress or self.options.quiet))

    def hear_wait(self, wait: Wait) -> None:
        """Say on standard error what is waited for for long, unless nobody wants to see that anything goes on."""
        if self.options.no_progress or self.options.quiet:
            return
        if self._waits is None:
            from dcr_cli.report.waits import Waits

            self._waits = Waits(process.complain)
        self._waits.hear(wait)

    def finish(
        self,
        result: DataclassInstance,
        lines: Callable[[], Iterable[Line]],
        *,
        answer: bool = True,
        no: int = 1,
        leave_out: tuple[str, ...] = (),
    ) -> int:
        """Report a result; `answer` says whether the command's question was answered with yes, `no` the exit code if it
        was not."""
        code = 0 if answer else no
        if self.options.json:
            from dcr_cli.report import documents

            self._write_json(code, documents.of_result(result, leave_out=leave_out))
        elif not self.options.quiet:
            from dcr_cli.report import people

            process.write(sys.stdout, people.render(lines(), sys.stdout))
        return code

    def fail(self, failure: process.Failure) -> int:
        """Report what went wrong; an output that fails as well does not hide it."""
        hint = failure.hint
        if hint is None and failure.exit_code == UsageError.exit_code:
            hint = f"dcr {self.command} --help" if self.command is not None else "dcr --help"
        if self.options.json:
            from dcr_cli.report import documents

            error = documents.of_error(failure.error_class, failure.message, hint, is_retryable=failure.retryable)
            with suppress(OSError):  # The exit code and standard error still tell.
                self._write_json(failure.exit_code, {"error": error, **failure.details})
        if failure.is_bug or os.environ.get("DCR_DEBUG") == "1":
            process.complain(failure.traceback)
        if failure.exit_code != process.CLOSED_PIPE:
            self.complain(failure.message, hint)
        return failure.exit_code

    def complain(self, message: str, hint: str | None) -> None:
        """Say on standard error what went wrong, and what helps."""
        process.complain(f"dcr: {message}\n" + (f"hint: {hint}\n" if hint else ""))

    def _write_json(self, code: int, fields: dict[str, Any]) -> None:
        from dcr_cli.report import documents

        seconds = round(time.monotonic() - self.started, 3)
        head = {"command": self.command, "ok": code == 0, "exit_code": code, "seconds": seconds}
        process.write(sys.stdout, documents.to_text(head | fields))

    def note_idle(self, skip: Sequence[str] | None, *checkpoints: str) -> None:
        """Say on standard error which patterns of --skip have left nothing out, as a misspelt one does."""
        if skip and not self.options.quiet:
            from dcr_cli.checkpoint.folder import idle_patterns
            from dcr_cli.checkpoint.names import shown

            for pattern in idle_patterns([Path(checkpoint) for checkpoint in checkpoints], skip):
                process.complain(f"note: --skip {shown(pattern)} matches nothing\n")

    def explain_choices(self) -> None:
        """Say on standard error what -v asks for: which kernels are used and why, and how many threads."""
        if self.options.verbose:
            import dcr_kernels

            process.complain(f"kernels: {dcr_kernels.describe()}\njobs: {self.jobs}\n")

    def check_device(self, device: str) -> None:
        """Refuse a device that cannot be had, where files are patched; say that one that can be is not used there.

        A change comes out of a serial code, which is the processor's work. A device would be sent all bytes of a shard
        and send all of them back, four bytes an element of two, to write the few per cent that the processor has in
        hand already.
        """
        from dcr_cli.device.finding import check
        from dcr_cli.device.wish import CUDA, wish_of

        wish = wish_of(device)
        check(wish)
        if wish.kind == CUDA and not self.options.quiet:
            process.complain(f"note: --device {wish.text} is not used: files are patched on the CPU\n")
        if self.options.verbose:
            process.complain("device: cpu (files are patched there)\n")

    def explain_work(self, account: Account | None) -> None:
        """Say on standard error what -v asks for: on which device work was done, why, and what its stages took."""
        if self.options.verbose and account is not None:
            from dcr_cli.report.stages import account_text

            process.complain(account_text(account))
