"""Tests that press Ctrl-C work in a background job too, which inherits SIGINT as ignored."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that what the tests start can be interrupted
