"""One request's images, from their files to what the model sees of them. Owned by the step thread.

An image whose keys and values come back with a cached conversation need not be looked at: its size is known from the
answer before, and that is all that the prompt needs. Should these blocks be lost, to somebody who needs them more, the
image is looked at then.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from tie.assets.images import Placeholders, Size
from tie.proto import runtime_pb2
from tie.runtime.images.embeddings import ImageEmbeddings, PromptEmbeddings
from tie.runtime.request import Bounds, Request, RequestRefusedError

Look = Callable[[Sequence[bytes], Sequence[int]], "Future[tuple[ImageEmbeddings, ...]]"]
"""Looks at files, which are those of so many images of the request."""


class RequestImages:
    """What is known of a request's images.

    Args:
        request: with at least one.
        placeholders: what stands for images in the model's prompts.
        look: starts to look at some.
    """

    def __init__(self, request: Request, placeholders: Placeholders, look: Look) -> None:
        self._files = request.images
        self._sizes: list[Size | None] = list(request.sizes) or [None] * len(request.images)
        self._prompt = request.prompt  # with one token for each
        self._placeholders = placeholders
        self._look = look
        self._seen: dict[int, ImageEmbeddings] = {}
        self._under_way: tuple[int, ...] = ()
        self._future: Future[tuple[ImageEmbeddings, ...]] | None = None
        self.begun = False
        self.embeddings: PromptEmbeddings | None = None

    @property
    def missing(self) -> bool:
        """Whether there are images that have not been looked at."""
        return len(self._seen) < len(self._files)

    @property
    def pending(self) -> bool:
        """Whether some are being looked at."""
        return self._future is not None and not self._future.done()

    def begin(self, there: int) -> "Future[tuple[ImageEmbeddings, ...]] | None":
        """Looks at all images but those within the first `there` tokens; None: there are no others."""
        self.begun = True
        spans = self._placeholders.expanded(self._prompt, self._sizes).spans
        known = next((number for number, size in enumerate(self._sizes) if size is None), len(self._sizes))
        return self._start([number for number, (_, end) in enumerate(spans) if number >= known or end > there])

    def again(self) -> "Future[tuple[ImageEmbeddings, ...]] | None":
        """Looks at those that it has not looked at, unless it does already."""
        if self._future is not None:
            return None
        return self._start([number for number in range(len(self._files)) if number not in self._seen])

    def take(self) -> None:
        """Takes what has been seen.

        Raises:
            RequestRefusedError: an image is refused.
        """
        if self._future is not None:
            seen, self._future = self._future.result(timeout=0), None
            for number, one in zip(self._under_way, seen, strict=True):
                self._seen[number] = one
                self._sizes[number] = (one.rows, one.columns)
        expanded = self._placeholders.expanded(self._prompt, self._sizes)
        self.embeddings = PromptEmbeddings(expanded, self._placeholders.token_id, self._seen)

    def place(self, request: Request, bounds: Bounds) -> Request:
        """The request with all places of its images in the prompt, once all sizes are known.

        Raises:
            RequestRefusedError: with them the prompt is too long.
        """
        prompt = self._placeholders.expanded(self._prompt, self._sizes).ids
        if len(prompt) >= bounds.max_length:
            detail = f"images: {len(prompt)} tokens with them leave no room for an answer within {bounds.max_length}"
            raise RequestRefusedError(runtime_pb2.CODE_PROMPT_TOO_LONG, detail)
        return replace(request, prompt=prompt, images=())

    def looked(self) -> runtime_pb2.Looked:
        """What the app is told."""
        sizes = [size or (0, 0) for size in self._sizes]
        return runtime_pb2.Looked(
            sizes=[runtime_pb2.ImageSize(known=True, rows=rows, columns=columns) for rows, columns in sizes]
        )

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        if self._future is not None:
            self._future.cancel()

    def _start(self, numbers: Sequence[int]) -> "Future[tuple[ImageEmbeddings, ...]] | None":
        self._under_way = tuple(numbers)
        self._future = self._look([self._files[number] for number in numbers], numbers) if numbers else None
        return self._future
