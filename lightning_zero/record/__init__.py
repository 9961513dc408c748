"""Recording of what an engine does: spans of time, waits and bytes. Imports no other package.

    spans       `Span`, and the `Recording` of a window, with overlapped and exposed time
    recorder    `Recorder`: begins and ends spans, on the host or on a CUDA stream
    streams     CUDA streams and events
    frames      the line of the user's code that called

Begin with `spans.Recording`.
"""
