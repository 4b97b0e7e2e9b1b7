"""Where the command line is entered, and left: what went wrong becomes one line and an exit status."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from meristem.cli.app import app
from meristem.cli.messages import FLAGS, remedy_text, show_log
from meristem.errors import InputError, MachineError, RunError, shortened

# What the machine, not the input, is the reason of: a full or broken disk, too many open files, no memory.
MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip


def main() -> None:
    """Run the command line; what went wrong is one clear line, not a traceback.

    The exit status is 2 where the input is at fault, 1 where the machine is.
    """
    _mend_streams()
    show_log()
    try:
        try:
            code = app(prog_name="meristem", standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + 13)
    except InputError as error:
        named = InputError(FLAGS.get(error.field, error.field), error.value, error.expected)
        _fail(2, f"{named}{remedy_text(error.remedy)}")
    except RunError as error:
        _fail(2, f"{error}{remedy_text(error.remedy)}")
    except MachineError as error:
        _fail(1, str(error))
    except MemoryError as error:
        _fail(1, f"out of memory; take a smaller model, batch or input ({shortened(str(error)) or 'no more is known'})")
    except OSError as error:  # a full disk, a folder that cannot be written
        where = "" if error.filename is None else f"{shortened(str(error.filename))}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "; make room, then run it again (a run: meristem resume)" if full else ""
        _fail(1 if error.errno in MACHINE else 2, f"{where}{error.strerror or error}{remedy}")
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line was not understood
            _refuse_usage(error)
        if not _is_out_of_memory(error):
            raise
        _fail(1, f"out of memory; take a smaller model or train.micro_batch ({shortened(str(error))})")


def _mend_streams() -> None:
    """Let closed streams lead nowhere, so that no file takes their place, and show what an encoding does not have."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(code: int, text: str) -> NoReturn:
    words = " ".join(shortened(word) for word in text.split())  # names of files can be long, too
    with suppress(OSError):  # nobody may be there to read it
        print(f"error: {words}", file=sys.stderr, flush=True)
    sys.exit(code)


def _refuse_usage(error: Any) -> NoReturn:
    """A line for arguments that mean nothing; the help itself where there are none."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    help = "" if context is None else f" (see {context.command_path} --help)"
    _fail(error.exit_code, f"{shortened(error.format_message())}{help}")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch found no memory; on a CPU it says so in words only."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
