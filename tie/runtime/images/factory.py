"""Puts together what looks at images, for a model that takes them."""

import msgspec

from tie.assets.images import MAX_IMAGE_BYTES
from tie.assets.manifest import Manifest
from tie.daemon.errors import ConfigError
from tie.runtime.images.decoders import Decoders
from tie.runtime.images.image_encoder import ImageEncoder
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import Preparation
from tie.runtime.step_executor import Executor


def make_image_encoder(manifest: Manifest, executor: Executor) -> ImageEncoder | None:
    """What the model sees with; None where it takes no images.

    Raises:
        ConfigError: the bundle wants images prepared in a way that cannot be.
    """
    vision = executor.vision
    if manifest.images is None or vision is None:
        return None
    how = msgspec.structs.asdict(manifest.images)
    del how["token_id"]
    try:
        preparation = Preparation(**how)
    except ValueError as error:
        raise ConfigError(f"the bundle's images: {error}") from error
    decoders = Decoders(Limits(file_bytes=MAX_IMAGE_BYTES), preparation)
    return ImageEncoder(decoders, vision.encode, preparation.most_tiles * preparation.side**2 * 3)
