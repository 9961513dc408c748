"""Synthetic recordings of a stage 3 step, in the order of the schedule."""

from __future__ import annotations

from lightning_zero.record.spans import Kind, Recording, Span

COMPUTE_S, GATHER_S, REDUCE_S, STEP_S = 0.010, 0.006, 0.012, 0.002
NBYTES = 4 * 2**20


class Clock:
    """Records spans; compute waits for transfers that have not ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.link_is_free = 0.0
        self.spans: list[Span] = []

    def work(self, kind: Kind, name: str, seconds: float) -> None:
        self.spans.append(Span(kind, name, self.now, self.now + seconds))
        self.now += seconds

    def send(self, kind: Kind, name: str, seconds: float) -> Span:
        """Starts a transfer after the last one on the link; it is in flight from now on."""
        self.link_is_free = max(self.link_is_free, self.now) + seconds
        self.spans.append(Span(kind, name, self.now, self.link_is_free, NBYTES))
        return self.spans[-1]

    def wait(self, span: Span) -> None:
        if span.stop_s > self.now:
            self.spans.append(Span(span.kind, span.name, self.now, span.stop_s, is_wait=True))
            self.now = span.stop_s


def made_step(
    rank: int = 0,
    world_size: int = 2,
    *,
    num_units: int = 4,
    overlaps: bool = True,
    slowness: float = 1.0,
    window_s: float | None = None,
) -> Recording:
    """One micro-batch and the step; `slowness` scales compute only."""
    clock, compute_s = Clock(), COMPUTE_S * slowness
    names = [f"model.layers.{i}" for i in range(num_units)]
    for kind, order in ((Kind.FORWARD, names), (Kind.BACKWARD, names[::-1])):
        began, reduces, gather = clock.now, [], None
        for place, name in enumerate(order):
            gather = gather or clock.send(Kind.ALL_GATHER, name, GATHER_S)
            clock.wait(gather)
            gather = None
            if overlaps and place + 1 < num_units:
                gather = clock.send(Kind.ALL_GATHER, order[place + 1], GATHER_S)
            clock.work(kind, name, compute_s * (2 if kind is Kind.BACKWARD else 1))
            if kind is Kind.BACKWARD:
                reduces.append(clock.send(Kind.REDUCE_SCATTER, name, REDUCE_S))
                if not overlaps:
                    clock.wait(reduces[-1])
        for reduce in reduces:
            clock.wait(reduce)
        clock.spans.append(Span(kind, "", began, clock.now))
    agree = clock.now
    clock.now = max(agree, window_s or 0.0) + 0.001
    clock.spans.append(Span(Kind.AGREE, "norm", agree, clock.now, 8))
    clock.spans.append(Span(Kind.AGREE, "norm", agree, clock.now, is_wait=True))
    for name in names:
        clock.work(Kind.STEP, name, STEP_S)
    spans = tuple(sorted(clock.spans, key=lambda span: span.start_s))
    misses = 1 if overlaps else 2 * num_units
    return Recording(
        rank, world_size, 10, clock.now, spans, hits=2 * num_units - misses, misses=misses
    )


def made_ranks(world_size: int = 2, **settings) -> list[Recording]:
    """Each rank is slower than the one before; all end together, waiting for the slowest."""
    last = made_step(slowness=1 + 0.1 * (world_size - 1), **settings)
    norm = next(span for span in last.spans if span.kind is Kind.AGREE)
    return [
        made_step(r, world_size, slowness=1 + 0.1 * r, window_s=norm.start_s, **settings)
        for r in range(world_size)
    ]
