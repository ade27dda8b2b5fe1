"""A bundle as the source of another one: the same model with other system prompts, its weights shared."""

from pathlib import Path

from tie.assets.bundle import open_bundle
from tie.assets.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE
from tie.assets.source import ModelSource
from tie.assets.tensors import load_index


def read_bundle(directory: Path) -> ModelSource:
    """The model of a bundle.

    Raises:
        BundleError: it is damaged, weights aside: those are hashed when the new bundle is made.
    """
    bundle = open_bundle(directory)
    manifest = bundle.manifest
    template = bundle.read(CHAT_TEMPLATE_FILE).decode() if CHAT_TEMPLATE_FILE in manifest.files else None
    return ModelSource(
        name=manifest.model,
        architecture=manifest.architecture,
        tokenizer=manifest.tokenizer,
        tokenizer_json=bundle.read(TOKENIZER_FILE),
        chat_template=template,
        weights={name: bundle.path(name) for name in manifest.weights},
        weights_format=manifest.weights_format,
        tensors=load_index(bundle).tensors,
    )
