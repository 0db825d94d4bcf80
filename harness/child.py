"""One cell of a sweep in a process of its own, started by harness/sweep.py: python -m harness.child method=full ...

The sweep has checked the arguments. The process ends with the sweep that started it, also by kill -9.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Linux only; elsewhere a cell outlives a killed sweep and finishes its row."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # it may have gone before the line above
        if os.getppid() != int(os.environ["KVGAUGE_PARENT"]):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    die_with_parent()
    # imported late: torch takes seconds, in which the sweep may be killed
    import run
    from harness import sweep
    from harness.config import register

    register()
    run.main()
    rows = list(sweep._rows.values())
    return int(not rows or rows[0].status != "ok")


if __name__ == "__main__":
    sys.exit(main())
