"""What a fuzzer asks of an app and of the runtime: every message of every contract, and conversations for templates."""

import atexit
import functools
import importlib
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import Message

import tie.proto
from tie.app.frames import Limits
from tie.app.outcome import RefusalError
from tie.app.prompt import Model
from tie.assets.chat import ChatError, ChatMessage, ChatTemplate, Role, ToolCall
from tie.assets.manifest import TokenizerInfo
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import Tokenizer
from tie.daemon import frames
from tie.daemon.config import ModelConfig, NodeConfig
from tie.daemon.errors import ProtocolError
from tie.device import errors
from tie.proto import app_pb2, request_pb2, runtime_pb2
from tie.runtime.request import MAX_CHOICES, MAX_LOGPROBS, Bounds, RequestRefusedError, check

_LIMITS: Final = Limits(request_bytes=1 << 20, output_tokens=64, time_s=10)


def _kinds() -> list[type[Message]]:
    """Every message that crosses a process, in an order that stays: by contract, then by name."""
    folder = Path(tie.proto.__file__).parent
    modules = [importlib.import_module(f"tie.proto.{path.stem}_pb2") for path in sorted(folder.glob("*.proto"))]
    return [
        getattr(module, name) for module in modules for name in sorted(module.DESCRIPTOR.message_types_by_name.keys())
    ]


KINDS: Final = tuple(_kinds())


@functools.cache
def model() -> Model:
    """A small model with a tokenizer and a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    bundle = make_sample_bundle(folder / "bundle")
    loaded = Model.load(NodeConfig(model=ModelConfig(bundle=str(bundle.directory))))
    return replace(loaded, _template=_template("trimmed", loaded.tokenizer), _template_takes_tools=True)


def bounds() -> Bounds:
    """What a runtime of that model takes."""
    return Bounds(model().manifest.architecture.vocab_size, model().context_tokens)


def proto(data: bytes) -> None:
    """Bytes 0 and 1 choose a message; the rest is one, or none. What is used of it is what its reader makes of it."""
    if len(data) < 2:
        return
    kind = KINDS[int.from_bytes(data[:2], "little") % len(KINDS)]
    try:
        message = frames.parse(data[2:], kind)
    except ProtocolError:
        return
    again = message.SerializeToString(deterministic=True)
    assert frames.parse(again, kind).SerializeToString(deterministic=True) == again
    match message:
        case runtime_pb2.GenerateRequest():
            _generate(message)
        case request_pb2.InferenceRequest():
            _infer(message)
        case app_pb2.Done():
            assert (errors.from_done(message) is None) == (message.status == app_pb2.STATUS_OK)


def request(data: bytes) -> None:
    """A user's request to an app."""
    try:
        message = frames.parse(data, request_pb2.InferenceRequest)
    except ProtocolError:
        return
    _infer(message)


def _infer(message: request_pb2.InferenceRequest) -> None:
    """What an app does not refuse, a runtime does not refuse either."""
    refusal = None
    try:
        asked = model().generate_request(message, _LIMITS, "id")
    except RefusalError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status != app_pb2.STATUS_OK
        assert refusal.detail
        return
    assert 1 <= asked.max_tokens <= _LIMITS.output_tokens
    assert len(asked.token_ids) + asked.max_tokens <= model().context_tokens
    assert not set(asked.token_ids) & set(model().tokenizer.control_tokens.values()) or message.messages
    _generate(runtime_pb2.GenerateRequest.FromString(asked.SerializeToString()), refused=False)


def _generate(message: runtime_pb2.GenerateRequest, *, refused: bool = True) -> None:
    limits, refusal = bounds(), None
    try:
        checked = check(message, limits)
    except RequestRefusedError as error:
        refusal = error
    if refusal is not None:
        assert refused, refusal.detail
        assert refusal.detail
        return
    assert 0 < len(checked.prompt) < limits.max_length
    assert max(checked.prompt) < limits.vocab_size
    assert 1 <= len(checked.params) <= MAX_CHOICES
    assert checked.max_tokens >= max(1, checked.min_tokens)
    assert checked.logprobs is None or 0 <= checked.logprobs <= MAX_LOGPROBS
    for params in checked.params:
        assert 0 <= params.temperature < math.inf
        assert all(math.isfinite(bias) for bias in params.logit_bias.values())


# --- conversations ---

_TURN: Final = "{{ '<|im_start|>' + m.role + '\\n' }}%s{{ '<|im_end|>\\n' }}"
_CALLS: Final = (
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
)
# As families of models write them, and some that make it as easy as can be.
_TEMPLATES: Final = MappingProxyType(
    {
        "whole": _TURN % "{{ m.content }}",
        "trimmed": _TURN % ("{{ m.content | trim }}" + _CALLS),
        "sandwich": _TURN % "<|{{ m.content.strip() }}|>",
        "opened": _TURN % "<|{{ m.content }}{{ m.name }}",
        "closed": _TURN % "{{ m.tool_call_id }}{{ m.content | trim }}|>",
        "twice": _TURN % "{{ m.content }}{{ m.content }}",
        "json": _TURN % "{{ m | tojson }}",
        "ascii": _TURN % ("{{ m.content | tojson(ensure_ascii=True) }}" + _CALLS),
        "split": _TURN % "{{ m.content.split('<|im_end|>') | join('') }}",
        "halves": _TURN % "{{ m.content.split('|') | join('|') }}",
    }
)
NAMES: Final = tuple(_TEMPLATES)
_ROLES: Final[tuple[Role, ...]] = ("user", "assistant", "system", "tool")


@functools.cache
def _template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    info = TokenizerInfo(end_of_turn_ids=(2,), special_tokens={})
    source = f"{{% for m in messages %}}{_TEMPLATES[name]}{{% endfor %}}{{{{ tools | tojson }}}}"
    return ChatTemplate(source, tokenizer, info)


def template(data: bytes) -> None:
    """A conversation: byte 0 chooses the template, byte 1 says where texts go; texts are separated by byte 255."""
    if len(data) < 2:
        return
    texts = [text.decode(errors="replace") for text in data[2:].split(b"\xff")][:8]
    conversation = [_message(data[1] + place, text) for place, text in enumerate(texts)]
    tools: list[dict[str, Any]] = []
    if data[1] & 64:
        tools = [{"type": "function", "function": {"name": texts[0], "parameters": {texts[-1]: [texts[0]]}}}]
    try:
        ids = _template(NAMES[data[0] % len(NAMES)], model().tokenizer).encode(conversation, tools=tools)
    except ChatError:
        return
    control = set(model().tokenizer.control_tokens.values())
    assert [id_ for id_ in ids if id_ in control] == [1, 2] * len(texts), "somebody forged a control token"
    if data[0] % len(NAMES) == 0 and not tools:
        said = "".join(f"{message.role}\n{message.content}\n" for message in conversation)
        assert model().tokenizer.decode(ids) == said + "null"


def _message(choice: int, text: str) -> ChatMessage:
    role = _ROLES[choice % 4]
    if choice & 16 and role == "assistant":
        call = ToolCall(id=text, name=text, arguments={text: [text, {text: 1}]})
        return ChatMessage(role=role, content=text, tool_calls=(call,))
    return ChatMessage(
        role=role,
        content=text,
        tool_call_id=text if choice & 32 else "",
        name=text if choice & 8 else "",
    )
