"""Takes a request's events in the place of Triton's responder, for tests that wait for its end."""

import queue

WAIT_S = 60.0


class Collect:
    """A sink for one request.

    Args:
        wait_s: seconds that the next event may take to come.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self._wait_s = wait_s
        self.seen: list = []
        self._ended = False

    def emit(self, event, *, last):
        """As the engine calls it."""
        self.events.put((event, last))

    def all(self):
        """All events, to the last one."""
        while not self._ended:
            event, self._ended = self.events.get(timeout=self._wait_s)
            self.seen.append(event)
        return self.seen

    @property
    def end(self):
        """The last event."""
        return self.all()[-1]

    def tokens(self, index=0):
        """What a choice said, however the request ended."""
        parts = [event.tokens for event in self.all() if event.HasField("tokens")]
        return [token for part in parts if part.index == index for token in part.token_ids]

    def said(self, index=0):
        """What a choice of a request said that was finished."""
        assert self.end.HasField("finished"), self.end
        return self.tokens(index)
