"""First inputs of each target, made from what the code itself writes. `python tests/fuzz/seeds.py` writes the files."""

import json

from fuzz_entry import FORMAT
from fuzz_targets import CORPUS, EXPECTED, INDICES, PAGE
from seeds_of_requests import seeds_of_requests

from kvxfer.header import Header
from tie.proto import store_pb2
from tie.warden.manifest import Manifest, Segment

_HELLO = {"role": "user", "content": "hi"}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
_CHATS = (
    {
        "messages": [_HELLO],
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["s"],
        "n": 2,
        "seed": -1,
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
    {"messages": [_HELLO], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}, "user": "u"},
    {"messages": [_HELLO], "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 9, "store": None},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
)
_PROMPT = {"prompt": ["p"], "logprobs": 1, "stop": "s", "logit_bias": {"7": -1}, "echo": False}
_WRITTEN = (
    b'Well. <tool_call>\n{"name": "f", "arguments": {"a": ["}"]}}\n</tool_call>\n and <tool_call',
    b' {"name": "weather", "parameters": {"a": {"b": "\\""}}} ',
    b'<tool_call>{"name": "stranger", "arguments": {}}</tool_call>',
)


def _request(**kind: object) -> bytes:
    message = store_pb2.StoreRequest(**kind).SerializeToString()
    return bytes([len(message)]) + message


def seeds() -> dict[str, list[bytes]]:
    """Target → inputs."""
    page = EXPECTED.header(0, 3).pack()[:436]
    other = Header("m" * 128, "ré", "layout", 1, 1, 1, 1 << 20, 1).pack()[:436]
    new, put = _request(new=store_pb2.New(size=5000)), _request(put=store_pb2.Put(index=INDICES[0], ttl_ms=9))
    get, drop = _request(get=store_pb2.Get(index=INDICES[0])), _request(drop=store_pb2.Drop(index=INDICES[0]))
    renew, large = _request(renew=store_pb2.Renew(index=INDICES[0])), _request(new=store_pb2.New(size=1 << 15))
    other_put = _request(put=store_pb2.Put(index=INDICES[1]))
    transient = _request(new=store_pb2.New(size=5000, transient=True))
    done = store_pb2.StoreReply(outcome=store_pb2.OUTCOME_DONE, size=PAGE).SerializeToString()
    miss = store_pb2.StoreReply(outcome=store_pb2.OUTCOME_MISS).SerializeToString()
    head = Manifest(FORMAT, 0, tuple(range(12)), (Segment(INDICES[0], 2, bytes(32)), Segment(INDICES[1], 1, bytes(32))))
    messages = b"\2\0\0" + b"\3\0\1\3\0\2\3\0\3" + b"\4\0\3"
    return {
        "header": [b"\0" + page, b"\1" + page, b"\1" + other, b"\0\3\0\0\0\3", b"\0\5\0\2"],
        "import": [
            b"\0\3\5" + messages,
            b"\1\3\5" + messages,
            b"\0\2\2\2\0\0\3\0\2",
            b"\x08\3\5\x0c\0\1" + messages,
            b"\0\0\5\2\0\0\x43\0\1",
        ],
        "store": [
            new + b"\xff" + put + get + renew + drop + get,
            new + put + b"\xff" + put + b"\0" + get,
            (large + b"\xff" + put + large + b"\xff" + other_put) * 2 + get,
            new + b"\0" + put,
            transient + b"\xff" + put + get + renew + b"\0" + get,
        ],
        "reply": [
            b"\1" + done,
            b"\5" + done,
            b"\2" + done,
            b"\0" + miss,
            b"\x09" + done,
            b"\x10" + done,
            b"\x18" + miss,
        ],
        "entry": [
            b"\0",
            b"\0\x00\x00\x01",
            b"\1",
            b"\2" + bytes(96),
            b"\3warden\r\n",
            b"\4" + head.encode(),
            b"\6" + (4096).to_bytes(4, "little"),
            b"\6" + len(head.encode()).to_bytes(4, "little") + head.encode(),
            b"\4" + Manifest(FORMAT, 4, tuple(range(8)), (), bytes(32)).encode(),
        ],
        "proxy": [
            *(b"\0" + json.dumps({"model": "m", **body}).encode() for body in _CHATS),
            b"\2" + json.dumps({"model": "m", **_PROMPT}).encode(),
            *(flags + text for text in _WRITTEN for flags in (b"\1", b"\3", b"\x0d")),
        ],
        # One file unchanged, then each kind of change once.
        "image": [bytes([7, 0x80]), *(bytes([number * 13, 0x80, number, 1, 0, 3, 0]) for number in range(16))],
        **seeds_of_requests(),
    }


def main() -> None:
    """Writes them."""
    for target, inputs in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (CORPUS / target / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
