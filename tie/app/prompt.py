"""From a user's request to what the runtime is asked for: token ids, checked numbers, one grammar."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, get_args

from tie.app import constraints
from tie.app.frames import Limits
from tie.app.outcome import RefusalError, invalid, unsupported
from tie.app.sampling import check_options, output_tokens, sampling
from tie.assets.bundle import Bundle, open_bundle
from tie.assets.chat import ChatError, ChatMessage, ChatTemplate, Role, ToolCall
from tie.assets.images import MAX_IMAGE_BYTES, MAX_IMAGES, Placeholders
from tie.assets.manifest import CHAT_TEMPLATE_FILE, Manifest
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.daemon.config import NodeConfig
from tie.proto import app_pb2, request_pb2, runtime_pb2

_ROLES: Final = get_args(Role)
_SMALL_BYTES: Final = 256 * 1024  # whose tokens are counted in no time


@dataclass(frozen=True)
class Model:
    """The part of a bundle that an app needs.

    Attributes:
        tokenizer: text to ids and back.
        context_tokens: prompt and answer together.
        placeholders: what stands for images in a prompt; None: the model takes none.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    context_tokens: int
    placeholders: Placeholders | None
    _template: ChatTemplate | None
    _template_takes_tools: bool
    _tagged_calls: bool

    @classmethod
    def load(cls, config: NodeConfig) -> Self:
        """Opens the node's bundle.

        Raises:
            BundleError: missing or damaged.
        """
        bundle = open_bundle(Path(config.model.bundle))
        tokenizer = load_tokenizer(bundle)
        chat = CHAT_TEMPLATE_FILE in bundle.manifest.files
        source = bundle.read(CHAT_TEMPLATE_FILE) if chat else b""
        own = bundle.manifest.architecture.context_tokens
        return cls(
            bundle=bundle,
            tokenizer=tokenizer,
            context_tokens=min(own, config.runtime.context_tokens or own),
            placeholders=Placeholders.of(bundle.manifest, tokenizer),
            _template=ChatTemplate.load(bundle, tokenizer) if chat else None,
            _template_takes_tools=b"tools" in source,
            _tagged_calls=constraints.CALL_TAGS[0].rstrip().encode() in source,
        )

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.bundle.manifest

    def check_name(self, name: str) -> None:
        """Checks that a request is for this model.

        Raises:
            RefusalError: UNKNOWN_MODEL.
        """
        if name != self.manifest.model:
            raise RefusalError(app_pb2.STATUS_UNKNOWN_MODEL, f"model: this node serves {self.manifest.model}")

    def generate_request(
        self, request: request_pb2.InferenceRequest, limits: Limits, request_id: str
    ) -> runtime_pb2.GenerateRequest:
        """What the runtime is asked for; without its deadline, which the caller sets when it asks.

        Raises:
            RefusalError: the request cannot be fulfilled; the detail names the field.
        """
        self.check_name(request.model or self.manifest.model)
        check_options(request)
        numbers = sampling(request.sampling, self.manifest.architecture.vocab_size)
        self._check_size(request)
        images = self._images(request)
        token_ids = self._token_ids(request)
        self._check_places(token_ids, images)
        free = self.context_tokens - len(token_ids)
        if free < 1:
            raise RefusalError(
                app_pb2.STATUS_PROMPT_TOO_LONG,
                f"{'messages' if request.messages else 'prompt'}: {len(token_ids)} tokens, and the model's context of "
                f"{self.context_tokens} must also hold the answer",
            )
        grammar = constraints.grammar(request, tagged_calls=self._tagged_calls)
        return runtime_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=token_ids,
            sampling=numbers,
            grammar=grammar,
            json=grammar is not None and constraints.of_json(request),
            stop=request.stop,
            max_tokens=output_tokens(request, limits, free),
            min_tokens=request.sampling.min_tokens,
            ignore_eos=request.ignore_eos,
            include_stop=request.include_stop,
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            n=request.n or 1,
            batch_priority=request.priority == request_pb2.PRIORITY_BATCH,
            images=images,
        )

    def _images(self, request: request_pb2.InferenceRequest) -> list[bytes]:
        """The files of all images, in order. Nobody looks into them here."""
        images = []
        for field, part in image_parts(request):
            if self.manifest.images is None:
                raise unsupported(field, "this model does not take images")
            if not part.image:
                raise invalid(field, "is empty")
            if len(part.image) > MAX_IMAGE_BYTES:
                raise RefusalError(
                    app_pb2.STATUS_IMAGE_REFUSED, f"{field}: file-too-large: more than {MAX_IMAGE_BYTES} bytes"
                )
            images.append(part.image)
            if len(images) > MAX_IMAGES:
                raise invalid(field, f"is one of more than {MAX_IMAGES} images")
        return images

    def _check_places(self, token_ids: Sequence[int], images: Sequence[bytes]) -> None:
        """Each image has a place in the prompt, as the model's template gives it."""
        if self.manifest.images and token_ids.count(self.manifest.images.token_id) != len(images):
            raise unsupported("messages", "this model's chat template has no place for these images")

    def _check_size(self, request: request_pb2.InferenceRequest) -> None:
        """Refuses what cannot fit, before it costs seconds to count its tokens."""
        texts = [part.text for message in request.messages for part in message.parts] or [request.prompt]
        # Templates trim.
        size = sum(len(text.strip().encode()) for text in texts)
        if size > _SMALL_BYTES and self.tokenizer.surely_over(size, self.context_tokens):
            raise RefusalError(
                app_pb2.STATUS_PROMPT_TOO_LONG,
                f"{'messages' if request.messages else 'prompt'}: {size} bytes, more than the model's context of "
                f"{self.context_tokens} tokens can hold",
            )

    def _token_ids(self, request: request_pb2.InferenceRequest) -> list[int]:
        if request.messages and request.prompt:
            raise invalid("prompt", "cannot be combined with messages")
        tools = constraints.tools(request)
        if request.messages:
            return self._chat(messages(request.messages, parts=self.manifest.images is not None), tools)
        if not request.prompt:
            raise invalid("messages", "is empty, and there is no prompt")
        if tools:
            raise unsupported("tools", "a raw prompt cannot name tools: send messages")
        info = self.manifest.tokenizer
        start = [info.bos_id] if info.add_bos and info.bos_id is not None else []
        return start + self.tokenizer.encode(request.prompt)

    def _chat(self, conversation: Sequence[ChatMessage], tools: Sequence[request_pb2.Tool]) -> list[int]:
        if self._template is None:
            raise unsupported("messages", "this model has no chat template: send a raw prompt")
        if tools and not self._template_takes_tools:
            raise unsupported("tools", "this model's chat template has no place for tools")
        try:
            return self._template.encode(
                conversation, tools=[_declared(position, tool) for position, tool in enumerate(tools)]
            )
        except ChatError as error:
            raise invalid("messages", f"{error}; {error.hint}" if error.hint else str(error)) from None


