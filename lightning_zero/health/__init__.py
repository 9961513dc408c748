"""Health of the ranks: failures are detected and end all waits. Imports record and layout.

    world         the default process group: its store, size and end; disconnecting groups
    together      `run_on_all_ranks`: work that fails on all ranks if it fails on one
    failures      what a failure of a rank is, and the errors that tell of it
    tracebacks    one traceback for ranks that fail in the same way; the user's frames alone
    watchdog      a thread per rank that detects failures of other ranks and ends waits for them
    peers         the processes of this node, watched through the kernel; the watchdogs' store
    runs          failures, and whether a run follows, as all ranks read them in one log
    waits         waits of this process, announced by engines or found in its frames
    reports       status of every rank, reported after a long wait

Begin with `watchdog`, which explains why a wait ends if a rank does not come. If a rank ends, or
raises an exception, the watchdogs of the other ranks learn it within seconds and end the waits,
which raise an error with the rank and the cause. A process that cannot be woken prints the cause
and exits. See also the end of comm's text.
"""
