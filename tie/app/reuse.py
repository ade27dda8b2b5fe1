"""Reuse of an earlier turn's KV cache around one generation: look up, restore beside it, save after it.

Nothing here ever fails a request, and nothing is waited for longer than a moment: without the cache the runtime
computes the prompt, and that is all.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from kvxfer.channel import Channel
from kvxfer.errors import KvxferError
from tie.app.conversation import Conversation
from tie.app.placed import Prompt
from tie.app.runtime_link import RuntimeLink
from tie.assets.manifest import Manifest
from tie.assets.prefix import shared_prefix
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import TieError
from tie.proto import runtime_pb2
from tie.warden.keys import ConversationKey
from tie.warden.manifest import Image

T = TypeVar("T")


class Reuse:
    """One request's.

    Args:
        conversation: what is cached of it.
        limit_s: seconds for anything of it.
        save_s: seconds for saving it.
    """

    def __init__(self, conversation: Conversation, *, limit_s: float, save_s: float) -> None:
        self._conversation = conversation
        self._limit_s = limit_s
        self._save_s = save_s
        self._export: Channel | None = None
        self._restoring: asyncio.Task[bool] | None = None

    @classmethod
    async def begin(
        cls,
        key: ConversationKey,
        runtime: RuntimeLink,
        request: runtime_pb2.GenerateRequest,
        *,
        prompt: Prompt,
        manifest: Manifest,
        config: NodeConfig,
    ) -> Self:
        """Looks up what fits the request's prompt, puts the tickets into it, and begins to restore."""
        app = config.app
        registered = (prompt.token_ids for prompt in manifest.system_prompts)
        conversation = Conversation(
            key,
            runtime.format,
            config.sockets.store,
            prefix=shared_prefix(registered, prompt.ids, runtime.format.block_tokens),
            timeout=app.cache_timeout_s,
            ttl_s=app.cache_ttl_s,
        )
        reuse = cls(conversation, limit_s=app.cache_timeout_s, save_s=app.save_deadline_s)
        try:
            async with asyncio.timeout(app.cache_timeout_s):
                if await reuse._quietly(conversation.look_up, prompt):
                    request.image_sizes.extend(prompt.known_sizes())
                    await reuse._prepare(runtime, request)
        except (TimeoutError, KvxferError, OSError) as error:
            log.failure("app.cache-unused", error)
        return reuse

    async def save(self, tokens: Sequence[int], images: Sequence[Image]) -> None:
        """Files what the runtime has computed, once the answer has been sent.

        Args:
            tokens: of the whole sequence: prompt and answer.
            images: of the prompt.
        """
        if self._export is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._save_s):
                if self._restoring:
                    await self._restoring
                if await self._quietly(self._conversation.save, tokens, images, self._export):
                    if self._conversation.lasting:
                        log.event("app.conversation-saved")
                    else:
                        log.event("app.request-cached")

    def close(self) -> None:
        """Wipes the key; what is under way on a thread ends with the process."""
        if self._export:
            self._export.close()
        if not self._restoring or self._restoring.done():
            self._conversation.close()

    async def _prepare(self, runtime: RuntimeLink, request: runtime_pb2.GenerateRequest) -> None:
        ticket, descriptors = await runtime.ask(runtime_pb2.KvRequest(prepare_export=runtime_pb2.PrepareExport()), 1)
        if not ticket:
            return
        self._export = Channel.adopt(descriptors[0])
        request.export_ticket = ticket
        blocks = self._conversation.blocks
        if not blocks:
            return
        wanted = runtime_pb2.PrepareImport(block_count=blocks)
        ticket, descriptors = await runtime.ask(runtime_pb2.KvRequest(prepare_import=wanted), 2)
        if ticket:
            request.import_ticket = ticket
            self._restoring = asyncio.create_task(self._restore(*descriptors))

    async def _restore(self, channel: int, buffer: int) -> bool:
        try:
            with Channel.adopt(channel) as adopted:
                return await self._quietly(self._conversation.restore, adopted, buffer)
        finally:
            os.close(buffer)

    @staticmethod
    async def _quietly(step: Callable[..., None], *arguments: object) -> bool:
        """Does a step on a thread; whether it could be done."""
        try:
            await asyncio.to_thread(step, *arguments)
        except (TieError, KvxferError, OSError) as error:
            log.failure("app.cache-unused", error)
            return False
        return True
