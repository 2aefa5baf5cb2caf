"""The signals that ask a process to stop."""

import signal

# A terminal sends INT for Ctrl-C, and HUP when it is closed. A scheduler sends TERM, and before a
# time limit what its user names, such as USR1 or USR2; XCPU tells of a limit of CPU time.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


def find_heeded() -> list[signal.Signals]:
    """Returns the signals that this process was not started to ignore, as it is by `nohup`."""
    # A shell that starts a command in the background may have it ignore INT.
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
