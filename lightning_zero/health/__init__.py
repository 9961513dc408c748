"""Health of the ranks: failures are detected and end all waits. Imports record and layout.

    world         the default process group: its store, size and end; disconnecting groups
    together      `run_on_all_ranks`: work that fails on all ranks if it fails on one
    failures      what a failure of a rank is, and the errors that tell of it
    tracebacks    one traceback for ranks that fail in the same way; the user's frames alone
    watchdog      what an engine or a Trainer knows of the other ranks, and the end of its waits
    callbacks     what a failure calls to end the waits of this process
    thread        the watchdogs' thread, one in a process, which reads the log of all ranks
    link          the connections to rank 0: one log, and the ends of processes
    exits         how the processes of other ranks have ended
    runs          failures, and whether a run follows, as all ranks read them in the log
    waits         waits that engines announce, and what this process does meanwhile
    meetings      points to which all ranks come, over the log
    reports       status of every rank, reported after a long wait

Begin with `watchdog`, which explains why a wait ends if a rank does not come. If a rank ends, or
raises an exception, the watchdogs of the other ranks learn it within seconds and end the waits,
which raise an error with the rank and the cause. See also the end of comm's text.
"""
