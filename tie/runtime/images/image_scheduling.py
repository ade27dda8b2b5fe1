"""When images are looked at: before a request's first step, and when blocks that made that needless are lost."""

from collections.abc import Callable
from concurrent.futures import Future

from tie.runtime.images.embeddings import ImageEmbeddings
from tie.runtime.images.request_images import RequestImages
from tie.runtime.keeping import Later
from tie.runtime.kv_blocks import Restored
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.request import Request
from tie.runtime.sequence import Sequence


class ImageScheduling:
    """The step thread's own.

    Args:
        prefix: blocks of registered system prompts.
        block_tokens: tokens of a block.
        later: has something done on the step thread, between two steps.
    """

    def __init__(self, prefix: PrefixCache, block_tokens: int, later: Later) -> None:
        self._prefix = prefix
        self._block_tokens = block_tokens
        self._later = later

    def begin(
        self, images: RequestImages, request: Request, restored: Restored | None, then: Callable[[], None]
    ) -> None:
        """Looks at what does not come with a cached conversation.

        Args:
            images: of a request.
            request: the same.
            restored: blocks that it has.
            then: done when there is something to see; never, where nothing need be looked at.
        """
        self._watch(images.begin(self._there(request, restored)), then)

    def again(self, images: RequestImages, sequence: Sequence, then: Callable[[], None]) -> None:
        """A sequence must be computed from its beginning: it waits for images that have not been looked at."""
        if images.missing:
            sequence.awaits_images = True
            self._watch(images.again(), then)

    def _there(self, request: Request, restored: Restored | None) -> int:
        """Tokens of the prompt whose keys and values come from a cached conversation."""
        # With several choices anyone may have to compute the prompt for the others.
        if restored is None or len(request.params) > 1:
            return 0
        if restored.first_block > len(self._prefix.match(request.prompt)):
            return 0
        return (restored.first_block + restored.block_count) * self._block_tokens

    def _watch(self, future: "Future[tuple[ImageEmbeddings, ...]] | None", then: Callable[[], None]) -> None:
        if future:
            future.add_done_callback(lambda _: self._later(then))
