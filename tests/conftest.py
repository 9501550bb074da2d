"""What every test relies on."""

from __future__ import annotations

import signal

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every process that a test starts
# to interrupt it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