def messages(asked: Sequence[request_pb2.Message], *, parts: bool = False) -> list[ChatMessage]:
    """The conversation as the chat template takes it.

    Args:
        asked: the user's.
        parts: contents as lists of parts, which templates of models that take images expect; else as text.

    Raises:
        RefusalError: INVALID_REQUEST or UNSUPPORTED, naming the field.
    """
    return [_message(f"messages[{position}]", message, parts=parts) for position, message in enumerate(asked)]


def image_parts(request: request_pb2.InferenceRequest) -> Iterator[tuple[str, request_pb2.Part]]:
    """Every image, with the name of its field."""
    for number, message in enumerate(request.messages):
        for position, part in enumerate(message.parts):
            if part.HasField("image"):
                yield f"messages[{number}].parts[{position}].image", part


def _message(field: str, message: request_pb2.Message, *, parts: bool) -> ChatMessage:
    role = next((known for known in _ROLES if known == message.role), None)
    if role is None:
        raise invalid(f"{field}.role", f"must be one of {', '.join(_ROLES)}")
    if message.tool_calls and role != "assistant":
        raise invalid(f"{field}.tool_calls", "only the assistant calls tools")
    if not message.parts and not message.tool_calls:
        raise invalid(f"{field}.parts", "is empty")
    for position, part in enumerate(message.parts):
        match part.WhichOneof("kind"):
            case "text":
                continue
            case "image" if role == "user":
                continue
            case "image":
                raise unsupported(f"{field}.parts[{position}].image", "only a user's messages may have images")
            case _:
                raise invalid(f"{field}.parts[{position}]", "has no content")
    return ChatMessage(
        role=role,
        content=tuple(map(_part, message.parts)) if parts else "".join(part.text for part in message.parts),
        tool_calls=tuple(
            _tool_call(f"{field}.tool_calls[{position}]", call) for position, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _part(part: request_pb2.Part) -> dict[str, str]:
    """As templates expect it."""
    return {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}


def _tool_call(field: str, call: request_pb2.ToolCall) -> ToolCall:
    if not call.name:
        raise invalid(f"{field}.name", "is empty")
    arguments = constraints.json_value(call.arguments_json or "{}", f"{field}.arguments_json")
    if not isinstance(arguments, dict):
        raise invalid(f"{field}.arguments_json", "must be a JSON object")
    return ToolCall(id=call.id, name=call.name, arguments=arguments)


def _declared(position: int, tool: request_pb2.Tool) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": constraints.parameters(tool, position),
        },
    }
