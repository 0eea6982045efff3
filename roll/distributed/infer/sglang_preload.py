"""Imports SGLang in the server process from which schedulers are forked (`sglang_processes.start_fork_server`).

Python's fork server imports this module when it starts. What fails here is imported again by a scheduler, whose error
says what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal

from setproctitle import setproctitle

from roll.distributed.processes import gc_freeze, gc_paused
from roll.sandbox.isolation import end_with_parent

SERVER = os.getpid()
"""Process id of the server, also in the schedulers."""

end_with_parent()
setproctitle("sglang::fork_server")  # schedulers could not set their titles if theirs were the first of this process
signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a scheduler that fails sends it to its parent
with contextlib.suppress(Exception), gc_paused():
    import sglang.srt.managers.scheduler  # noqa: F401
gc_freeze()
