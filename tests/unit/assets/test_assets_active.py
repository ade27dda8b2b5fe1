"""Pointing a node at another bundle: atomically, or not at all."""

import os

import pytest

from tie.assets import active
from tie.assets import manifest as manifests
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle
from tie.daemon.errors import BundleError


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundles")
    return [make_sample_bundle(directory / name, seed=seed).directory for seed, name in enumerate("ab")]


def test_the_link_is_made_and_replaced(bundles, tmp_path):
    link = tmp_path / "assets" / active.LINK
    for bundle in (*bundles, bundles[0]):
        opened = active.point(link, bundle)
        assert open_bundle(link).manifest == opened.manifest == open_bundle(bundle).manifest
    assert os.listdir(link.parent) == [active.LINK]  # noqa: PTH208 (nothing is left of the exchange)


def test_a_link_that_is_pointed_at_itself_still_leads_to_its_bundle(bundles, tmp_path):
    link = tmp_path / active.LINK
    (tmp_path / "other").symlink_to(bundles[1])
    for bundle, directory in ((bundles[0], bundles[0]), (link, bundles[0]), (tmp_path / "other", bundles[1])):
        opened = active.point(link, bundle)
        assert link.readlink() == directory.resolve()
        assert open_bundle(link).manifest == opened.manifest


def test_what_is_open_stays_what_it_was(bundles, tmp_path, monkeypatch):
    link, decode = tmp_path / active.LINK, manifests.decode
    active.point(link, bundles[0])

    def meanwhile(data):
        other.replace(link)
        return decode(data)

    other = tmp_path / "other"
    other.symlink_to(bundles[1])
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "decode", meanwhile)
        opened = open_bundle(link)
    assert link.readlink() == bundles[1]
    opened.verify()
    assert opened == open_bundle(bundles[0])


def test_nothing_but_a_link_is_replaced(bundles, tmp_path):
    (tmp_path / "fixed").mkdir()
    with pytest.raises(BundleError, match="not a link"):
        active.point(tmp_path / "fixed", bundles[0])
    assert (tmp_path / "fixed").is_dir()


def test_what_is_no_bundle_is_not_pointed_at(bundles, tmp_path):
    link = tmp_path / active.LINK
    active.point(link, bundles[0])
    with pytest.raises(BundleError):
        active.point(link, tmp_path)
    assert link.readlink() == bundles[0]


def test_a_place_that_cannot_be_written_is_an_error(bundles, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot write"):
        active.point(tmp_path / "file" / "link", bundles[0])
