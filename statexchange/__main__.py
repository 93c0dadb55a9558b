"""``statexchange`` and ``python -m statexchange``: the command line."""

import contextlib
import gc
import signal
import sys
import threading


def _interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt that came in a finaliser or in a callback of a weak reference.

    Python prints and drops exceptions there, and the import of a module runs such callbacks. Another thread repeats the
    interrupt a moment later, as one that is raised in this hook would be dropped, too.
    """
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
        return
    while True:
        again = threading.Timer(0.005, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        try:
            again.start()
            return
        except KeyboardInterrupt:  # on a busy machine it may come before this hook has ended
            continue


def main() -> None:
    """Run the command line; also an interrupt during its imports exits with code 130."""
    sys.unraisablehook = _interrupt_again
    # What modules make lives until the end, and so do tens of objects for each tensor: the collector would take half of
    # the time of a command.
    gc.disable()
    try:
        from statexchange.cli.main import main as run
        from statexchange.settings import limit_blas_threads

        limit_blas_threads()
        run()
    except SystemExit as ended:
        code: object = ended.code
    except BaseException as error:
        from statexchange.errors import is_interrupt

        if not is_interrupt(error):
            raise
        code = 130
        with contextlib.suppress(OSError, AttributeError):  # stderr may be closed
            sys.stderr.write("error: interrupted\n")
    # All output is flushed: an interrupt from here on would only print a traceback from the interpreter's shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # the interpreter looks for cycles once more before it ends, among all objects that are left
    # Python notes an interrupt that was raised in code that is a string, as dataclasses compile it, and then ends a
    # program of `python -m` by the signal, whatever its exit code. The next such code removes the note.
    exec("")  # noqa: S102 (no code)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
