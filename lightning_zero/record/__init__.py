"""What an engine did, and when: spans of time, waits, bytes. Imports no other room.

    spans       `Span`, and the `Recording` of a window, with what was hidden and what was exposed
    recorder    `Recorder`: begins and ends spans, on the host or on a CUDA stream
    streams     CUDA streams and events

Begin with `spans.Recording`.
"""
