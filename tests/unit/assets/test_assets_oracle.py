"""Token ids, compared with what transformers makes of the same files."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tie.assets.build import create_bundle, read_source
from tie.assets.chat import ChatMessage, ChatTemplate, ToolCall
from tie.assets.sample import write_sample_model
from tie.assets.tokenizer import load_tokenizer

pytestmark = pytest.mark.oracle

# Constructs that published templates use: namespaces, loop controls, tojson, tests, string methods, tools.
TOOL_TEMPLATE = """
{%- set ns = namespace(first=true) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not message.name is defined %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content.lstrip('\\n') | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + call.function.name + (call.function.arguments | tojson(indent=1)) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def _reference(bundle):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bundle.path("tokenizer.json")),
        chat_template=bundle.read("chat_template.jinja").decode(),
        **bundle.manifest.tokenizer.special_tokens,
    )


def _apply(reference, messages, **options) -> list[int]:
    return reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.fixture(scope="module")
def reference(demo):
    return _reference(demo)


@pytest.fixture(scope="module")
def from_gguf(demo_weights):
    """The tokenizer that transformers itself makes of the GGUF file."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_weights.parent, gguf_file=demo_weights.name)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PROSE = st.lists(
    st.sampled_from(
        [
            "Hello",
            " world",
            "\n\n",
            "  ",
            "12345",
            "don't",
            " I'LL",
            "naïve",
            " 日本",
            "🎉",
            "\t",
            "x=1;",
            " \u00a0",
            "'s",
        ]
    ),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(text=st.one_of(TEXT, PROSE))
def test_encoding(demo_tokenizer, reference, text):
    assert demo_tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(text=PROSE)
def test_tokenizer_made_from_gguf(demo_tokenizer, from_gguf, text):
    # transformers does not read the pre-tokenizer's name and leaves digits together: compare without them.
    text = "".join(character for character in text if not character.isdigit())
    assert demo_tokenizer.encode(text) == from_gguf.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_decoding(demo_tokenizer, reference, ids):
    assert demo_tokenizer.decode(ids) == reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@settings(deadline=None)
@given(contents=st.lists(st.one_of(TEXT, PROSE), min_size=1, max_size=4), prompt=st.booleans())
def test_chat(demo, demo_tokenizer, reference, contents, prompt):
    # Those are encoded differently on purpose.
    assume(not any(token in content for content in contents for token in demo_tokenizer.control_tokens))
    roles = [*(["system"] if len(contents) % 2 else []), *(["user", "assistant"] * 4)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    template = ChatTemplate.load(demo, demo_tokenizer)
    ours = template.encode([ChatMessage(**message) for message in messages], add_generation_prompt=prompt)
    assert ours == _apply(reference, messages, add_generation_prompt=prompt)


@pytest.fixture(scope="module")
def tool_templates(demo, demo_tokenizer):
    reference = _reference(demo)
    reference.chat_template = TOOL_TEMPLATE
    return ChatTemplate(TOOL_TEMPLATE, demo_tokenizer, demo.manifest.tokenizer), reference


@settings(deadline=None)
@given(content=PROSE, argument=PROSE, description=TEXT)
def test_chat_with_tools(demo_tokenizer, tool_templates, content, argument, description):
    assume(not any(token in description for token in demo_tokenizer.control_tokens))
    template, reference = tool_templates
    parameters = {"type": "object", "properties": {"name": {"type": "string", "description": description}}}
    tools = [{"type": "function", "function": {"name": "find", "description": description, "parameters": parameters}}]
    call = {"type": "function", "function": {"name": "find", "arguments": {"name": argument, "<": 1}}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": argument, "name": "find"},
        {"role": "tool", "content": argument},
    ]
    ours = template.encode(
        [
            ChatMessage(role="user", content=content),
            ChatMessage(role="assistant", tool_calls=(ToolCall(name="find", arguments={"name": argument, "<": 1}),)),
            ChatMessage(role="tool", content=argument, name="find"),
            ChatMessage(role="tool", content=argument),
        ],
        tools=tools,
    )
    assert ours == _apply(reference, messages, tools=tools, add_generation_prompt=True)


@pytest.mark.parametrize("content", ["<", ">quote", "a <b> |", "name", "end", "<|", "|>", "im_end", "<file", "#>"])
def test_texts_that_look_like_pieces_of_control_tokens(demo, demo_tokenizer, reference, content):
    template = ChatTemplate.load(demo, demo_tokenizer)
    ours = template.encode([ChatMessage(role="user", content=content)])
    assert ours == _apply(reference, [{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_sample_models_load_in_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(
        directory, kind=kind, seed=0, layers=2, hidden_size=64, heads=4, kv_heads=2, context_tokens=64, tied=False
    )
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.model_type == kind
    bundle = create_bundle(read_source(directory), tmp_path / "bundle")
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == model.config.hidden_size
    reference = _reference(bundle)
    template = ChatTemplate.load(bundle, load_tokenizer(bundle))
    assert template.encode([ChatMessage(role="user", content="hé")]) == _apply(
        reference, [{"role": "user", "content": "hé"}], add_generation_prompt=True
    )
